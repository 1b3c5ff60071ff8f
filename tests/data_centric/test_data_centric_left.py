"""Steps that are left, looked at or saved before their end: samples are used once all the same."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
from gulliver.comm import World
from gulliver.data import DataCentricPlanner, Samples
from gulliver.errors import GulliverError
from tests.data_centric.data_centric_costs import line_costs
from tests.pool import Pool

SAMPLES = 12


def _made(world: World) -> tuple[Any, Any, DataCentricLoader]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    plugin = DataCentricPlugin(verbose=False)
    boosted = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [torch.full((n, 1), float(n)) for n in [3, 5] * (SAMPLES // 2)]
    costs = line_costs(lambda n: n, 12)
    planner = DataCentricPlanner(costs, [len(x) for x in data], world.size, Samples(4))
    return boosted[0], boosted[1], DataCentricLoader(planner, data, boosted[0], boosted[1])


def _samples(step: Any) -> list[int]:
    return [index for _, batch in step.plan for index in batch.samples]


def _run(model: Any, step: Any) -> None:
    for batch in step:
        step.backward(model(batch.data).square().mean())


def _rest(model: Any, optimizer: Any, loader: Any) -> list[int]:
    """Trains the rest of the epoch; returns its samples."""
    used = []
    for step in loader:
        _run(model, step)
        optimizer.step()
        optimizer.zero_grad()
        used += _samples(step)
    return used


def _saved(world: World, moment: str) -> list[int]:
    """Samples before and after a save at some moment of the second step; the run ends there."""
    model, optimizer, loader = _made(world)
    used: list[int] = []
    state = None
    for number, step in enumerate(loader):
        if number == 1 and moment == "before":
            state = loader.state_dict()
        for batch in step:
            step.backward(model(batch.data).square().mean())
            if number == 1 and moment == "inside":
                state = loader.state_dict()
        if number == 1 and moment == "unstepped":
            state = loader.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and moment == "after":
            state = loader.state_dict()
        if number == 0 or moment == "after":
            used += _samples(step)
        if number == 1:
            break
    again = _made(world)
    assert state is not None
    again[-1].load_state_dict(state)
    return used + _rest(*again)


@pytest.mark.parametrize("moment", ["before", "inside", "unstepped", "after"])
def test_position_is_saved_after_optimizer_step(pool: Pool, moment: str) -> None:
    for used in pool.run(_saved, 1, moment):
        assert sorted(used) == list(range(SAMPLES))


def _added_up(world: World, late: bool) -> list[int]:
    """Saves when a step has been run and the one before it is in no step of the optimizer yet."""
    model, optimizer, loader = _made(world)
    used, waiting = list[int](), list[int]()
    for number, step in enumerate(loader):
        if late and number == 1:  # the first step of the optimizer comes with the second one given
            optimizer.step()
            optimizer.zero_grad()
            used, waiting = waiting, []
        _run(model, step)
        waiting += _samples(step)
        if number == 1:
            break
    state = loader.state_dict()
    again = _made(world)
    again[-1].load_state_dict(state)
    return used + _rest(*again)


@pytest.mark.parametrize("late", [False, True])
def test_accumulated_steps_count_only_after_optimizer_step(pool: Pool, late: bool) -> None:
    for used in pool.run(_added_up, 1, late):
        assert sorted(used) == list(range(SAMPLES))


def _looked_at(world: World) -> list[int]:
    model, optimizer, loader = _made(world)
    first = next(iter(loader))
    used = []
    # The range ends first, and a step that nobody runs was drawn.
    for step, _ in zip(loader, range(2), strict=False):
        _run(model, step)
        optimizer.step()
        optimizer.zero_grad()
        used += _samples(step)
    assert used[: first.plan.samples] == _samples(first)
    return used + _rest(model, optimizer, loader)


def test_unstarted_step_is_returned_again(pool: Pool) -> None:
    for used in pool.run(_looked_at, 2):
        assert sorted(used) == list(range(SAMPLES))


def _left(world: World) -> list[int]:
    model, optimizer, loader = _made(world)
    steps = iter(loader)
    step = next(steps)
    for batch in step:
        step.backward(model(batch.data).square().mean())
        break
    with pytest.raises(GulliverError, match="left before its end"):
        optimizer.step()
    with pytest.raises(GulliverError, match="left before its end"):
        next(steps)
    again = next(iter(loader))
    with pytest.raises(GulliverError, match="left before its end"):
        next(iter(again))
    optimizer.zero_grad()
    used = _rest(model, optimizer, loader)
    other, others, whole = _made(world)
    assert used == _rest(other, others, whole)
    assert all(map(torch.equal, model.parameters(), other.parameters())), "the part is forgotten"
    return used


def test_abandoned_step_is_rejected_and_restarted(pool: Pool) -> None:
    for used in pool.run(_left, 1):
        assert sorted(used) == list(range(SAMPLES))


def _inside(world: World) -> list[str]:
    model, optimizer, loader = _made(world)
    told = []
    step = next(iter(loader))
    for batch in step:
        for action in (optimizer.zero_grad, lambda: optimizer.clip_grad_by_norm(1.0)):
            with pytest.raises(GulliverError) as error:
                action()
            told.append(str(error.value))
        step.backward(model(batch.data).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return told


def test_gradients_are_not_cleared_or_clipped_inside_a_step(pool: Pool) -> None:
    for told in pool.run(_inside, 2):
        assert all("after the loop" in line for line in told)


def _weighed(world: World, weights: list[float]) -> tuple[list[int], int]:
    model, optimizer, loader = _made(world)
    told = loader.planner, loader.dataset, model, optimizer
    with pytest.raises(GulliverError, match="0 for every sample"):
        DataCentricLoader(*told, weight=[0.0] * SAMPLES)
    weighed = DataCentricLoader(*told, weight=weights)
    return _rest(model, optimizer, weighed), weighed.passed_over


def test_step_of_zero_weights_is_skipped(pool: Pool) -> None:
    last = pool.run(_weighed, 2, [1.0] * SAMPLES)[0][0][-4:]
    weights = [float(index not in last) for index in range(SAMPLES)]
    for used, passed_over in pool.run(_weighed, 2, weights):
        assert sorted(used + last) == list(range(SAMPLES))
        assert passed_over == 4


def _left_while_it_loads(world: World) -> list[int]:
    """Leaves a step whose next micro-batch is being read, and goes on; then lets the reader go."""
    model, optimizer, loader = _made(world)
    data, held, step = loader.dataset, Event(), next(iter(loader))

    class Slow:
        def __getitem__(self, index: int) -> Any:
            if index in later:
                held.wait(30)
            return data[index]

    _, *rest = [batch for _, batch in step.plan]
    later, loader.dataset = {index for batch in rest for index in batch.samples}, Slow()
    assert later, "a step of several micro-batches"
    batches: Any = iter(step)
    step.backward(model(next(batches).data).square().mean())
    # As the garbage collector may, on a thread that must not wait for another one.
    ending = Thread(target=batches.close)
    ending.start()
    ending.join(20)
    assert not ending.is_alive(), "the end of a step waits for what it was reading"
    assert not held.is_set()
    held.set()
    optimizer.zero_grad()
    return _rest(model, optimizer, loader)


def test_leaving_a_step_does_not_wait_for_readers(pool: Pool) -> None:
    assert sorted(pool.run(_left_while_it_loads, 1)[0]) == list(range(SAMPLES))
