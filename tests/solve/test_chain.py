"""A chain is cut exactly: no cut of brute force is better, and what cannot be is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.errors import GulliverError
from gulliver.solve import partition_chain
from gulliver.solve.partition import chain_times

COST = st.floats(0.0, 10.0, allow_nan=False)


@st.composite
def _chains(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 9))
    parts = draw(st.integers(1, min(4, count)))
    costs = draw(st.lists(COST, min_size=count, max_size=count))
    given: dict[str, Any] = {"costs": costs, "parts": parts}
    if draw(st.booleans()):
        speed = st.floats(0.25, 4.0)
        given["speeds"] = draw(st.lists(speed, min_size=parts, max_size=parts))
    return given


def _by_hand(costs: list[float], parts: int, speeds: list[float] | None = None) -> float:
    speeds = speeds or [1.0] * parts
    return min(
        max(
            sum(costs[a:b]) / speeds[k]
            for k, (a, b) in enumerate(itertools.pairwise([0, *inner, len(costs)]))
        )
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    )


@settings(max_examples=300, deadline=None)
@given(_chains())
def test_no_cut_is_better_than_the_one_returned(chain: dict[str, Any]) -> None:
    best = _by_hand(**chain)
    found = partition_chain(**chain)
    assert found.value == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert found.lower <= found.value * (1 + 1e-9) + 1e-9
    assert found.bounds[0] == 0
    assert found.bounds[-1] == len(chain["costs"])
    assert all(size >= 1 for size in found.sizes)
    times = chain_times(chain["costs"], found.bounds, chain.get("speeds"))
    assert times == found.times
    assert max(times) == found.value


def test_of_equal_cuts_the_most_even_is_taken() -> None:
    # 3, 3, 3, 1 is as good for the largest, and leaves the last stage with next to nothing.
    assert sorted(partition_chain([1.0] * 10, 4).sizes) == [2, 2, 3, 3]
    assert partition_chain([9.0, 1, 1, 1, 1], 3).sizes == (1, 2, 2)
    assert partition_chain([1.0] * 9, 2, speeds=[2.0, 1.0]).sizes == (6, 3)


def test_fewer_costs_than_parts_are_refused() -> None:
    with pytest.raises(GulliverError, match="cannot be split into 3 parts"):
        partition_chain([1.0, 2.0], 3)
