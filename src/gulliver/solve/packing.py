"""Packs items into bins (best fit decreasing), and a step's samples into groups of ranks.

Each item, largest first, goes into the fullest bin with room for it. This needs at most 11/9 OPT +
4 bins (Johnson, Demers, Ullman, Garey, Graham 1974, "Worst-Case Performance Bounds for Simple
One-Dimensional Packing Algorithms"), and is close to the bound for many small items.
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
    """Assignment of items to bins."""

    # Indices of the items of each bin, largest first.
    bins: list[list[int]]
    # Lower bound on the number of bins.
    bound: int


def pack(sizes: Sequence[int], capacity: int) -> Packing:
    """Packs items into bins; deterministic in the sizes and their order."""
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


# First-fit packing of a step's samples, used if the compiled packer was not built.
#
# It is slower than the extension and packs less tightly: every shape uses the one degree that costs
# the fewest rank seconds, and no other degrees are tried if groups leave ranks idle.


Filled = tuple[int, float, list[tuple[int, int]]]
"""Degree, seconds, and number of samples of each shape in a group."""
Packed = tuple[list[Filled], list[int]]  # groups, and the remaining samples of each shape
CLOSE = 0.004  # ratio to the bound below which the search stops
FALLBACK_TRIES = 24


@dataclass(frozen=True)
class FallbackAnswer:
    """Seconds of the longest group, and the groups."""

    seconds: float
    found: Packed

    def packed(self) -> Packed:
        return self.found


class FallbackTables:
    """End times of all shapes, by index."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        self._ranks, self._repeat = ranks, repeat
        self._ends: list[dict[int, list[float]]] = []

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        self._ends[number : number + 1] = [dict(ends)]

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> FallbackPacking:
        ends = [self._ends[number] for number in numbers]
        return FallbackPacking(ends, list(counts), self._ranks, self._repeat)


class FallbackPacking:
    """Samples of a step, and their assignment to groups."""

    def __init__(
        self, ends: Sequence[Mapping[int, list[float]]], counts: list[int], ranks: int, repeat: bool
    ) -> None:
        self._ends, self._counts, self._ranks, self._repeat = ends, counts, ranks, repeat

    def pack(self, limit: float, partly: bool = False) -> Packed | None:
        """Fills groups up to a time limit, widest groups and largest shapes first."""
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
        """Packs all samples, searching for the shortest time by bisection."""
        low, limit = bound, 1.05 * bound
        best: FallbackAnswer | None = None
        for _ in range(FALLBACK_TRIES):
            packed = self.pack(limit)
            if packed is None or any(packed[1]):
                low = limit
            else:
                best = _answer(packed)
            limit = 2 * limit if best is None else (low + min(best.seconds, limit)) / 2
            if best is not None and best.seconds - low < CLOSE * bound:
                break
        if best is None:
            # No time was long enough, for example if two shapes together need more ranks than there
            # are: one group of a degree that all shapes support can run them sequentially.
            shared = min(set[int].intersection(*map(set, self._ends)), default=0)
            last = self
            if shared and self._repeat:
                ends = [{shared: row[shared]} for row in self._ends]
                last = FallbackPacking(ends, self._counts, self._ranks, self._repeat)
            packed = last.pack(float("inf"), partly=not self._repeat)
            best = None if packed is None else _answer(packed)
        return best

    def _degree(self, shape: int, limit: float, most: int) -> int:
        """Degree with the fewest rank-seconds per sample; 0 if none meets the limit."""
        rates: list[tuple[float, int]] = []
        for degree, ends in self._ends[shape].items():
            if degree <= most and ends[1] <= limit:
                fits = self._fits(ends, self._counts[shape], limit)
                rates.append((degree * ends[fits] / fits, degree))
        return min(rates)[1] if rates else 0

    def _fill(
        self, left: list[int], order: Sequence[int], degree: int, limit: float
    ) -> tuple[float, list[tuple[int, int]]]:
        """Takes samples for one group from `left`, as many of each shape as fit."""
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


# The step packer: the extension `gulliver.solve._packer` if it was built, else first fit.
#
# ``GULLIVER_PACKER=python`` or ``native`` selects one. Their plans differ, so all ranks must use
# the same.


INTERFACE = 2
"""Version of the extension's interface; increment it on both sides if its calls change."""
PACKERS = ("native", "python")
"""Values of ``$GULLIVER_PACKER``; if unset, the first available one is used."""


class NativeTables:
    """End times and rates of all shapes, in the native extension."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        self._core = _extension().Tables(ranks, repeat)

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Stores a shape's end times by degree, and its minimum rank-seconds per sample."""
        self._core.learn(number, list(map(int, ends)), list(ends.values()), rate)

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> Any:
        return self._core.packing(numbers, list(map(int, counts)))


def packer_problem() -> str | None:
    """Returns why the native extension is not used; None if it is."""
    wanted = os.environ.get("GULLIVER_PACKER", "")
    if wanted and wanted not in PACKERS:
        raise GulliverError(f"GULLIVER_PACKER={wanted!r} is unknown: {nearest(wanted, PACKERS)}")
    if wanted == "python":
        return "GULLIVER_PACKER=python"
    problem = _not_built()
    if problem and wanted:
        raise GulliverError(f"GULLIVER_PACKER=native is not possible: {problem}")
    return problem


def step_tables(ranks: int, repeat: bool) -> NativeTables | FallbackTables:
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
        return "its extension has another version; rebuild it with pip install -e ."
    return None


def _extension() -> Any:
    # By name: type checking must pass if it has not been built.
    return importlib.import_module("gulliver.solve._packer")
