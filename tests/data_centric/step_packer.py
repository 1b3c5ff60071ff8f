"""The packer of steps in plain Python: the oracle of `native/packing_module.cpp`, to the bit.

The extension tries many times for each step. What does not depend on the time is kept from one to
the next: the order in which shapes are taken, and the first ends of every shape on groups of a
degree. Times are found by bisection between the bound and the best so far; where the answer is far
over the bound, other degrees are tried at shorter and shorter times.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from gulliver.solve.packing import CLOSE, FIRST, OTHERWISE, SHORTER, TRIES, WIDENED

Ends = Mapping[int, list[float]]
"""Seconds in which 0, 1, ... samples of a shape end on a group, by degree."""
Filled = tuple[int, float, list[tuple[int, int]]]
"""Degree, seconds, and how many samples of each shape a group takes."""
Packed = tuple[list[Filled], list[int]]
"""Groups, and how many samples of each shape are left."""

FEW = 16
"""Shapes up to which looking at each is faster than to find the next one that fits."""
ROUNDED = 1e-12
"""Share of a time by which sums of floats may differ."""


# [Note: why little is looked at] Most of a group's visits to shapes would find that one more sample
# does not fit. So the least first end up to each place of the order is kept: the first place where
# it is within the room that is left is found by bisection, and nothing before it can fit. And a
# time is given up as soon as the ranks that are free cannot hold what is left even at its best
# rate. Both leave every answer as it would be without.
class Packing:
    """The samples of a step, and ways to deal them to groups."""

    def __init__(
        self,
        ends: Sequence[Ends],
        counts: Sequence[int],
        rates: Sequence[float],
        ranks: int,
        repeat: bool = True,
    ) -> None:
        self.ends, self.counts, self.rates = ends, counts, rates
        self.ranks, self.repeat = ranks, repeat
        self._needed = 0.0
        # Not by `sum`, which rounds otherwise from Python 3.12 on.
        for count, rate in zip(counts, rates, strict=True):
            self._needed += count * rate
        self._orders: dict[tuple[int, ...], Order] = {}

    def pack(
        self,
        limit: float,
        degrees: list[int],
        lost: float = 0.0,
        partly: bool = False,
        most: int | None = None,
    ) -> Packed | None:
        """Fills groups up to a time, the shapes of the widest groups and the largest first."""
        if not self._choose(limit, degrees, lost, partly, most):
            return None
        order = self._order(degrees)
        left, free, needed = list(self.counts), self.ranks, self._needed
        groups: list[Filled] = []
        head, waiting = 0, len(order.members)
        while waiting:
            first = order.members[head]
            if not left[first]:
                head += 1
                continue
            degree = degrees[first]
            if degree > free:
                degree = self._degree(first, left[first], limit, free, 0.0) if free else 0
                if not degree and partly:
                    head, waiting = head + 1, waiting - 1
                    continue
            if not degree or (not partly and needed > free * limit * (1 + 1e-9)):
                return None
            spent, taken = order.fill(left, head, degree, limit, self.repeat)
            for shape, count in taken:
                left[shape] -= count
                waiting -= not left[shape]
                needed -= count * self.rates[shape]
            groups.append((degree, spent, taken))
            free -= degree
            if not free and waiting:
                return (groups, left) if partly else None
        return groups, left

    def _choose(
        self, limit: float, degrees: list[int], lost: float, partly: bool, most: int | None
    ) -> bool:
        """Chooses the degree of every shape; whether all have one."""
        for shape, ends in enumerate(self.ends):
            known = degrees[shape]
            if known and ends[known][1] <= limit:
                continue
            count = self.counts[shape]
            degree = self._degree(shape, count, limit, most or self.ranks, lost)
            if not degree and most is not None:
                degree = self._degree(shape, count, limit, self.ranks, lost)
            if not degree and not partly:
                return False
            degrees[shape] = degree
        return True

    def _degree(self, shape: int, count: int, limit: float, ranks: int, lost: float) -> int:
        """Degree of least rank seconds, 0 for none; what groups leave unused counts by `lost`."""
        least, chosen = float("inf"), 0
        for degree, ends in self.ends[shape].items():
            if degree <= ranks and ends[1] <= limit:
                fits = count
                if count >= len(ends) or ends[count] > limit:
                    fits = bisect_right(ends, limit, 1, min(len(ends), count + 1)) - 1
                left = limit - ends[fits] if lost and fits < count else 0.0
                each = degree * (ends[fits] + lost * left) / fits
                if each < least:
                    least, chosen = each, degree
        return chosen

    def _order(self, degrees: Sequence[int]) -> Order:
        key = tuple(degrees)
        if key not in self._orders:
            members = [shape for shape, degree in enumerate(degrees) if degree]
            members.sort(key=lambda s: (-degrees[s], -self.ends[s][degrees[s]][1]))
            self._orders[key] = Order(members, self.ends)
        return self._orders[key]


class Order:
    """Shapes in the order in which groups take them."""

    def __init__(self, members: list[int], ends: Sequence[Ends]) -> None:
        self.members, self._ends = members, ends
        self._rows: dict[int, tuple[list[list[float]], list[float], list[float]]] = {}

    def _row(self, degree: int) -> tuple[list[list[float]], list[float], list[float]]:
        """Ends at a degree by place, the first of each, and the least so far with its sign turned.

        A shape that has no such degree ends never.
        """
        if degree not in self._rows:
            never = [0.0, float("inf")]
            ends = [self._ends[shape].get(degree, never) for shape in self.members]
            firsts = [row[1] for row in ends]
            # Turned, they grow from place to place, as bisection needs.
            self._rows[degree] = ends, firsts, [-low for low in accumulate(firsts, min)]
        return self._rows[degree]

    def fill(
        self, left: Sequence[int], head: int, degree: int, limit: float, repeat: bool
    ) -> tuple[float, list[tuple[int, int]]]:
        """Fills one group with what fits: its seconds, and samples of each shape."""
        rows, firsts, lows = self._rows.get(degree) or self._row(degree)
        members, spent, slack = self.members, 0.0, ROUNDED * limit
        taken: list[tuple[int, int]] = []
        places = len(members)
        many = places > FEW
        place = max(head, bisect_left(lows, -limit - slack)) if many else head
        while place < places:
            count = left[members[place]]
            if count and spent + firsts[place] <= limit:
                ends = rows[place]
                if count >= len(ends) or spent + ends[count] > limit:
                    count = bisect_right(ends, limit - spent, 1, min(len(ends), count + 1)) - 1
                if count:  # sums of floats may disagree in the last digit
                    spent += ends[count]
                    taken.append((members[place], count))
                    if not repeat:
                        break
                    if many:
                        place = max(place, bisect_left(lows, spent - limit - slack) - 1)
            place += 1
        return spent, taken


class PythonAnswer:
    """What a search has found: seconds of the longest group, and the groups."""

    def __init__(self, seconds: float, packed: Packed) -> None:
        self.seconds, self._packed = seconds, packed

    def packed(self) -> Packed:
        """Groups, and what is left."""
        return self._packed


class PythonTables:
    """Ends and rates of all shapes, by number, in plain Python."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        self._ranks, self._repeat = ranks, repeat
        self._known: list[tuple[dict[int, list[float]], float]] = []

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Takes the ends of a shape by degree, and its least rank seconds of a sample."""
        self._known[number : number + 1] = [(dict(ends), rate)]

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> SearchedPacking:
        """The packing of so many samples of shapes."""
        known = [self._known[number] for number in numbers]
        ends, rates = [ends for ends, _ in known], [rate for _, rate in known]
        return SearchedPacking(ends, counts, rates, self._ranks, self._repeat)


class SearchedPacking(Packing):
    """A packing for which the time is searched."""

    def search(self, bound: float) -> PythonAnswer | None:
        """Packs all samples in as little time as is found; or what finds a place, without repeats.

        Args:
            bound: seconds that no packing can be under.

        Returns:
            What was found; None where no degree is common to all shapes, so that not even one group
            can run them.
        """
        best, longest = self._bisected(bound)
        if best is None and self.repeat:
            best = self._together()
            if best is None:
                return None
            longest = best[0][0][1]
        for lost, part, gap in OTHERWISE:
            if best is not None and longest > (1 + gap) * bound:
                most = max(1, self.ranks // part)
                best, longest = self._shortened(bound, best, longest, lost, most)
        if best is None:
            best = self.pack(float("inf"), [0] * len(self.counts), partly=True)
            assert best is not None, "what does not fit is left"
            longest = max((seconds for _, seconds, _ in best[0]), default=0.0)
        return PythonAnswer(longest, best)

    def _bisected(self, bound: float) -> tuple[Packed | None, float]:
        """Bisects for the least time that the ranks suffice for."""
        low, high, limit = bound, 0.0, FIRST * bound
        best, longest = None, float("inf")
        degrees = [0] * len(self.counts)
        for number in range(TRIES):
            chosen = list(degrees)
            packed = self.pack(limit, chosen)
            if packed is None or any(packed[1]):
                low = limit
                limit = (low + high) / 2 if high else limit * WIDENED[min(number, 6)]
                continue
            # What a time has chosen that is too short would be too wide for longer ones.
            degrees = chosen
            seconds = max(group[1] for group in packed[0])
            if seconds < longest:
                best, longest = packed, seconds
            high = min(seconds, limit)
            if high - low < CLOSE * bound:
                break
            limit = (low + high) / 2
        return best, longest

    def _shortened(
        self, bound: float, best: Packed, longest: float, lost: float, most: int
    ) -> tuple[Packed, float]:
        """Tries shorter and shorter times with other degrees, until the ranks do not suffice."""
        degrees = [0] * len(self.counts)
        shorter = SHORTER
        for _ in range(TRIES):
            limit = max(bound, (1 - shorter) * longest)
            chosen = list(degrees)
            packed = self.pack(limit, chosen, lost, most=most)
            if packed is not None and not any(packed[1]):
                degrees = chosen
                best, longest = packed, max(group[1] for group in packed[0])
                shorter *= 2
            else:
                shorter /= 2
                if shorter < SHORTER:
                    break
        return best, longest

    def _together(self) -> Packed | None:
        """All samples in one group of the degree that ends soonest; None where none is common."""
        found = []
        for degree in self.ends[0] if self.ends else ():
            if all(degree in ends for ends in self.ends):
                seconds = 0.0
                for ends, count in zip(self.ends, self.counts, strict=True):
                    seconds += ends[degree][count]
                found.append((seconds, degree))
        if not found:
            return None
        seconds, degree = min(found)
        return [(degree, seconds, list(enumerate(self.counts)))], [0] * len(self.counts)
