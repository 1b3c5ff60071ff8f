"""Plans of data-centric steps: every sample once, inside memory, at the budget, resumable."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.data import DataCentricPlanner, Samples, Seconds, Tokens
from gulliver.data_centric.costs import Budget
from gulliver.data_centric.pictures import step_lines
from gulliver.data_centric.steps import StepPlan
from gulliver.data_centric.windows import longer_lots
from gulliver.errors import GulliverError
from gulliver.hardware.batch_costs import BatchCosts, BlockKind, keep_blocks
from tests.data_centric.data_centric_costs import line_costs

KINDS = (BlockKind("spatial", 3, 0.5), BlockKind("temporal", 2, 0.25))


@dataclass(frozen=True)
class LengthCosts:
    """Costs of shapes that are lengths: a byte a token, any degree, messages of a tenth."""

    memory: float = 64.0
    identity: str = "lengths"

    def degrees(self, ranks: int) -> tuple[int, ...]:
        return tuple(range(1, ranks + 1))

    def tokens(self, shape: int) -> int:
        return shape

    def batches(self, shape: int, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        size = np.arange(1, min(most, int(self.memory * degree / shape)) + 1)
        again = 0.02 * shape * size / degree
        sent = again / 2 * (degree > 1)
        counts = np.tile([kind.count for kind in KINDS], (len(size), 1))
        costs = BatchCosts(0.2 + 4 * again + sent, shape * size / degree, sent, again, counts)
        return keep_blocks(costs, shape / degree, self.memory, KINDS) if pac else costs


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """A data set, ranks, a budget that its samples meet, and switches."""
    ranks = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.sampled_from([3, 8, 20, 50, 64]), min_size=1, max_size=60))
    kind = draw(st.sampled_from([Samples, Tokens, Seconds]))
    count = draw(st.integers(1, len(lengths)))
    budget: Budget = Samples(count)
    if kind is Tokens:
        budget = Tokens(64 + 20 * count)
    if kind is Seconds:
        budget = Seconds(8.0 + count)
    intra = draw(st.booleans())
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return {
        "shapes": lengths,
        "ranks": ranks,
        "budget": budget,
        "intra": intra,
        "inter": draw(st.booleans()),
        "pac": draw(st.booleans()),
        "degree": None if intra else draw(st.sampled_from(divisors)),
        "window": draw(st.sampled_from([None, 60, 200])),
        "seed": draw(st.integers(0, 3)),
    }


def planner(case: dict[str, Any], **changes: Any) -> DataCentricPlanner:
    values = {**case, **changes}
    arguments = [values.pop(name) for name in ("shapes", "ranks", "budget")]
    return DataCentricPlanner(LengthCosts(), *arguments, **values)


def indices(plans: list[StepPlan]) -> list[int]:
    return [index for plan in plans for _, batch in plan for index in batch.samples]


def checked(case: dict[str, Any]) -> None:
    """Asserts what holds for any plan of an epoch."""
    made = planner(case)
    plans = list(made)
    assert sorted(indices(plans)) == list(range(len(case["shapes"]))), "every sample once"
    assert plans == list(planner(case)), "every rank plans the same"
    for number, plan in enumerate(plans):
        for phase in plan.phases:
            ranks = [rank for group in phase for rank in group.ranks]
            assert ranks == list(range(case["ranks"])), "groups partition the ranks"
        ends = [max(group.seconds for group in phase) for phase in plan.phases]
        assert plan.seconds == pytest.approx(sum(ends))
        assert case["intra"] or not plan.later
        assert plan.seconds >= plan.bound * (1 - 1e-9)
        assert plan.step == number
        for group, batch in plan:
            shapes = {case["shapes"][index] for index in batch.samples}
            assert shapes == {batch.shape}, "one shape a micro-batch"
            assert batch.bytes <= 64 + 1, "inside memory, rounded up to a byte"
            assert case["intra"] or group.degree == case["degree"]
            assert case["pac"] or batch.recompute == sum(kind.count for kind in KINDS)
            assert case["inter"] or len(group.micro_batches) == 1
        if isinstance(case["budget"], Seconds):
            assert plan.seconds <= case["budget"].seconds * (1 + 1e-9) or plan.samples == 1
        if isinstance(case["budget"], Samples) and case["inter"] and plan is not plans[-1]:
            assert plan.samples == case["budget"].count


@given(cases())
@settings(max_examples=30, deadline=None)
def test_plan_invariants_hold(case: dict[str, Any]) -> None:
    checked(case)


@given(cases(), st.integers(0, 8), st.integers(0, 8), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=15, deadline=None)
def test_a_run_resumes_anywhere_on_other_ranks(
    case: dict[str, Any], first: int, second: int, then: int, last: int
) -> None:
    case = {**case, "intra": True, "degree": None, "budget": Tokens(90)}
    plans: list[StepPlan] = []
    state: dict[str, Any] | None = None
    for ranks, steps in ((case["ranks"], first), (then, second), (last, 10**6)):
        made = planner(case, ranks=ranks)
        if state is not None:
            made.load_state_dict(json.loads(json.dumps(state)))
        if made.epoch:
            break
        plans += itertools.islice(made, steps)
        state = made.state_dict()
    assert len(indices(plans)) == len(set(indices(plans)))
    if state is not None and state["epoch"] == 1:
        assert sorted(indices(plans)) == list(range(len(case["shapes"])))


@given(cases(), st.integers(1, 10))
@settings(max_examples=15, deadline=None)
def test_equal_ranks_resume_to_the_same_plans(case: dict[str, Any], stop: int) -> None:
    whole = list(planner(case))
    made = planner(case)
    steps = iter(made)
    for _ in range(min(stop, len(whole) - 1)):
        next(steps)
    again = planner(case)
    again.load_state_dict(made.state_dict())
    if len(whole) > 1:
        assert list(again) == whole[min(stop, len(whole) - 1) :]


@pytest.mark.parametrize("then", [1, 2])
def test_samples_that_no_longer_fit_are_skipped_on_resume(then: int) -> None:
    lengths = [10, 150, 20, 30, 150, 10, 10, 20]
    costs = line_costs(lambda n: n, 50, allowed=(1, 2, 4))
    made, again = (
        DataCentricPlanner(costs, lengths, ranks, Tokens(150), unfit="skip") for ranks in (4, then)
    )
    plan = next(iter(made))
    again.load_state_dict(json.loads(json.dumps(made.state_dict())))
    used = indices([plan, *again])
    assert len(used) == len(set(used))
    assert set(used) | {1, 4} == set(range(8)), "all that fits"
    assert again.skipped.keys() <= {150}


@given(cases())
@settings(max_examples=15, deadline=None)
def test_upcoming_does_not_advance(case: dict[str, Any]) -> None:
    made = planner(case)
    coming, plans = made.upcoming(), []
    for plan in made:
        assert plan == coming
        plans.append(plan)
        before = made.state_dict(), made.skipped.total()
        coming = made.upcoming()
        assert (made.state_dict(), made.skipped.total()) == before
    assert plans == list(planner(case))


def test_samples_of_a_step_do_not_depend_on_the_ranks() -> None:
    lengths = np.random.default_rng(0).choice([3, 8, 20, 50], 300).tolist()
    steps = [
        [
            sorted(indices([plan]))
            for plan in DataCentricPlanner(LengthCosts(), lengths, n, Samples(24))
        ]
        for n in (1, 3, 4)
    ]
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("budget", [Samples(24), Tokens(24 * 20)])
def test_steps_do_not_depend_on_lot_size(budget: Budget) -> None:
    """No steps of one shape in a row where the fixed cost of a micro-batch is nearly all of it."""
    lengths = np.random.default_rng(0).choice([10, 20, 30], 480).tolist()
    costs = line_costs(lambda n: 1e-3 * n, 10**6, fixed=5.0)
    plans = list(DataCentricPlanner(costs, lengths, 1, budget))
    assert len(plans) >= 20
    shapes = [[lengths[index] for index in indices([plan])] for plan in plans]
    for step, after in itertools.pairwise(shapes[:-1]):
        shares = [(step + after).count(length) / len(step + after) for length in (10, 20, 30)]
        assert min(shares) > 0.1
        assert max(shares) < 0.6


def test_small_lots_are_combined_in_small_steps() -> None:
    counts, sizes = {"clip": 12, "still": 40}, {"clip": 1, "still": 5}
    most = {"clip": 1.5, "still": 90.0}
    assert longer_lots(counts, sizes, most, 1.0) == sizes, "20 lots in a step"
    assert longer_lots(counts, sizes, most, 2.5) == {"clip": 1, "still": 12}, "8 lots in a step"
    assert longer_lots(counts, sizes, most, 20.0) == {"clip": 1, "still": 20}, "one in a step"
    assert longer_lots(counts, sizes, {"clip": 1.5, "still": 7.9}, 20.0)["still"] == 7
    assert longer_lots(counts, sizes, {"clip": 0.3, "still": 0.3}, 20.0) == sizes, "never shorter"


def test_stills_are_not_spread_over_every_step() -> None:
    """Three stills leave one of four ranks waiting, and each step had three."""
    lengths = np.random.default_rng(0).permutation([400] * 200 + [75] * 200).tolist()
    costs = line_costs(lambda n: n, 100, 0.0, 0.3, (1, 4))
    plans = list(DataCentricPlanner(costs, lengths, 4, Tokens(1600)))
    stills = [sum(lengths[n] == 75 for n in indices([plan])) for plan in plans]
    assert np.mean(np.array(stills) % 4 == 0) > 0.6
    assert sum(plan.seconds for plan in plans) < 1.02 * sum(plan.bound for plan in plans)


def test_epochs_have_different_orders() -> None:
    made = DataCentricPlanner(LengthCosts(), [8] * 40, 2, Samples(10))
    first, second = list(made), list(made)
    assert [plan.epoch for plan in first + second] == [0] * 4 + [1] * 4
    assert sorted(indices(first)) == sorted(indices(second)) == list(range(40))
    assert indices(first) != indices(second)
    assert [plan.step for plan in second] == [4, 5, 6, 7]


def test_a_stream_is_planned_as_it_arrives() -> None:
    drawn = []

    def arriving(epoch: int) -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield (3, 20)[number % 2]

    made = DataCentricPlanner(LengthCosts(), arriving, 2, Samples(5), window=20)
    steps = iter(made)
    next(steps)
    assert len(drawn) == 21, "a window, and one ahead to see the end"
    state = made.state_dict()
    again = DataCentricPlanner(LengthCosts(), arriving, 2, Samples(5), window=20)
    again.load_state_dict(state)
    assert list(again) == list(steps)
    assert again.epoch == 1


def test_switches_reach_the_published_gains() -> None:
    lengths = np.random.default_rng(0).choice([3, 8, 50, 64], 400, p=[0.5, 0.3, 0.1, 0.1]).tolist()
    rows = (
        {"intra": False, "inter": False, "pac": False, "degree": 2},
        {"inter": False, "pac": False},
        {"pac": False},
        {},
    )
    seconds = []
    for row in rows:
        made = DataCentricPlanner(LengthCosts(), lengths, 4, Samples(40), **row)  # type: ignore[arg-type]
        seconds.append(sum(plan.seconds for plan in made))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.2 * seconds[-1]


def test_ranks_that_see_other_tables_have_other_signatures() -> None:
    def told(lengths: list[int], seed: int = 0, memory: float = 64.0) -> str:
        costs = LengthCosts(memory)
        return DataCentricPlanner(costs, lengths, 2, Samples(2), seed=seed).signature

    assert told([3, 8, 20]) == told([3, 8, 20])
    others = {told([3, 8, 20]), told([3, 20, 8]), told([3, 8, 20], 1), told([3, 8, 20], 0, 60.0)}
    assert len(others) == 4


def test_unfit_sample_is_named_and_counted() -> None:
    lengths = [3, 8, 500, 8, 500]
    with pytest.raises(GulliverError, match=r"sample 2 \(500, 500 tokens\).* 2 "):
        DataCentricPlanner(LengthCosts(), lengths, 4, Samples(2))
    made = DataCentricPlanner(LengthCosts(), lengths, 4, Samples(2), unfit="skip")
    assert sorted(indices(list(made))) == [0, 1, 3]
    assert made.skipped == {500: 2}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": Samples(9)}, "9 samples .* 3 "),
        ({"budget": Samples(2), "window": 1}, "window=1 .* 2 samples"),
        ({"budget": Tokens(4)}, r"sample 2 \(20\) .* 20 tokens"),
        ({"budget": Seconds(0.2)}, r"0\.2 s.* 2 ranks"),
        ({"intra": False}, "intra=False needs one degree="),
        ({"intra": False, "degree": 3}, "2 ranks: use 1, 2, not 3"),
        ({"degree": 2}, "degree= only applies to intra=False"),
        ({"shapes": [3, [8]]}, r"sample 1 .*\[8\].*list"),
        ({"shapes": torch.tensor([3, 8])}, "tensor.*list"),
    ],
)
def test_infeasible_plans_are_rejected(changes: dict[str, Any], told: str) -> None:
    case = {"shapes": [3, 8, 20], "ranks": 2, "budget": Samples(2), **changes}
    with pytest.raises(GulliverError, match=told):
        planner(case)


def test_another_model_or_other_data_do_not_resume() -> None:
    made = DataCentricPlanner(LengthCosts(), [3, 8, 20, 3], 2, Samples(2))
    next(iter(made))
    state = made.state_dict()
    other = DataCentricPlanner(LengthCosts(identity="other"), [3, 8, 20, 3], 2, Samples(2))
    with pytest.raises(GulliverError, match=r"'lengths'.*'other'"):
        other.load_state_dict(state)
    other = DataCentricPlanner(LengthCosts(), [3, 8, 20, 8], 2, Samples(2))
    with pytest.raises(GulliverError, match="other data or another seed"):
        other.load_state_dict(state)
    kept, done = state["queue"], min({0, 1, 2, 3} - {*state["queue"]})
    for broken in (
        {**state, "queue": [0, 0]},
        {**state, "queue": [9]},
        {**state, "drawn": -1},
        {**state, "drawn": 999},
        {**state, "queue": kept[1:]},
        {**state, "queue": [*kept[1:], done]},
    ):
        with pytest.raises(GulliverError, match="the saved position"):
            made.load_state_dict(broken)


def test_wrong_lengths_in_table_are_detected() -> None:
    made = DataCentricPlanner(LengthCosts(), [3, 8], 1, Samples(1))
    made.check_sample(1, 8, 8)
    with pytest.raises(GulliverError, match=r"sample 1 .*\b20\b.*\b8\b"):
        made.check_sample(1, 8, 20)


def test_a_sample_that_takes_all_ranks_does_not_widen_the_groups_of_others() -> None:
    costs = line_costs(lambda n: n, 100, 0.0, 0.5, (1, 2, 4))
    (plan,) = DataCentricPlanner(costs, [400] + [50] * 8, 4, Samples(9))
    assert [[group.degree for group in phase] for phase in plan.phases] == [[4], [1] * 4]
    assert plan.seconds == pytest.approx(400 / 4 + 200 + 100)
    assert [len(groups) for groups in map(plan.groups_of, range(4))] == [2] * 4
    lines = step_lines(plan)
    assert next(line for line in lines if "rank 3" in line).split("|")[1].startswith(" " * 40)
    (one,) = DataCentricPlanner(costs, [400] + [50] * 8, 4, Samples(9), intra=False, degree=4)
    assert one.seconds > plan.seconds
    assert not one.later
