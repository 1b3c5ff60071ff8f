"""Random programs under a memory limit: graphs that are alive while their chunks leave."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gulliver._compat import storage_users
from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from gulliver.errors import GulliverError
from gulliver.memory.traffic import Traffic

WIDTH, LAYERS, STEPS = 48, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks that forward uses, and some that only losses call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.direct = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, again: frozenset[int] = frozenset()) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number in again else block(x)
        return self.head(x)


class Program:
    """A random training loop, the same for every model that it is run with.

    Args:
        seed: seed of what the loop does.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def run(
        self,
        model: Net,
        optimizer: Any,
        backward: Callable[[Tensor], None],
        gradients: Callable[[], dict[str, Tensor | None]],
        evict: Callable[[], None],
    ) -> list[dict[str, Tensor]]:
        draw, found = random.Random(self.seed), []
        for step in range(STEPS):
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)).double()
            backward(self._loss(model, x, draw, evict))
            if draw.random() < 0.3:
                backward(self._loss(model, x, draw, evict))
            found.append({k: g.clone() for k, g in gradients().items() if g is not None})
            if draw.random() < 0.4:
                evict()
            optimizer.step()
            optimizer.zero_grad()
            if draw.random() < 0.5:
                [p.detach().clone() for p in model.parameters()]
        return found

    def _loss(
        self, model: Net, x: Tensor, draw: random.Random, evict: Callable[[], None]
    ) -> Tensor:
        terms = [self._forward(model, x, draw).square().mean()]
        for _ in range(draw.randrange(5)):
            kind = draw.randrange(7)
            block = draw.choice([*model.blocks, *model.direct])
            if kind == 0:
                terms.append(self._forward(model, x.cos(), draw).sin().mean())
            elif kind == 1:
                with torch.no_grad():
                    model(x)
            elif kind == 2:
                terms.append(checkpoint(block, x, use_reentrant=False).sin().mean())
            elif kind == 3:
                with saved_tensors_hooks(lambda t: t, lambda t: t):
                    terms.append(block(x).cos().mean())
            elif kind == 4:
                terms.append(draw.choice([*model.parameters()]).square().sum() / 50)
            else:
                terms.append(model.head(block(x)).sin().mean())
            if draw.random() < 0.5:
                evict()
        return torch.stack(terms).sum()

    @staticmethod
    def _forward(model: Net, x: Tensor, draw: random.Random) -> Tensor:
        again = frozenset(n for n in range(LAYERS) if draw.random() < 0.3)
        if draw.random() < 0.2:
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                return model(x, again)
        return model(x, again)


def _poisoned(give: Any) -> Any:
    """Overwrites memory that the manager takes back to use again, as its next user would."""

    def given(self: Traffic, memory: Tensor, trusted: bool = False) -> None:
        if trusted or storage_users(memory) == 1:
            with torch.no_grad():
                memory.fill_(0xFF)
        give(self, memory, trusted)

    return given


def _under_limit(program: Program, model: Net, folder: Path) -> list[dict[str, Tensor]]:
    plugin = GeminiPlugin("3MiB", disk=f"{folder}:64MiB", chunk_mb=0.05, verbose=False)
    booster = Booster(plugin=plugin)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, inner)
    manager = optimizer.shards.manager
    budget = manager.budget

    def evict() -> None:
        manager.release_idle()
        for size in range(2**16, budget, 2**16):
            try:
                manager.set_budget(size)
                break
            except GulliverError:
                continue
        manager.set_budget(budget)

    def backward(loss: Tensor) -> None:
        booster.backward(loss, optimizer)

    with patch.object(Traffic, "give", _poisoned(Traffic.give)):
        try:
            return program.run(model, optimizer, backward, optimizer.full_gradients, evict)
        finally:
            booster.release(model, optimizer)


def _plain(program: Program, model: Net) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def gradients() -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in model.named_parameters()}

    return program.run(model, optimizer, lambda loss: loss.backward(), gradients, lambda: None)


def compare(seed: int, folder: Path) -> float:
    """Returns the largest difference between gradients under a limit and those of plain torch."""
    torch.manual_seed(seed)
    model = Net().double()
    program = Program(seed)
    want = _plain(program, copy.deepcopy(model))
    got = _under_limit(program, model, folder)
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a.keys() == b.keys(), step
    return max(
        float((a[k] - b[k]).abs().nan_to_num(9.0).max())
        for a, b in zip(want, got, strict=True)
        for k in a
    )


@pytest.mark.parametrize("seed", range(6))
def test_graphs_outside_of_forward_survive_eviction(seed: int, tmp_path: Path) -> None:
    assert compare(seed, tmp_path) < 1e-10
