"""Covering arrays: few cases in which all values of any two (or three) factors meet.

A fault that shows under some combination of values shows nearly always under some pair of them, so
`make test` runs a covering array of a grid and `make test-all` the whole of it (`grid`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(
    *factors: Sequence[Any], strength: int = 2, allowed: Callable[..., bool] | None = None
) -> list[tuple[int, ...]]:
    """Cases, as indices into the factors, in which every allowed combination of values occurs.

    Greedy and deterministic: the next case is the one with the most combinations that have not
    occurred yet, of equals the one whose values have been used least.

    Args:
        factors: values of each factor.
        strength: how many factors' values are combined.
        allowed: takes one value of each factor and says whether the case exists.
    """
    cases = [
        case
        for case in product(*(range(len(factor)) for factor in factors))
        if allowed is None or allowed(*(f[i] for f, i in zip(factors, case, strict=True)))
    ]
    places = list(combinations(range(len(factors)), min(strength, len(factors))))
    met = {case: {(p, tuple(case[i] for i in p)) for p in places} for case in cases}
    open_pairs = set().union(*met.values()) if met else set()
    used: dict[tuple[int, int], int] = {}
    chosen: list[tuple[int, ...]] = []

    def worth(case: tuple[int, ...]) -> tuple[int, int]:
        return len(met[case] & open_pairs), -sum(used.get(v, 0) for v in enumerate(case))

    while open_pairs:
        best = max(cases, key=worth)
        chosen.append(best)
        open_pairs.difference_update(met[best])
        for value in enumerate(best):
            used[value] = used.get(value, 0) + 1
    return chosen


def grid(
    *factors: Sequence[Any],
    strength: int = 2,
    allowed: Callable[..., bool] | None = None,
    always: Callable[..., bool] | None = None,
) -> list[Any]:
    """All allowed cases as parameters; those outside the covering array are marked `full`.

    Args:
        factors: as in `covering`.
        strength: as in `covering`.
        allowed: as in `covering`.
        always: further cases that are not left out.
    """
    default = set(covering(*factors, strength=strength, allowed=allowed))
    parameters = []
    for case in product(*(range(len(factor)) for factor in factors)):
        values = tuple(factor[i] for factor, i in zip(factors, case, strict=True))
        if allowed is None or allowed(*values):
            kept = case in default or (always is not None and always(*values))
            parameters.append(pytest.param(*values, marks=() if kept else pytest.mark.full))
    return parameters


def some(values: Sequence[Any], kept: Sequence[Any] | slice) -> list[Any]:
    """Values of one factor as parameters; those that are not kept are marked `full`."""
    chosen = values[kept] if isinstance(kept, slice) else kept
    left_out = pytest.mark.full
    return [
        v if v in chosen else pytest.param(*(v if type(v) is tuple else (v,)), marks=left_out)
        for v in values
    ]
