"""Sets of states of which none is at least as good as another in everything.

A search that goes through a chain from one end to the other may drop a state if another one of the
same kind is at least as good in every measure that what follows depends on (`undominated`). Where
too many are left some of them are dropped, too: each kind is cut into bins by its peak, and those
stay that are the best of a bin at one of several prices (`boxed`). So for any limit of the peak
something stays that is best, at about the right price, below it, but for one bin: a weighted sum
alone would not keep what is worse in the sum and lower in the peak than all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
DIGITS = 1e12
"""Sums of the same seconds in another order are equal to so many parts of the largest."""
PAIRS, AT_ONCE = 128, 16


def rounded(values: Floats) -> Floats:
    """Rounds values so that sums of the same numbers in another order are equal."""
    largest = float(np.abs(values).max(initial=0.0))
    return np.round(values * (DIGITS / largest)) if largest > 0 else values


def kinds_of(keys: NDArray[Any]) -> Ints:
    """Numbers that are the same for rows with the same key."""
    found = np.zeros(len(keys), dtype=np.int64)
    for column in keys.T:
        least = column.min(initial=0)
        size = int(column.max(initial=0)) - int(least) + 1
        if int(found.max(initial=0)) >= np.iinfo(np.int64).max // size - 1:
            found = np.unique(found, return_inverse=True)[1].astype(np.int64)
        found = found * size + (column - least)
    return found


def groups_of(kinds: Ints) -> list[Ints]:
    """Numbers of the rows of each kind."""
    if not len(kinds):
        return []
    order = np.argsort(kinds, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)


def undominated(values: Floats) -> Ints:
    """Numbers of the rows that no other row is at most equal to in all columns; of equals, one."""
    # Few rows are compared pair by pair. Many are looked at by the sum of their columns, each
    # divided by its largest: a row can only be beaten by one before it. O(rows x rows that are
    # left).
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


def boxed(kinds: Ints, peak: Floats, priced: Floats, bins: int) -> Ints:
    """Numbers of the rows that are the best of their kind and bin at one of several prices."""
    if not len(kinds):
        return np.zeros(0, dtype=np.intp)
    order, starts, sizes = _sorted(kinds)
    least = np.repeat(np.minimum.reduceat(peak[order], starts), sizes)
    most = np.repeat(np.maximum.reduceat(peak[order], starts), sizes)
    place = (peak[order] - least) / np.maximum(most - least, 1e-300) * bins
    place = np.minimum(place.astype(np.int64), bins - 1)
    inner, starts, sizes = _sorted(np.repeat(np.arange(len(starts)), sizes) * bins + place)
    order, box = order[inner], np.repeat(np.arange(len(starts)), sizes)
    stays = np.zeros(len(order), dtype=bool)
    for one in priced[:, order]:
        best = np.flatnonzero(one <= np.repeat(np.minimum.reduceat(one, starts), sizes))
        stays[best[np.unique(box[best], return_index=True)[1]]] = True
    return order[stays]


def _sorted(kinds: Ints) -> tuple[Ints, Ints, Ints]:
    """Order of the rows by kind, and where in it each kind begins, and how many it has."""
    order = np.argsort(kinds, kind="stable")
    starts = np.concatenate([[0], np.flatnonzero(np.diff(kinds[order])) + 1])
    return order, starts, np.diff(np.append(starts, len(order)))
