"""Sets of states of which none is at least as good as another in everything.

A search that goes through a chain from one end to the other may drop a state if another one of the
same kind is at least as good in every measure that what follows depends on. Where too many are left
some of them are dropped, too: those stay that are best at one of several prices between measures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
DIGITS = 1e12
"""Sums of the same seconds in another order are equal to so many parts of the largest."""
PRICES = 16
AROUND = np.array([1.0, 0.8, 1.25, 0.6, 1.7, 3.0])
"""Prices that are tried, as multiples of the one that is about right."""
SHARES_OF_FIRST = np.array([0.0, 0.1, 0.3, 1.0])
PAIRS, AT_ONCE = 128, 16
CROWD = 8
"""Rows for each one kept; of more than these, some are dropped before any comparison."""


def rounded(values: Floats) -> Floats:
    """Rounds values so that sums of the same numbers in another order are equal."""
    largest = float(np.abs(values).max(initial=0.0))
    return np.round(values * (DIGITS / largest)) if largest > 0 else values


def groups_of(keys: NDArray[Any]) -> list[Ints]:
    """Numbers of the rows that have the same key.

    Args:
        keys: keys [rows, parts], whole numbers.
    """
    if not len(keys):
        return []
    order = np.lexsort(keys.T)
    changes = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    return np.split(order, np.flatnonzero(changes) + 1)


def undominated(values: Floats) -> Ints:
    """Numbers of the rows that no other row is at most equal to in all columns; of equals, one.

    Few rows are compared pair by pair. Many are looked at by the sum of their columns, each divided
    by its largest: a row can only be beaten by one before it. O(rows x rows that are left).

    Args:
        values: measures [rows, columns], of which less is better.
    """
    least = values.min(axis=0)
    scale = values.max(axis=0) - least
    varied = np.flatnonzero(scale)
    if not len(varied):
        return np.zeros(1, dtype=np.intp)
    values = (values[:, varied] - least[varied]) / scale[varied]
    left = np.argsort(values.sum(axis=1), kind="stable")
    values = values[left]
    if len(left) <= PAIRS:
        beats = np.logical_and.reduce(values[:, None] <= values[None], axis=2)
        return left[np.flatnonzero(np.triu(beats, 1).any(axis=0) == 0)]
    kept: list[Ints] = []
    while len(left):
        # A few at once: each is only kept if none of them before it is as good.
        few = values[:AT_ONCE]
        beats = np.logical_and.reduce(few[:, None] <= values[None], axis=2)
        first = np.flatnonzero(np.triu(beats[:, : len(few)], 1).any(axis=0) == 0)
        kept.append(left[: len(few)][first])
        better = np.flatnonzero(beats[first].any(axis=0) == 0)
        left, values = left[better], values[better]
    return np.concatenate(kept)


def thinned(seconds: Floats, memory: Floats, most: int, price: float = 0.0) -> Ints:
    """Numbers of at most so many rows: the best at each of several prices of memory.

    Args:
        seconds: seconds of each row.
        memory: measures of memory [rows, columns].
        most: number of rows to keep.
        price: seconds that a byte is worth, about; 0: unknown, prices of all sizes are tried.
    """
    if price:
        # All columns together cost about that much; which of them counts is not known.
        first = np.repeat(SHARES_OF_FIRST, len(AROUND)) * np.tile(AROUND, len(SHARES_OF_FIRST))
        rest = np.tile(AROUND, len(SHARES_OF_FIRST)) - first
        priced = seconds + price * (
            first[:, None] * memory[:, 0] + rest[:, None] * memory[:, 1:].sum(axis=1)
        )
    else:
        columns = np.column_stack([seconds, memory])
        columns = (columns - columns.min(axis=0)) / np.maximum(np.ptp(columns, axis=0), 1e-300)
        shares = np.linspace(0.0, 1.0, PRICES)[:, None]
        priced = (1 - shares) * columns[:, 0] + shares * columns[:, 1:].sum(axis=1)
    # The best of each order first, then the second of each; no order needs more than `most`.
    few = np.argpartition(priced, min(most, len(seconds)) - 1, axis=1)[:, :most]
    ranks = np.argsort(np.take_along_axis(priced, few, axis=1), axis=1, kind="stable")
    places = np.take_along_axis(few, ranks, axis=1).T.ravel()
    first = np.unique(places, return_index=True)[1]
    return places[np.sort(first)[:most]]


def front(
    values: Floats, seconds: Floats, memory: Floats, most: int, price: float = 0.0
) -> tuple[Ints, bool]:
    """Numbers of at most so many undominated rows, and whether none was dropped.

    Args:
        values: measures [rows, columns], of which less is better.
        seconds: seconds of each row.
        memory: measures of memory [rows, columns].
        most: number of rows to keep.
        price: seconds that a byte is worth, about.
    """
    some, exact = np.arange(len(values)), True
    for limit, compared in ((CROWD * most, False), (most, True)):
        if compared:
            some = some[undominated(values[some])]
        if len(some) > limit:
            some, exact = some[thinned(seconds[some], memory[some], limit, price)], False
    return some, exact
