"""Compiled models and parts of models train with ZeRO as torch trains them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from tests.pool import Pool

compiled = partial(torch.compile, backend="aot_eager")


class Block(nn.Module):
    """Of several chunks, so that a compiled one waits for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x).mean()


def _compile_before(model: Net, how: str) -> None:
    if how == "model before":
        model.compile(backend="aot_eager")
    for number, block in enumerate(model.blocks):
        if how == "blocks before":
            block.compile(backend="aot_eager")
        if how == "wrapped blocks before":
            wrapped: Any = compiled(block)
            model.blocks[number] = wrapped


def _compile_after(model: Any, how: str) -> Any:
    if how == "blocks after":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if how == "forward after":
        model.forward = compiled(model.forward)
    return compiled(model) if how == "model after" else model


def trained(
    world: World, stage: int, how: str, recomputes: bool, chunk_mb: Any, steps: int
) -> float:
    """The largest difference from torch, in losses and parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    twin = Net(recomputes).double()
    model = copy.deepcopy(twin)
    _compile_before(model, how)
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=chunk_mb, verbose=False))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = booster.boost(model, inner)
    call, plain = _compile_after(model, how), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    worst, probe = 0.0, torch.randn(2, 8).double()
    for number in range(steps):
        # Another length compiles anew.
        xs = torch.randn(world.size, 3 - (number == 1), 8).double()
        loss, losses = call(xs[world.rank]), [twin(x) for x in xs]
        worst = max(worst, float((loss - losses[world.rank]).detach().abs()))
        booster.backward(loss, optimizer)
        torch.stack(losses).mean().backward()
        for stepped in (optimizer, plain):
            stepped.step()
            stepped.zero_grad()
    with torch.no_grad():
        worst = max(worst, float((call(probe) - twin(probe)).abs()))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(worst, *(float((p.detach() - q.detach()).abs().max()) for p, q in pairs))


def several(world: World, cases: list[tuple[int, str, bool, Any, int]]) -> list[float]:
    return [trained(world, *case) for case in cases]


@pytest.mark.deadline(300)
def test_what_is_compiled_before_or_after_boost_trains_as_torch_does(pool: Pool) -> None:
    cases = [
        (3, "blocks before", False, 0.0005, 2),
        (3, "model after", True, 0.0005, 2),
    ]
    for worst in pool.run(several, 2, cases, deadline_s=150):
        assert worst == pytest.approx([0.0] * len(cases), abs=1e-12)
