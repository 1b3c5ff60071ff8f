"""Saves race with changes of what is saved: the file has the values at `save`, or the save fails.

`GULLIVER_TEST_RACES=500` runs more of them.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster
from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from tests.guarded import guarded

RACES = int(os.environ.get("GULLIVER_TEST_RACES", "36"))
SIDE = 900


class Teacher(nn.Module):
    """A trained layer, the average of it, and a buffer that forwards write."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.average = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.average.requires_grad_(False)
        self.register_buffer("queue", torch.zeros(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def train(teacher: Teacher, optimizer: Any) -> None:
    for parameter in teacher.student.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def pairs(teacher: Teacher) -> tuple[list[Tensor], list[Tensor]]:
    average, student = teacher.average.parameters(), teacher.student.parameters()
    return [p.detach() for p in average], [p.detach() for p in student]


def lerp(teacher: Teacher, optimizer: Any) -> None:
    for average, student in zip(*pairs(teacher), strict=True):
        average.lerp_(student, 0.5)


def foreach_lerp(teacher: Teacher, optimizer: Any) -> None:
    torch._foreach_lerp_(*pairs(teacher), 0.5)


def data(teacher: Teacher, optimizer: Any) -> None:
    for average, student in zip(
        teacher.average.parameters(), teacher.student.parameters(), strict=True
    ):
        average.data.mul_(0.5).add_(student.data, alpha=0.5)


def numpy(teacher: Teacher, optimizer: Any) -> None:
    for average, student in zip(*pairs(teacher), strict=True):
        average.numpy()[:] = student.numpy() + 1


def buffer(teacher: Teacher, optimizer: Any) -> None:
    queue: Tensor = teacher.queue  # type: ignore[assignment]
    queue.add_(1)


def step(teacher: Teacher, optimizer: Any) -> None:
    train(teacher, optimizer)
    foreach_lerp(teacher, optimizer)


CHANGES: list[Callable[[Teacher, Any], None]] = [lerp, foreach_lerp, data, numpy, buffer, step]


@pytest.mark.parametrize("boosted", [False, True])
@pytest.mark.parametrize("mode", ["shadow", "ring"])
def test_a_save_is_never_a_mixture_of_two_steps(
    tmp_path: Path, boosted: bool, mode: Literal["shadow", "ring"]
) -> None:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    torch.manual_seed(0)
    draw, teacher, booster = random.Random(0), Teacher(), Booster()
    optimizer: Any = torch.optim.AdamW(teacher.student.parameters(), 0.1, fused=True)
    model: Any = teacher
    if boosted:
        model, optimizer, *_ = booster.boost(teacher, optimizer)
    checkpointer = AsyncCheckpointer(tmp_path, keep=1, mode=mode)
    train(teacher, optimizer)
    for race in range(RACES // 4):
        wanted = {name: value.clone() for name, value in teacher.state_dict().items()}
        apart = {"apart": torch.rand(SIDE, SIDE), "race": race}
        kept = apart["apart"].clone()
        if boosted:
            booster.save(tmp_path, race, model, optimizer, state={"x": apart}, keep=1, mode=mode)
        else:
            state = {"model": teacher, "optimizer": optimizer, "x": apart}
            checkpointer.save(race, state)
        time.sleep(draw.random() * draw.choice([0.0, 0.002, 0.02]))
        CHANGES[race % len(CHANGES)](teacher, optimizer)
        apart["apart"].lerp_(torch.zeros(()), 0.5)
        (booster if boosted else checkpointer).wait()
        found = load(tmp_path).values
        assert found["x"]["race"] == race
        assert torch.equal(found["x"]["apart"], kept)
        for name, value in wanted.items():
            assert torch.equal(found["model"][name], value), (race, name)
    booster.close()
    checkpointer.close()
    adopt_world(None)


def test_versions_are_compared_by_the_saving_thread(tmp_path: Path) -> None:
    """Weights that are clipped by hand, at once: the step is right, or it is not saved."""
    weight, refused = torch.zeros(SIDE, SIDE), 0
    for race in range(RACES // 3):
        weight.fill_(race)
        checkpointer = AsyncCheckpointer(tmp_path / str(race))
        with guarded([weight]):
            checkpointer.save(1, {"model": {"weight": weight}})
        weight.lerp_(torch.full((), 1e3), 0.5)
        try:
            checkpointer.close()
        except GulliverError:
            refused += 1
            continue
        assert load(tmp_path / str(race)).values["model"]["weight"].eq(race).all()
    assert refused  # the version had changed before the pages were compared


def test_a_change_that_ends_after_the_copy_is_noticed(tmp_path: Path) -> None:
    """An operation raises the version when it has ended: here long after all is written."""
    weight, checkpointer = torch.zeros(SIDE, SIDE), AsyncCheckpointer(tmp_path)
    with guarded([weight]):
        checkpointer.save(1, {"model": {"weight": weight}})
    weight.numpy()[:] = 1.0
    time.sleep(0.5)
    torch.autograd.graph.increment_version(weight)
    with pytest.raises(GulliverError, match="weight"):
        checkpointer.close()
    assert not list(tmp_path.glob("step-*"))


def test_deleted_optimizer_releases_its_guard(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    optimizer = torch.optim.SGD([weight], 0.1)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        state = {"model": {"weight": weight}, "optimizer": optimizer}
        checkpointer.save(1, state)
        assert not checkpointer._snapshot.unguarded  # type: ignore[union-attr]
        checkpointer.wait()
        del optimizer, state
        gc.collect()
        checkpointer.save(2, {"model": {"weight": weight}})
        assert checkpointer._snapshot.unguarded  # type: ignore[union-attr]
        weight.data.fill_(1.0)
    assert load(tmp_path).values["model"]["weight"].eq(0.0).all()
