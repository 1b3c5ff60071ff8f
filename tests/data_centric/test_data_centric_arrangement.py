"""Samples chosen for steps that fill the ranks, and what runs first and last in a step."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.data import DataCentricPlanner, Samples, StepEnds, Tokens
from gulliver.data_centric.steps import StepPlan
from gulliver.errors import GulliverError
from gulliver.solve.steps import BalancedStep, GroupWork, StepArranger, StepSolver, WorkPiece
from gulliver.solve.timeline import halves
from tests.data_centric.data_centric_costs import line_costs
from tests.data_centric.test_data_centric_plans import LengthCosts, indices


def arranged(lengths: list[int], budget: int, ranks: int = 4, **changes: Any) -> DataCentricPlanner:
    """A planner of steps that fill four ranks, on any number of them."""
    return DataCentricPlanner(
        LengthCosts(), lengths, ranks, Tokens(budget), **{"arrange": 4, **changes}
    )


@given(
    st.lists(st.sampled_from([3, 8, 20, 50, 64]), min_size=1, max_size=120),
    st.integers(64, 400),
    st.sampled_from([None, 30]),
    st.integers(0, 6),
    st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_arranged_samples_come_once_and_go_on_on_other_ranks(
    lengths: list[int], budget: int, window: int | None, stop: int, then: int
) -> None:
    whole = list(arranged(lengths, budget, window=window))
    assert sorted(indices(whole)) == list(range(len(lengths)))
    assert max(sum(lengths[n] for n in indices([plan])) for plan in whole) <= 1.5 * budget + 64
    made = arranged(lengths, budget, window=window)
    begun = list(itertools.islice(made, min(stop, len(whole) - 1)))
    again = arranged(lengths, budget, then, window=window)
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    if made.epoch == 0:
        rest = list(again)
        assert [sorted(indices([plan])) for plan in begun + rest] == [
            sorted(indices([plan])) for plan in whole
        ]
        assert then != 4 or begun + rest == whole, "to the bit on as many ranks"


def test_steps_of_few_large_samples_fill_the_ranks() -> None:
    costs = line_costs(lambda n: n, 100, 0.0, 0.0, (1, 2, 4))
    lengths = np.random.default_rng(0).permutation([400, 300] * 100).tolist()
    seconds = {}
    for arrange in (None, 8):
        made = DataCentricPlanner(costs, lengths, 8, Tokens(900), arrange=arrange)
        seconds[arrange] = sum(plan.seconds for plan in made)
    # Two of a kind side by side fill all ranks; one of each leaves four ranks waiting.
    assert seconds[8] == pytest.approx(sum(lengths) / 8, rel=0.01)
    assert seconds[None] > 1.05 * seconds[8]


def test_patterns_waste_no_more_than_the_best_of_all_pairs() -> None:
    seconds: Any = {
        name: {d: np.array([time / d]) for d in (1, 2, 4)}
        for name, time in (("a", 4.0), ("b", 3.0), ("c", 1.0))
    }
    solver = StepSolver(seconds, 2)
    steps = StepArranger(solver, {"a": 4, "b": 3, "c": 1}, 8.0).arrange({"a": 20, "b": 30, "c": 30})
    used = {name: sum(step.get(name, 0) for step in steps) for name in "abc"}
    assert all(used[name] <= most for name, most in (("a", 20), ("b", 30), ("c", 30)))
    left = 200 - sum(time * used[name] for name, time in (("a", 4), ("b", 3), ("c", 1)))
    assert left < 16, "fewer than two steps' worth"
    for step in steps:
        work = sum({"a": 4.0, "b": 3.0, "c": 1.0}[str(name)] * n for name, n in step.items())
        assert solver.plan_step(step).seconds == pytest.approx(work / 2, rel=0.13)


def test_halves_of_a_step_have_all_its_work_and_end_together() -> None:
    times = {"x": 2.0, "y": 1.0}
    groups = (
        GroupWork(1, 5.0, (WorkPiece("x", (1, 1)), WorkPiece("y", (1,)))),
        GroupWork(1, 5.0, (WorkPiece("x", (1,)), WorkPiece("y", (1, 1, 1)))),
    )
    found = list(halves(BalancedStep(groups, 5.0, 5.0, {}), lambda shape, *_: times[str(shape)]))
    best = min(found, key=lambda pair: pair[0].seconds + pair[1].seconds)
    assert best[0].seconds + best[1].seconds == pytest.approx(5.0)
    for pair in found:
        for early, late, whole in zip(pair[0].groups, pair[1].groups, groups, strict=True):
            assert early.seconds + late.seconds == pytest.approx(whole.seconds)
            parts = sorted(
                (piece.shape, size)
                for work in (early, late)
                for piece in work.pieces
                for size in piece.batches
            )
            assert parts == sorted((p.shape, n) for p in whole.pieces for n in p.batches)
    alone = BalancedStep((GroupWork(1, 2.0, (WorkPiece("x", (1,)),)),), 2.0, 2.0, {})
    assert not list(halves(alone, lambda *_: 2.0)), "one micro-batch cannot be cut"


def ordered(ends: StepEnds | None) -> StepPlan:
    """A sample that takes all ranks, and four micro-batches of short ones for each rank."""
    costs = line_costs(lambda n: n, 100, 0.0, 0.5, (1, 2, 4))
    (plan,) = DataCentricPlanner(costs, [400] + [50] * 32, 4, Samples(33), ends=ends)
    return plan


def test_what_is_on_its_way_at_the_ends_of_a_step_says_what_runs_there() -> None:
    degrees = {
        None: [4, 1],
        StepEnds(first_shared=50): [1, 4],
        StepEnds(last_shared=50): [4, 1],
        StepEnds(first_shared=50, last_shared=50): [1, 4, 1],
        StepEnds(1, 1, 1, 1): [4, 1],
    }
    for ends, wanted in degrees.items():
        plan = ordered(ends)
        found = [max(group.degree for group in phase) for phase in plan.phases]
        assert found == wanted
        assert plan.seconds == pytest.approx(300 + 400), "cut evenly"
        assert plan.ends == (2 if ends == StepEnds(1, 1, 1, 1) else 0)
        assert sorted(indices([plan])) == list(range(33))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": Samples(4)}, "4 samples a step forbids: give a budget of Tokens"),
        ({"arrange": 0}, "arrange=0: give a number of ranks of at least 1"),
        ({"inter": False}, "arrange= needs intra and inter"),
        ({"arrange": 1, "memory": 40}, r"64 \(64 tokens\) fits on no group of arrange=1 ranks"),
    ],
)
def test_what_cannot_be_arranged_is_refused(changes: dict[str, Any], told: str) -> None:
    budget = changes.pop("budget", Tokens(128))
    with pytest.raises(GulliverError, match=told):
        DataCentricPlanner(LengthCosts(), [64, 8] * 9, 4, budget, **{"arrange": 4, **changes})


def test_a_broken_position_of_arranged_steps_is_refused() -> None:
    made = arranged([3, 8, 20, 50] * 30, 200)
    next(iter(made))
    state = made.state_dict()
    assert state["cuts"]
    for cuts in ([10**6], [0], ["a"], None):
        with pytest.raises(GulliverError, match="its steps have more samples than wait"):
            made.load_state_dict({**state, "cuts": cuts})
    with pytest.raises(GulliverError, match="cannot be below 0"):
        StepEnds(-1.0)
