"""The predicted peak of a step is what it holds, counted where buffers are made and in tensors."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from benchmarks._models import Task, gpt, stdit
from benchmarks._peers import boosted
from torch import nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.comm.host import host_team
from gulliver.memory.buffers import Presence
from gulliver.parallel import ZeroOptimizer
from tests.covering import some
from tests.pool import Pool


def _peaks(world: World, model: str, shared: str) -> list[tuple[int, int, int, int]]:
    """Bytes of the plan, of the optimizer, counted ones, and those of storages that are alive."""
    os.environ["GULLIVER_SHARED_MEMORY"] = shared
    task: Task = gpt(32, 4, 2, 8) if model == "gpt" else stdit(1)
    net, found = task.model(), []
    size = sum(p.nbytes for p in net.parameters())
    for stage in range(4):
        plugin = LowLevelZeroPlugin(stage, chunk_mb=size / 12 / 2**20, verbose=False)
        plan = plugin.make_plan(net, torch.optim.AdamW(net.parameters()))
        contestant = boosted(f"ZeRO {stage}", task, plugin)
        optimizer = contestant.optimizer
        read = any(c.chunk.gradients.direct for c in optimizer.chunks)
        assert read == (shared == "on" and stage > 0 and host_team(None) is not None)
        for _ in range(2):
            contestant.advance(world.rank, world.size)
        optimizer.held_bytes.restart()
        seen = contestant.peak_bytes(world.rank, world.size)
        counted = sum(optimizer.held_bytes.fullest.values())
        assert contestant.planned is not None
        found.append((plan.memory.total, contestant.planned(), counted, seen))
    return found


# By default each value occurs once at least; four ranks of the larger model take 30 s more.
@pytest.mark.parametrize(
    ("model", "ranks", "shared"),
    some(
        list(itertools.product(("gpt", "stdit"), (2, 4), ("on", "off"))),
        [("gpt", 2, "on"), ("gpt", 4, "off"), ("stdit", 2, "on")],
    ),
)
def test_the_predicted_peak_is_what_is_held(
    pool: Pool, model: str, ranks: int, shared: str
) -> None:
    for rank in pool.run(_peaks, ranks, model, shared):
        for planned, computed, counted, seen in rank:
            assert 0.98 * seen <= planned <= 1.03 * seen, rank
            assert counted == pytest.approx(computed, rel=0.03), rank
            assert seen <= counted, rank


class Late(nn.Module):
    """A block as those of transformers: its norms are registered behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.before, self.between = nn.LayerNorm(64), nn.LayerNorm(128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(self.before(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Late() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _late(world: World) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Blocks()
    inner = torch.optim.AdamW(model.parameters())
    plan = LowLevelZeroPlugin(3, chunk_mb=0.03, verbose=False).make_plan(model, inner)
    booster = Booster(plan=plan, verbose=False)
    model, optimizer, *_ = booster.boost(model, inner)
    for _ in range(3):
        booster.backward(model(torch.ones(2, 64)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    held = sum(optimizer.held_bytes.fullest.values())
    return plan.memory.total, held


def test_the_plan_knows_that_norms_are_used_before_the_layers_they_stand_behind(pool: Pool) -> None:
    for planned, held in pool.run(_late, 2):
        assert planned == pytest.approx(held, rel=0.03)


def _by_step(world: World) -> tuple[list[int], int, bool]:
    """Most bytes of parameters that are whole at once in each of three steps, and those of all."""
    torch.manual_seed(0)
    model = Blocks()
    inner = torch.optim.AdamW(model.parameters())
    plugin = LowLevelZeroPlugin(3, chunk_mb=0.01, verbose=False)  # each matrix has its own chunk
    plan, empty = plugin.make_plan(model, inner), Blocks().to("meta")
    same = plugin.make_plan(empty, torch.optim.AdamW(empty.parameters())).memory == plan.memory
    model, optimizer, *_ = Booster(plan=plan, verbose=False).boost(model, inner)
    assert isinstance(optimizer, ZeroOptimizer)
    gatherer, steps = optimizer.gatherer, list[int]()
    start = gatherer.start

    def started(sharded: Any, exact: bool = False) -> None:
        start(sharded, exact)
        whole = [c.chunk for c in gatherer.chunks if c.presence is not Presence.ABSENT]
        steps[-1] = max(steps[-1], sum(chunk.data.nbytes for chunk in whole))

    gatherer.start = started
    for _ in range(3):
        steps.append(0)
        optimizer.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return steps, sum(p.nbytes for p in empty.parameters()), same


def test_the_first_step_gathers_no_more_at_once_than_the_others(pool: Pool) -> None:
    for steps, whole, same in pool.run(_by_step, 2):
        assert steps[0] == max(steps) < whole / 2, (steps, whole)
        assert same, "a model on meta is planned alike"


def _placed(world: World) -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        booster = Booster(LowLevelZeroPlugin(2, chunk_mb=0.0001, verbose=False))
        _, optimizer, *_ = booster.boost(model, make(model.parameters()))
        booster.backward(model(torch.ones(2, 5)).sum(), optimizer)
        optimizer.step()
        optimizer.gatherer.finish_all()
        for sharded in optimizer.chunks:
            for owned in sharded.owned:
                for key, value in optimizer.inner.state[owned].items():
                    if value.ndim:
                        buffer = sharded.chunk.moments[key].buffer
                        assert value.untyped_storage().data_ptr() == buffer.data_ptr(), key


def test_moments_lie_in_the_buffers_of_their_chunk(pool: Pool) -> None:
    pool.run(_placed, 2)
