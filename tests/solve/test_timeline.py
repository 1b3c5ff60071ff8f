"""The timeline of a step, against steps that can be told by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gulliver.solve import step_seconds
from gulliver.solve.partition import geometric_sizes
from gulliver.solve.timeline import StepTimes

TIMES = StepTimes((0.0, 1.0, 2.0, 3.0), (8.0, 6.0, 4.0, 2.0), 4.0, 8.0, 0.0, rest_s=0.5)
SIZES = [10, 10, 10, 10]
EACH = [[0], [1], [2], [3]]


def test_without_a_cost_of_the_link_a_step_is_its_computation() -> None:
    for sharded in (False, True):
        took = step_seconds(TIMES, SIZES, EACH, lambda _: 0.0, lambda _: 0.0, sharded=sharded)
        assert took == pytest.approx(12.5)


def test_what_fits_under_computation_costs_only_what_nothing_can_hide() -> None:
    # The reduction of the first chunk begins when backward ends; its gather fits into the rest.
    took = step_seconds(TIMES, SIZES, EACH, lambda _: 0.5, lambda _: 0.25)
    assert took == pytest.approx(12.5 + 0.5)


def test_a_slow_link_is_all_that_counts() -> None:
    took = step_seconds(TIMES, SIZES, EACH, lambda _: 100.0, lambda _: 100.0)
    # The link rests only from the end of a step until the first gradients are there.
    assert 800.0 <= took <= 812.5


def test_one_chunk_overlaps_with_nothing() -> None:
    took = step_seconds(TIMES, SIZES, [[0, 1, 2, 3]], lambda _: 3.0, lambda _: 2.0)
    assert took == pytest.approx(12.5 + 3.0 + 2.0 - 0.5)


@pytest.mark.parametrize("count", [12, 24])
def test_updates_in_backward_let_a_link_work_all_the_time(count: int) -> None:
    forward = tuple(n / count for n in range(count))
    times = StepTimes(forward, tuple(2.0 - 2 * since for since in forward), 1.0, 2.0, 0.0)

    def took(link_s: float, **options: bool) -> float:
        each, cost = [[n] for n in range(count)], link_s / (2 * count)
        return step_seconds(
            times, [1] * count, each, lambda _: cost, lambda _: cost, repeats=9, **options
        )

    for link_s in (1.0, 2.0, 3.0, 4.0, 6.0):
        # The reduction and the gather of the first chunk show, and hardly more.
        assert took(link_s, in_backward=True) <= max(3.0, link_s) + 3.51 * link_s / (2 * count)
    assert took(3.0) >= 1.15 * 3.0


@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=4),
    st.floats(0.001, 1.0),
    st.booleans(),
    st.booleans(),
)
def test_a_step_is_never_faster_than_its_computation_or_its_transfers(
    sizes: list[int], rate: float, sharded: bool, early: bool
) -> None:
    def cost(count: int) -> float:
        return rate * count

    took = step_seconds(TIMES, sizes, EACH, cost, cost, sharded=sharded, in_backward=early)
    gathers = 2 * sum(sizes) - sum(sizes[-3:]) if sharded else sum(sizes)
    assert took >= 12.5 - 1e-9
    assert took >= rate * (sum(sizes) + gathers) - 1e-6


def test_sizes_grow_by_a_factor() -> None:
    assert geometric_sizes(1, 9) == [1, 2, 4, 8]
    assert geometric_sizes(4, 3) == [4]
