"""Random unequal steps of an odd model under random limits: exact, and within the budget."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
from gulliver.booster import limited as _limited
from gulliver.comm import World
from gulliver.data_centric.steps import MicroBatch, RankGroup, StepPlan
from tests.pool import Pool
from tests.random_limits import Watched
from tests.tiers import DEPTH, WORDS, Odd

SAMPLES, STEPS = 64, 4


class Again(Odd):
    """The odd model, some of whose layers backward computes again."""

    def __init__(self, again: int) -> None:
        super().__init__()
        self.again = again

    def forward(self, ids: Tensor, skip: int = -1) -> Tensor:
        x = self.embed(ids)
        x = x + self.frozen(x) + x @ self.down @ self.up
        for number, layer in enumerate(self.layers):
            if number == skip:
                continue
            if number % 4 < self.again and torch.is_grad_enabled():
                x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False))
            else:
                x = x + torch.tanh(layer(x))
        x = x + self.layers[3](x)
        return F.linear(self.norm(x), self.embed.weight)


@dataclass
class AnyPlans:
    """Steps of any samples, which lie on any ranks, one in each micro-batch."""

    ranks: int
    seed: int
    degrees: tuple[int, ...] = (1,)
    signature: str = "any"
    skipped: tuple[int, ...] = ()
    costs: Any = None
    step: int = 0

    def position(self) -> int:
        """The next step."""
        return self.step

    def samples(self, step: int) -> list[int]:
        """Samples of a step, the same for any number of ranks."""
        draw = random.Random(f"{self.seed} {step}")
        return draw.sample(range(SAMPLES), draw.randint(1, 6))

    def __iter__(self) -> Iterator[StepPlan]:
        while self.step < STEPS:
            step, self.step = self.step, self.step + 1
            draw = random.Random(f"{self.seed} {step} {self.ranks}")
            work = [list[MicroBatch]() for _ in range(self.ranks)]
            for index in self.samples(step):
                work[draw.randrange(self.ranks)].append(MicroBatch(0, (index,), 0, ()))
            groups = (RankGroup((rank,), tuple(batches)) for rank, batches in enumerate(work))
            yield StepPlan(step, 0, tuple(groups), 0.0, 0.0, (), ())


class Texts:
    """Texts of any length, each of which skips another layer."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(WORDS, (2 + index % 4, 5), generator=generator)
        return {"ids": ids, "skip": index % (DEPTH + 3)}


def _loss(model: nn.Module, ids: Tensor, skip: int) -> Tensor:
    return F.cross_entropy(model(ids, skip=skip).flatten(0, 1), ids.roll(1, 1).flatten())


def _made(seed: int, again: int, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Again(again).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "AdamW":
        return model, torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)
    return model, torch.optim.SGD(trained, lr=1e-2, momentum=0.9)


def _plain(seed: int, kind: str, clip: float) -> dict[str, Tensor]:
    """Weights of one process that takes the same samples."""
    model, optimizer = _made(seed, 0, kind)
    for step in range(STEPS):
        samples = AnyPlans(1, seed).samples(step)
        for index in samples:
            (_loss(model, **Texts()[index]) / len(samples)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _run(world: World, seed: int, folder: str) -> tuple[float, int]:
    """Largest error of the weights, and bytes held beyond the budget."""
    draw = random.Random(seed)
    again, kind = draw.choice((0, 1, 4)), draw.choice(("AdamW", "SGD"))
    clip, share = draw.choice((0.0, 0.3)), draw.choice((0.0, 0.0, 0.02, 0.2, 1.0))
    size, evaluates = draw.choice((0.004, 0.01, 0.03, 0.1)), draw.random() < 0.5

    def plugin(limit: int | str) -> DataCentricPlugin:
        disk = f"{folder}:64MiB"
        return DataCentricPlugin(
            memory_limit=limit, disk=disk, chunk_mb=size, max_norm=clip, verbose=False
        )

    roomy = plugin("1GiB").make_plan(*_made(seed, again, kind)).predicted.moved
    assert roomy is not None
    booster = Booster(plugin=plugin(int(roomy.minimum * (1 + share))))
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(*_made(seed, again, kind))
    assert optimizer.shards.manager is not None
    watched, plans = Watched(optimizer.shards.manager), AnyPlans(world.size, seed)
    planner: Any = plans
    loader = DataCentricLoader(planner, Texts(), model, optimizer, collate=lambda batch: batch[0])
    for step in loader:
        if evaluates:
            with torch.no_grad():
                _loss(model, **Texts()[99])
        for batch in step:
            step.backward(_loss(model, **batch.data))
        optimizer.step()
        optimizer.zero_grad()
    found = dict(model.state_dict())
    wanted = _plain(seed, kind, clip)
    error = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
    booster.close()
    return error, watched.over


def _several(world: World, seeds: range, folder: str) -> dict[int, tuple[float, int]]:
    return {seed: _run(world, seed, folder) for seed in seeds}


@pytest.mark.full
@pytest.mark.deadline(900)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_random_steps_under_random_limits_are_those_of_one_process(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    seeds = range(100 * ranks, 100 * ranks + 8)
    for found in pool.run(_several, ranks, seeds, str(tmp_path), deadline_s=800):
        for seed, (error, over) in found.items():
            assert error <= 1e-10, seed
            assert over <= 0, seed
