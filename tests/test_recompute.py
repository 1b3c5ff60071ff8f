"""A chain is recomputed exactly: no persistent schedule of brute force takes less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.solve import (
    OffloadLink,
    Stage,
    least_budget,
    recomputed_seconds,
    rematerialize,
    schedule_peak,
)
from tests.solver_cases import free_case, recompute_case, schedules

SECONDS, BYTES = st.integers(0, 5).map(float), st.integers(0, 5)
STAGE = st.builds(Stage, SECONDS, SECONDS, BYTES, BYTES, BYTES, BYTES)
CHAINS = st.lists(STAGE, min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(CHAINS, st.integers(0, 3), st.integers(1, 40))
def test_no_persistent_schedule_takes_less(chain: list[Stage], source: int, budget: int) -> None:
    all_ = [
        (schedule_peak(chain, steps, source), recomputed_seconds(chain, steps))
        for steps in schedules(0, len(chain) - 1)
    ]
    least = min(peak for peak, _ in all_)
    best = min((seconds for peak, seconds in all_ if peak <= budget), default=math.inf)
    assert least_budget(chain, source) == least
    if best == math.inf:
        with pytest.raises(GulliverError, match=f"{least} would do"):
            rematerialize(chain, budget, source)
        return
    found = rematerialize(chain, budget, source)
    assert found.exact
    assert found.seconds == best == recomputed_seconds(chain, found.steps)
    assert found.peak == schedule_peak(chain, found.steps, source) <= budget


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_schedule_at_all_takes_less_than_the_free_one(seed: int) -> None:
    free_case(seed, 3)


@pytest.mark.full
@pytest.mark.deadline(900)
def test_no_schedule_takes_less_in_many_cases() -> None:
    assert sum(recompute_case(seed) for seed in range(1000)) > 500
    assert sum(free_case(seed) for seed in range(600)) > 300


def test_a_free_schedule_says_how_far_it_looked() -> None:
    chain = [Stage(1.0, 2.0, 1 + n % 3, 4 + n % 2) for n in range(12)]
    budget = least_budget(chain) + 3
    persistent = rematerialize(chain, budget)
    short = rematerialize(chain, budget, free=True, looks=50)
    assert short.lower <= short.seconds <= persistent.seconds
    assert not short.exact
    assert short.peak <= budget
    with pytest.raises(GulliverError, match="moves nothing"):
        rematerialize(chain, budget, link=OffloadLink(1.0, 1.0), free=True)


@settings(max_examples=60, deadline=None)
@given(CHAINS, st.integers(20, 60))
def test_coarse_slots_keep_to_the_budget_and_the_bound_holds(
    chain: list[Stage], budget: int
) -> None:
    if least_budget(chain) > budget:
        return
    exact = rematerialize(chain, budget)
    coarse = rematerialize(chain, budget, slots=9)
    assert coarse.peak <= budget
    assert coarse.lower <= exact.seconds <= coarse.seconds


def test_saved_bytes_are_offloaded_where_the_next_stage_hides_the_moves() -> None:
    stage = Stage(1.0, 2.0, 1, 10, movable=10)
    chain = [stage] * 6
    least = sum(s.forward_s + s.backward_s for s in chain)
    again = rematerialize(chain, 30)
    moved = rematerialize(chain, 30, link=OffloadLink(0.05, 0.05))
    assert again.seconds > least == moved.seconds
    assert any(step.kind == "offload" for step in moved.steps)
    assert moved.peak <= 30
    slow = OffloadLink(1.0, 1.0)
    assert rematerialize(chain, 30, link=slow).seconds == again.seconds
    exposed = recomputed_seconds(chain, moved.steps, slow) - least
    count = sum(step.kind == "offload" for step in moved.steps)
    assert exposed == count * ((10 - 1.0) + (10 - 2.0))


def test_equal_stages_are_solved_once_and_many_cost_little() -> None:
    chain = [Stage(1.0, 2.0, 1 << 20, 8 << 20)] * 200
    found = rematerialize(chain, 200 << 20)
    assert found.exact
    assert found.peak <= 200 << 20
    assert 600 < found.seconds < 800


def test_a_chain_that_needs_more_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(GulliverError, match="a budget of 5 bytes is too small: 23 would do"):
        rematerialize([Stage(1.0, 1.0, 1, 19)], 5, source=1)
