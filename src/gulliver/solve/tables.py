"""How ranks share tables: one option for each table, so that the slowest rank is done soonest.

Longest first (Graham 1969), once with all options and once with the cheapest, then moved while that
helps: one table to another option, or two that exchange theirs. The bound is that
of shares that could be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class TableOption:
    """A way to place a table."""

    # Name of the placement.
    name: str
    # What it costs each rank.
    seconds: tuple[float, ...]
    # What it takes of each rank's memory.
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class TablesPlaced:
    """An option for each table."""

    # Chosen options, in the order of the tables.
    options: tuple[TableOption, ...]
    # Seconds of each rank.
    seconds: tuple[float, ...]
    # Seconds that no choice can be below.
    bound: float

    @property
    def slowest(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)


def place_tables(tables: Sequence[Sequence[TableOption]], room: int) -> TablesPlaced:
    """Chooses an option for each table."""
    if not tables or not all(tables):
        raise GulliverError("give at least one table, and at least one option of each")
    starts = [
        _improved(tables, _longest_first(tables, room, least), room) for least in (True, False)
    ]
    chosen = min(starts, key=lambda start: _score(tables, dict(enumerate(start)), room))
    options = tuple(tables[t][n] for t, n in enumerate(chosen))
    most = max(map(sum, zip(*(o.nbytes for o in options), strict=True)))
    if most > room:
        raise GulliverError(
            f"the tables need {most} bytes on one rank, which has {room}: take more ranks or a disk"
        )
    ranks = len(options[0].seconds)
    seconds = tuple(map(sum, zip(*(o.seconds for o in options), strict=True)))
    total = sum(min(sum(o.seconds) for o in table) for table in tables)
    bound = max(total / ranks, max(min(max(o.seconds) for o in table) for table in tables))
    return TablesPlaced(options, seconds, bound)


def _longest_first(tables: Sequence[Sequence[TableOption]], room: int, least: bool) -> list[int]:
    """Places the largest tables first; with `least`, each only where it takes least in all."""
    order = sorted(range(len(tables)), key=lambda t: -min(sum(o.seconds) for o in tables[t]))
    chosen: dict[int, int] = {}
    for table in order:
        totals = [sum(option.seconds) for option in tables[table]]
        allowed = [n for n, total in enumerate(totals) if not least or total <= min(totals)]
        chosen[table] = min(allowed, key=lambda n: _score(tables, {**chosen, table: n}, room))
    return [chosen[table] for table in range(len(tables))]


def _score(
    tables: Sequence[Sequence[TableOption]], chosen: dict[int, int], room: int
) -> tuple[int, float, float]:
    """Ranks a choice: bytes too many, seconds of the slowest rank, seconds of all."""
    options = [tables[t][n] for t, n in chosen.items()]
    taken = map(sum, zip(*(o.nbytes for o in options), strict=True))
    seconds = list(map(sum, zip(*(o.seconds for o in options), strict=True)))
    return sum(max(count - room, 0) for count in taken), max(seconds), sum(seconds)


def _improved(tables: Sequence[Sequence[TableOption]], chosen: list[int], room: int) -> list[int]:
    best = _score(tables, dict(enumerate(chosen)), room)
    while True:
        found, better = best, chosen
        for changed in _neighbours(tables, chosen):
            score = _score(tables, dict(enumerate(changed)), room)
            if score[:2] < found[:2]:
                found, better = score, changed
        if found is best:
            return chosen
        best, chosen = found, better


def _neighbours(tables: Sequence[Sequence[TableOption]], chosen: list[int]) -> list[list[int]]:
    """Lists choices that differ in one table, or in which two tables exchange options."""
    made = [
        [*chosen[:t], n, *chosen[t + 1 :]]
        for t, options in enumerate(tables)
        for n in range(len(options))
        if n != chosen[t]
    ]
    for one, other in combinations(range(len(tables)), 2):
        if chosen[one] != chosen[other]:
            swapped = list(chosen)
            swapped[one], swapped[other] = chosen[other], chosen[one]
            if swapped[one] < len(tables[one]) and swapped[other] < len(tables[other]):
                made.append(swapped)
    return made


# How many misses a cache of any size has, and how memory is shared by tables with caches.
#
# One pass over a trace gives the misses of least recently used caches of all sizes (Mattson et al.
# 1970): a use hits a cache that is larger than the number of other rows used since its last use.
# Memory then goes to the table whose next rows save most misses a byte (Fox 1966), along the lower
# convex hulls of the curves.


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
