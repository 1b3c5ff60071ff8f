"""Random loops around DDP, which call parts of the model directly, against plain torch."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import TorchDDPPlugin
from gulliver.comm import World
from tests.pool import Pool

WIDTH, STEPS = 6, 4


class Towers(nn.Module):
    """Two towers and a head, with a loss that is a method."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.left(x).sin() * self.right(x).cos())

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.left(x)).square().mean()


def _loss(model: Any, x: Tensor, kind: int) -> Tensor:
    if kind == 0:
        return model(x).square().mean()
    if kind == 1:
        return model.loss(x)
    if kind == 2:
        return (model.left(x) - model.right(x)).square().mean()
    if kind == 3:
        return model.right.weight.square().sum() * x.mean()
    return model(x).mean() + model.head(model.right(x)).sin().mean()


class Program:
    """What a random loop does; each rank has its own samples and losses.

    Args:
        seed: seed of what it does.
        ranks: number of ranks.
    """

    def __init__(self, seed: int, ranks: int) -> None:
        draw = random.Random(seed)
        self.steps = []
        for _ in range(STEPS):
            backwards = []
            for _ in range(draw.randint(1, 3)):
                waits, direct = draw.random() < 0.4, draw.random() < 0.6
                kinds = [draw.choice((1, 2, 3) if direct else (0, 4)) for _ in range(ranks)]
                backwards.append((waits, kinds, draw.randrange(10**6)))
            self.steps.append((backwards, draw.choice(("", "norm", "value", "read"))))


def _sample(seed: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed + rank)
    return torch.randn(5, WIDTH, generator=draw, dtype=torch.float64)


def _plain(program: Program, model: Towers, ranks: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for backwards, what in program.steps:
        for _, kinds, seed in backwards:
            for rank in range(ranks):
                (_loss(model, _sample(seed, rank), kinds[rank]) / ranks).backward()
        if what == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif what == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _run(world: World, seeds: range) -> list[float]:
    """The largest difference to plain torch of each program."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        model = Towers().double()
        program = Program(seed, world.size)
        want = _plain(program, copy.deepcopy(model), world.size)
        booster = Booster(plugin=TorchDDPPlugin(verbose=False))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        boosted, optimizer, *_ = booster.boost(model, inner)
        for backwards, what in program.steps:
            for waits, kinds, seed in backwards:
                context = booster.no_sync(boosted, optimizer) if waits else nullcontext()
                with context:
                    loss = _loss(boosted, _sample(seed, world.rank), kinds[world.rank])
                    booster.backward(loss, optimizer)
            if what == "norm":
                optimizer.clip_grad_by_norm(0.1)
            elif what == "value":
                optimizer.clip_grad_by_value(0.01)
            elif what == "read":
                optimizer.full_gradients()
            optimizer.step()
            optimizer.zero_grad()
        difference = max(
            float((p - w).abs().max())
            for p, w in zip(map(Tensor.detach, model.parameters()), want, strict=True)
        )
        found.append(difference)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_reduces_what_is_called_past_its_forward_and_inside_no_sync(
    pool: Pool, ranks: int
) -> None:
    for found in pool.run(_run, ranks, range(8)):
        assert max(found) < 1e-9
