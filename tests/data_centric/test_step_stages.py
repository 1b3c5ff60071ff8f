"""Micro-batches of groups that are stages of a pipeline, against a simulation and brute force."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.data import DataCentricPlanner, Samples, Seconds
from gulliver.errors import GulliverError
from gulliver.solve.steps import BalancedStep, GroupSamples, GroupWork, StepSolver, fill_stages
from tests.data_centric.data_centric_costs import line_costs


def simulated(seconds: list[float], stages: int) -> float:
    """The end of jobs of equal seconds on every stage, which run one after the other."""
    free = [0.0] * stages
    for each in seconds:
        ready = 0.0
        for stage in range(stages):
            ready = free[stage] = max(ready, free[stage]) + each
    return free[-1]


def partitions(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut samples into micro-batches."""
    if not count:
        yield ()
    for first in range(min(count, most), 0, -1):
        yield from ((first, *rest) for rest in partitions(count - first, first))


tables = st.lists(st.floats(0.1, 2.0), min_size=4, max_size=7).map(np.cumsum)


@settings(max_examples=150, deadline=None)
@given(tables, st.integers(1, 8), st.integers(2, 4))
def test_micro_batches_are_near_the_best_of_all_ways(
    table: np.ndarray, count: int, stages: int
) -> None:
    solver = StepSolver({"a": {1: table}}, 1)
    plain = solver.plan_step({"a": count})
    step = fill_stages(plain, solver.seconds, stages)
    (work,) = step.groups
    ((_, sizes),) = work.pieces
    assert sum(sizes) == count
    assert step.bound == plain.bound
    assert work.seconds == step.seconds
    assert work.seconds == pytest.approx(simulated([table[n - 1] for n in sizes], stages))
    assert work.filling == pytest.approx((stages - 1) * max(table[n - 1] for n in sizes))
    before = [table[n - 1] for _, row in plain.groups[0].pieces for n in row]
    assert work.seconds <= simulated(before, stages) + 1e-9
    best = min(
        simulated([table[n - 1] for n in way], stages) for way in partitions(count, len(table))
    )
    assert best <= work.seconds + 1e-9
    assert work.seconds <= 1.25 * best


def test_several_shapes_and_groups_are_cut_each_for_itself() -> None:
    tables = {"a": {1: np.arange(1.0, 9.0)}, "b": {1: 1 + np.arange(1.0, 9.0), 2: np.ones(4)}}
    works = (
        GroupWork(2, 2.0, (GroupSamples("b", (4, 4)),)),
        GroupWork(1, 12.0, (GroupSamples("a", (4,)), GroupSamples("b", (7,)))),
    )
    step = fill_stages(BalancedStep(works, 12.0, 10.0, {}), tables, 3)
    wide, narrow = step.groups
    assert wide.pieces == works[0].pieces
    assert (wide.seconds, wide.filling) == (4.0, 2.0)
    # Samples of "a" cost nothing to be cut, and of "b" a second for each micro-batch.
    assert narrow.seconds == step.seconds < 12 + 2 * 8
    assert [sum(sizes) for _, sizes in narrow.pieces] == [4, 7]
    assert fill_stages(step, tables, 1) is step


def planned(**changes: object) -> DataCentricPlanner:
    costs = line_costs(lambda n: n, 64, fixed=2.0, allowed=(1, 2))
    shapes = [4, 8, 8, 16, 32] * 12
    options = {"budget": Samples(20), "seed": 3} | changes
    return DataCentricPlanner(costs, shapes, 4, **options)  # type: ignore[arg-type]


def test_a_plan_of_stages_has_the_samples_of_one_without() -> None:
    whole, staged = list(planned()), list(planned(stages=2))
    for one, other in zip(whole, staged, strict=True):
        indices = [sorted(i for _, batch in plan for i in batch.samples) for plan in (one, other)]
        assert indices[0] == indices[1]
        assert other.bound == pytest.approx(one.bound / 2)
        ends = [max(group.seconds for group in phase) for phase in other.phases]
        assert other.seconds == pytest.approx(sum(ends))
        for group in other.all_groups:
            seconds = [batch.seconds for batch in group.micro_batches]
            assert group.seconds == pytest.approx(simulated(seconds, 2) if seconds else 0.0)
    assert sum(len(g.micro_batches) for p in staged for g in p.groups) > sum(
        len(g.micro_batches) for p in whole for g in p.groups
    )
    assert planned(stages=2).signature != planned().signature
    assert "4 ranks of 2 stages each" in planned(stages=2).describe()
    assert all(plan.seconds <= 60 for plan in planned(stages=2, budget=Seconds(60.0)))


def test_invalid_stages_are_rejected() -> None:
    with pytest.raises(GulliverError, match=r"stages.* 0"):
        planned(stages=0)
    with pytest.raises(GulliverError, match="needs several micro-batches per group; set inter"):
        planned(stages=2, inter=False)
