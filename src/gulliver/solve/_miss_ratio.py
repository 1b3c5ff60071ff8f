"""How many misses a cache of any size has, and how memory is shared by tables with caches.

One pass over a trace gives the misses of least recently used caches of all sizes (Mattson et al.
1970): a use hits a cache that is larger than the number of other rows used since its last use.
Memory then goes to the table whose next rows save most misses a byte (Fox 1966), along the lower
convex hulls of the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def lru_misses(uses: NDArray[np.int64], sizes: Sequence[int]) -> list[int]:
    """Counts the misses of least recently used caches."""
    distances = _distances(uses)
    return [int((distances >= size).sum()) for size in sizes]


def _distances(uses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the number of other rows since the last use of each, a large number for none."""
    count = len(uses)
    tree = np.zeros(count + 1, np.int64)
    last: dict[int, int] = {}
    found = np.full(count, np.iinfo(np.int64).max, np.int64)

    def add(place: int, value: int) -> None:
        place += 1
        while place <= count:
            tree[place] += value
            place += place & -place

    def before(place: int) -> int:
        total = 0
        while place:
            total += int(tree[place])
            place -= place & -place
        return total

    for now, row in enumerate(uses.tolist()):
        then = last.get(row)
        if then is not None:
            # Each row has a mark at its last use: those after `then` were used since.
            found[now] = before(now) - before(then + 1)
            add(then, -1)
        add(now, 1)
        last[row] = now
    return found


@dataclass(frozen=True)
class MissCurve:
    """Misses of a table by the rows that its cache holds."""

    # Numbers of rows, ascending.
    sizes: tuple[int, ...]
    # Misses at each, not ascending.
    misses: tuple[float, ...]
    # Bytes of a row in the cache.
    row_bytes: int


@dataclass(frozen=True)
class SharedCache:
    """Rows of each table's cache."""

    # Number of rows of each.
    sizes: tuple[int, ...]
    # Misses of all tables.
    misses: float
    # Misses that no share of the memory can be below, given the curves.
    bound: float


def share_cache(curves: Sequence[MissCurve], budget: int) -> SharedCache | None:
    """Shares memory among caches; None where not even the smallest sizes fit."""
    left = budget - sum(curve.sizes[0] * curve.row_bytes for curve in curves)
    if left < 0:
        return None
    at = [0] * len(curves)
    steps = sorted(
        (-gain, table, begin, end)
        for table, curve in enumerate(curves)
        for gain, begin, end in _hull(curve)
    )
    bound = misses = float(sum(curve.misses[0] for curve in curves))
    full = False
    for gain, table, begin, end in steps:
        curve = curves[table]
        cost = (curve.sizes[end] - curve.sizes[begin]) * curve.row_bytes
        if not full:
            bound += gain * min(cost, left)
            full = cost > left
        if at[table] == begin and cost <= left:
            at[table], left = end, left - cost
            misses -= curve.misses[begin] - curve.misses[end]
    for table, curve in enumerate(curves):
        # What is left over is filled below the hull, where a point fits.
        for place in range(len(curve.sizes) - 1, at[table], -1):
            cost = (curve.sizes[place] - curve.sizes[at[table]]) * curve.row_bytes
            if cost <= left and curve.misses[place] < curve.misses[at[table]]:
                misses -= curve.misses[at[table]] - curve.misses[place]
                at[table], left = place, left - cost
                break
    sizes = tuple(curve.sizes[place] for curve, place in zip(curves, at, strict=True))
    return SharedCache(sizes, misses, min(bound, misses))


def _hull(curve: MissCurve) -> list[tuple[float, int, int]]:
    """Returns the steps of the lower convex hull: misses saved a byte, and the ends of each."""
    hull: list[int] = []
    for place in range(len(curve.sizes)):
        while len(hull) > 1 and _slope(curve, hull[-2], hull[-1]) <= _slope(curve, hull[-1], place):
            hull.pop()
        hull.append(place)
    return [(_slope(curve, one, other), one, other) for one, other in pairwise(hull)]


def _slope(curve: MissCurve, one: int, other: int) -> float:
    cost = (curve.sizes[other] - curve.sizes[one]) * curve.row_bytes
    return (curve.misses[one] - curve.misses[other]) / cost
