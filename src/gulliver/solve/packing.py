"""Things into bins of one size, so that few bins do: best fit, the largest first.

Each thing, the largest first, goes into the fullest bin that still has room for it. At most
11/9 OPT + 4 bins (Johnson, Demers, Ullman, Garey, Graham 1974, "Worst-Case Performance Bounds for
Simple One-Dimensional Packing Algorithms"); for many small things hardly more than the bound.
"""

from __future__ import annotations

import bisect
import importlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gulliver.errors import GulliverError, nearest


@dataclass(frozen=True)
class Packing:
    """Things that lie together."""

    # Numbers of the things of each bin, the largest of them first.
    bins: list[list[int]]
    # Number of bins that no packing can do without.
    bound: int


def pack(sizes: Sequence[int], capacity: int) -> Packing:
    """Packs things into bins; the same for the same sizes in the same order."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for thing in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[thing]
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        bins[number].append(thing)
        left = room - size
        alike = with_room.setdefault(left, [])
        if not alike:
            bisect.insort(rooms, left)
        alike.append(number)
    halves = sum(2 * size > capacity for size in sizes)
    return Packing(bins, max(halves, -(-sum(sizes) // capacity)))


# First-fit packing of a step's samples, where the compiled packer was not built.
#
# It is slower than the extension and packs less tightly: every shape has the one degree that costs
# least rank seconds, and no other degrees are tried where groups leave ranks idle.


Filled = tuple[int, float, list[tuple[int, int]]]
"""Degree, seconds, and how many samples of each shape a group takes."""
Packed = tuple[list[Filled], list[int]]
"""Groups, and how many samples of each shape are left."""
CLOSE = 0.004
"""Share of the bound at which trying more times does not pay."""
FALLBACK_TRIES = 24


@dataclass(frozen=True)
class FallbackAnswer:
    """Seconds of the longest group, and the groups."""

    seconds: float
    found: Packed

    def packed(self) -> Packed:
        return self.found


class FallbackTables:
    """Ends of all shapes, by number."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        self._ranks, self._repeat = ranks, repeat
        self._ends: list[dict[int, list[float]]] = []

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        self._ends[number : number + 1] = [dict(ends)]

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> FallbackPacking:
        ends = [self._ends[number] for number in numbers]
        return FallbackPacking(ends, list(counts), self._ranks, self._repeat)


class FallbackPacking:
    """Samples of a step, and ways to deal them to groups."""

    def __init__(
        self, ends: Sequence[Mapping[int, list[float]]], counts: list[int], ranks: int, repeat: bool
    ) -> None:
        self._ends, self._counts, self._ranks, self._repeat = ends, counts, ranks, repeat

    def pack(
        self, limit: float, degrees: list[int], lost: float = 0.0, partly: bool = False
    ) -> Packed | None:
        """Fills groups up to a time, the shapes of the widest groups and the largest first."""
        chosen = [self._degree(shape, limit, self._ranks) for shape in range(len(self._ends))]
        if not partly and not all(chosen):
            return None
        order = [shape for shape, degree in enumerate(chosen) if degree]
        order.sort(key=lambda s: (-chosen[s], -self._ends[s][chosen[s]][1]))
        left, free, groups = list(self._counts), self._ranks, list[Filled]()
        for shape in order:
            while left[shape]:
                degree = chosen[shape]
                if degree > free:
                    # Too few ranks are left: a narrower group is better than none.
                    degree = self._degree(shape, limit, free)
                if not degree and not partly:
                    return None
                if not degree:
                    break
                seconds, taken = self._fill(left, order, degree, limit)
                groups.append((degree, seconds, taken))
                free -= degree
        return groups, left

    def search(self, bound: float) -> FallbackAnswer | None:
        """Packs all samples in as little time as bisection finds."""
        low, limit = bound, 1.05 * bound
        best: FallbackAnswer | None = None
        for _ in range(FALLBACK_TRIES):
            packed = self.pack(limit, [])
            if packed is None or any(packed[1]):
                low = limit
            else:
                best = _answer(packed)
            limit = 2 * limit if best is None else (low + min(best.seconds, limit)) / 2
            if best is not None and best.seconds - low < CLOSE * bound:
                break
        if best is None:
            # No time was long enough, as where two shapes need more ranks together than there are:
            # one group of a degree that all shapes have can take them one after the other.
            shared = min(set[int].intersection(*map(set, self._ends)), default=0)
            last = self
            if shared and self._repeat:
                ends = [{shared: row[shared]} for row in self._ends]
                last = FallbackPacking(ends, self._counts, self._ranks, self._repeat)
            packed = last.pack(float("inf"), [], partly=not self._repeat)
            best = None if packed is None else _answer(packed)
        return best

    def _degree(self, shape: int, limit: float, most: int) -> int:
        """Degree of least rank seconds a sample, 0 where none has an end in time."""
        rates: list[tuple[float, int]] = []
        for degree, ends in self._ends[shape].items():
            if degree <= most and ends[1] <= limit:
                fits = self._fits(ends, self._counts[shape], limit)
                rates.append((degree * ends[fits] / fits, degree))
        return min(rates)[1] if rates else 0

    def _fill(
        self, left: list[int], order: Sequence[int], degree: int, limit: float
    ) -> tuple[float, list[tuple[int, int]]]:
        """Takes samples for one group out of `left`, as many of each shape as fit."""
        spent, taken = 0.0, list[tuple[int, int]]()
        for shape in order:
            ends = self._ends[shape].get(degree)
            if not left[shape] or ends is None:
                continue
            count = self._fits(ends, left[shape], limit - spent)
            if count:
                left[shape] -= count
                spent += ends[count]
                taken.append((shape, count))
                if not self._repeat:
                    break
        return spent, taken

    @staticmethod
    def _fits(ends: list[float], count: int, limit: float) -> int:
        return bisect_right(ends, limit, 1, min(len(ends), count + 1)) - 1


def _answer(packed: Packed) -> FallbackAnswer:
    return FallbackAnswer(max((seconds for _, seconds, _ in packed[0]), default=0.0), packed)


# The packer of steps: the extension `gulliver.solve._packer` where it was built, else first fit.
#
# ``GULLIVER_PACKER=python`` or ``native`` forces one. Their plans differ, so all ranks need the
# same.


TRIES = 10
"""Times that are tried."""
FIRST = 1.05
"""The first time that is tried, over the bound."""
WIDENED = tuple(1.06 ** (2**number) for number in range(7))
"""How much longer the next time is, while none is found: by its number."""
OTHERWISE = ((0.5, 1, 0.02), (2.0, 1, 0.06), (0.0, 2, 0.06), (0.0, 4, 0.06))
"""Second tries: how much of the time that a shape's samples leave in a group counts as lost, what
part of the ranks a group may have (one wide group makes all samples pay for its messages), and the
gap to the bound from which on it is tried."""
SHORTER = 0.01
"""Share by which each of those is shorter than the best so far."""
INTERFACE = 1
"""Version of the extension's interface; both sides count up when their calls change."""
PACKERS = ("native", "python")
"""Values of ``$GULLIVER_PACKER``; the first that is there is taken where it is not set."""


class NativePacking:
    """A packing of the extension."""

    def __init__(self, core: Any, tries: Any) -> None:
        self._core, self._tries = core, tries

    def pack(
        self,
        limit: float,
        degrees: list[int],
        lost: float = 0.0,
        partly: bool = False,
        most: int | None = None,
    ) -> Packed | None:
        """Fills groups up to a time."""
        packed, degrees[:] = self._core.pack(limit, degrees, lost, partly, most)
        return packed

    def search(self, bound: float) -> Any:
        """Packs all samples in as little time as is found; None where they do not fit."""
        return self._core.search(bound, self._tries)


class NativeTables:
    """Ends and rates of all shapes in the extension."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        built = _extension()
        self._core = built.Tables(ranks, repeat)
        self._tries = built.Tries(TRIES, CLOSE, FIRST, SHORTER, list(WIDENED), list(OTHERWISE))

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Takes the ends of a shape by degree, and its least rank seconds of a sample."""
        self._core.learn(number, list(map(int, ends)), list(ends.values()), rate)

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> NativePacking:
        """The packing of so many samples of shapes."""
        return NativePacking(self._core.packing(numbers, list(map(int, counts))), self._tries)


def packer_problem() -> str | None:
    """Says why steps are not packed by the extension; None where they are."""
    wanted = os.environ.get("GULLIVER_PACKER", "")
    if wanted and wanted not in PACKERS:
        raise GulliverError(f"GULLIVER_PACKER={wanted!r} is unknown: {nearest(wanted, PACKERS)}")
    if wanted == "python":
        return "GULLIVER_PACKER=python"
    problem = _not_built()
    if problem and wanted:
        raise GulliverError(f"GULLIVER_PACKER=native cannot be met: {problem}")
    return problem


def step_tables(ranks: int, repeat: bool) -> NativeTables | FallbackTables:
    """Returns empty tables of the packer that is there."""
    if packer_problem() is None:
        return NativeTables(ranks, repeat)
    return FallbackTables(ranks, repeat)


@cache
def _not_built() -> str | None:
    try:
        built = _extension().INTERFACE
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built != INTERFACE:
        return "its extension is of another version: pip install -e . builds it again"
    return None


def _extension() -> Any:
    # By name: type checking must pass where it has not been built.
    return importlib.import_module("gulliver.solve._packer")
