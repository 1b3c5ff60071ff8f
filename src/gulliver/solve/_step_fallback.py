"""First-fit packing of a step's samples, where the compiled packer was not built.

It is slower than the extension and packs less tightly: every shape has the one degree that costs
least rank seconds, and no other degrees are tried where groups leave ranks idle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    def follow(self, groups: Sequence[tuple[int, float]], until: float) -> tuple[list[int], float]:
        """Fills groups that are busy up to some seconds, shapes in their own order."""
        left, longest = list(self._counts), 0.0
        for degree, seconds in groups:
            spent, _ = self._fill(left, range(len(left)), degree, until - seconds)
            longest = max(longest, seconds + spent)
        return left, longest

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
            packed = self.pack(float("inf"), [], partly=not self._repeat)
            # No time was long enough, as where two shapes need more ranks together than there are.
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
