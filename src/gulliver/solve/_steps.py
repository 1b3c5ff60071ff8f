"""Steps dealt to groups of ranks: who shares which samples, so that all ranks end together.

Samples of a shape are alike. A micro-batch of b of them on a group of d ranks takes t(shape, d, b)
seconds, and a group runs its micro-batches one after the other. Given how many samples there are of
each shape, ranks are partitioned into groups, and samples dealt to them, so that the longest group
is as short as possible. That is makespan on moldable machines with batches, which is NP-hard; what
is done is McNaughton's wrap-around rule inside a search:

    for a time T, found by bisection between the bound and the best so far:
        every shape names the degree at which it costs least rank seconds and one sample fits in T
        shapes in order of degree, then of one sample's seconds, the largest first
        a group of the first shape's degree opens and is filled up to T: as many samples of each
        shape in that order as fit, so that small samples close what large ones leave
        T is possible if the ranks suffice

The bound of a step: the ranks' time together is at least the least rank seconds of every shape's
samples, whatever groups they are in (`covering`, exact by dynamic programming), and some group
runs the sample that takes longest.

Read `plan_step` first. It knows nothing of torch, files, or of what a sample is.

Source: McNaughton 1959, "Scheduling with Deadlines and Loss Functions" (the wrap-around rule).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve._accumulation import accumulated, covering, split_batches

TRIES, CLOSE = 10, 0.004
"""Times that are tried, and the share of the bound at which trying more does not pay."""
FIRST, WIDEN = 1.05, 1.06
"""The first time that is tried, over the bound; how much longer the next is while none is found."""
OTHERWISE = ((0.5, 1, 0.02), (2.0, 1, 0.06), (0.0, 2, 0.06), (0.0, 4, 0.06))
"""Second tries: how much of the time that a shape's samples leave in a group counts as lost, what
part of the ranks a group may have (one wide group makes all samples pay for its messages), and the
gap to the bound from which on it is tried."""
REMEMBERED = 4096
"""Steps whose plans are kept: arranged ones come again."""
SHORTER = 0.01
"""Share by which each of those is shorter than the best so far."""


class Piece(NamedTuple):
    """Samples of one shape that a group runs: the sizes of their micro-batches."""

    shape: Hashable
    batches: tuple[int, ...]


@dataclass(frozen=True)
class GroupWork:
    """What one group of ranks runs in a step.

    Attributes:
        degree: ranks of the group.
        seconds: seconds of all its micro-batches.
        pieces: micro-batches by shape, in order.
    """

    degree: int
    seconds: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class BalancedStep:
    """A step: groups, the widest first.

    Attributes:
        groups: groups with work; ranks that are in none have none.
        seconds: seconds of the longest group.
        bound: seconds that no plan can be under.
        left: samples that found no place, by shape, where a group may run one micro-batch only.
    """

    groups: tuple[GroupWork, ...]
    seconds: float
    bound: float
    left: dict[Hashable, int]


_Packed = tuple[list[tuple[int, float, list[tuple[Hashable, int]]]], dict[Hashable, int]]


class StepSolver:
    """Plans steps from tables of seconds.

    Args:
        seconds: seconds of micro-batches of 1, 2, ... samples by shape and degree; empty where not
            even one sample fits the memory.
        ranks: ranks that a step has.
        repeat: groups may run several micro-batches one after the other; else one each.

    Raises:
        GulliverError: no ranks, or a shape that fits at no degree.
    """

    def __init__(
        self,
        seconds: Mapping[Hashable, Mapping[int, np.ndarray]],
        ranks: int,
        repeat: bool = True,
    ) -> None:
        if ranks < 1:
            raise GulliverError(f"a step needs at least one rank, not {ranks}")
        self.ranks, self.repeat = ranks, repeat
        self._seconds: dict[Hashable, dict[int, np.ndarray]] = {}
        self._names: dict[Hashable, str] = {}
        self._known: dict[Hashable, int] = {}
        self._ends: dict[Hashable, dict[int, list[float]]] = {}
        self._splits: dict[tuple[Hashable, int, int], tuple[int, ...]] = {}
        self._least: dict[Hashable, list[float]] = {}
        self._rate: dict[Hashable, float] = {}
        self._one: dict[Hashable, float] = {}
        self._plans: dict[frozenset[tuple[Hashable, int]], BalancedStep] = {}
        for shape, rows in seconds.items():
            self.add(shape, rows)

    def add(self, shape: Hashable, rows: Mapping[int, np.ndarray]) -> None:
        """Adds a shape with its seconds by degree.

        Raises:
            GulliverError: it fits at no degree.
        """
        fit = {d: np.asarray(t) for d, t in sorted(rows.items()) if len(t) and d <= self.ranks}
        if not fit:
            raise GulliverError(f"shape {shape!r} fits at no degree of up to {self.ranks} ranks")
        self._seconds[shape], self._names[shape], self._known[shape] = fit, repr(shape), 0
        self._one[shape] = min(float(t.min()) for t in fit.values())
        self._plans.clear()
        self._learn(shape, 16)

    def _learn(self, shape: Hashable, count: int) -> None:
        """Makes the tables of a shape long enough for so many samples."""
        if count <= self._known[shape]:
            return
        size = max(16, 1 << (count - 1).bit_length())
        rows = self._seconds[shape]
        self._known[shape] = size
        if self.repeat:
            self._ends[shape] = {d: accumulated(t, size).tolist() for d, t in rows.items()}
        else:
            ends = {d: np.maximum.accumulate(t).tolist() for d, t in rows.items()}
            self._ends[shape] = {d: [0.0, *row] for d, row in ends.items()}
        least, self._rate[shape] = covering({d: d * t for d, t in rows.items()}, size)
        self._least[shape] = least.tolist()

    def rank_seconds(self, shape: Hashable) -> float:
        """The least rank seconds of a sample of a shape, in the best micro-batch."""
        return self._rate[shape]

    def one_sample_seconds(self, shape: Hashable) -> float:
        """The least seconds that a micro-batch with such a sample takes."""
        return self._one[shape]

    def seconds_of(self, shape: Hashable, degree: int, samples: int) -> float:
        """Seconds of a micro-batch."""
        return float(self._seconds[shape][degree][samples - 1])

    def first_ends(self, shape: Hashable, count: int) -> list[float]:
        """Seconds in which 1, 2, ... samples of a shape end on a group, at every degree."""
        return [end for ends in self._ends[shape].values() for end in ends[1 : count + 1]]

    def lot_seconds(self, shape: Hashable) -> float:
        """Seconds of the micro-batch of least rank seconds a sample, at the least degree."""
        seconds = next(iter(self._seconds[shape].values()))
        return float(seconds[int(np.argmin(seconds / np.arange(1, len(seconds) + 1)))])

    def fill(
        self,
        counts: Mapping[Hashable, int],
        limit: float,
        small: Mapping[Hashable, int] | None = None,
        until: float = 0.0,
    ) -> tuple[dict[Hashable, int], float] | None:
        """Fills all ranks up to a time with some of many samples, the largest first.

        Args:
            counts: samples of each shape.
            limit: seconds that no group runs longer than.
            small: samples that may follow, of other shapes, in order.
            until: seconds up to which those do.

        Returns:
            Samples that found a place, by shape, and seconds of the longest group; None where
            there are none.
        """
        for shape, count in [*counts.items(), *(small or {}).items()]:
            self._learn(shape, count)
        fitting = {s: n for s, n in counts.items() if min(self.first_ends(s, 1)) <= limit}
        packed = self._pack(fitting, limit, 0.0, {}, partly=True) if fitting else ([], {})
        if packed is None:
            return None
        groups, left = packed
        taken = {s: n - left[s] for s, n in fitting.items() if n > left[s]}
        longest = max((seconds for _, seconds, _ in groups), default=0.0)
        if small:
            rest = dict(small)
            order = list(rest)
            free = self.ranks - sum(degree for degree, *_ in groups)
            each = [*groups, *[(1, 0.0, [])] * free]
            for degree, seconds, _ in each:
                more, _ = self._fill(order, rest, degree, until - seconds)
                longest = max(longest, seconds + more)
            taken |= {s: n - rest[s] for s, n in small.items() if n > rest[s]}
        return (taken, longest) if taken else None

    def bound(self, counts: Mapping[Hashable, int]) -> float:
        """Seconds that no plan of so many samples of each shape can be under."""
        together = 0.0
        for shape, count in counts.items():
            least = self._least[shape]
            together += least[count] if count < len(least) else count * self._rate[shape]
        return max(together / self.ranks, max(self._one[shape] for shape in counts))

    def plan_step(self, counts: Mapping[Hashable, int]) -> BalancedStep:
        """Deals samples to groups of ranks; the same answer for the same counts in any order.

        Args:
            counts: samples of each shape, none of 0.

        Returns:
            The groups; nothing is left where groups may run several micro-batches.
        """
        if not counts:
            return BalancedStep((), 0.0, 0.0, {})
        key = frozenset(counts.items())
        if key not in self._plans:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            self._plans[key] = self._planned(counts)
        return self._plans[key]

    def _planned(self, counts: Mapping[Hashable, int]) -> BalancedStep:
        # The order of a mapping is the order of arrival: answers must not hang on it.
        counts = {shape: counts[shape] for shape in sorted(counts, key=self._names.__getitem__)}
        for shape, count in counts.items():
            self._learn(shape, count)
        bound = self.bound(counts)
        best, longest = self._search(counts, bound)
        for lost, part, gap in OTHERWISE:
            if best is not None and longest > (1 + gap) * bound:
                most = max(1, self.ranks // part)
                best, longest = self._shortened(counts, bound, best, longest, lost, most)
        if best is None:
            best = self._most(counts)
            longest = max((seconds for _, seconds, _ in best[0]), default=0.0)
        groups, left = best
        if any(left.values()):
            bound = self.bound({s: n - left[s] for s, n in counts.items() if n > left[s]})
        works = [
            GroupWork(
                degree,
                seconds,
                tuple(Piece(shape, self._split(shape, degree, n)) for shape, n in taken),
            )
            for degree, seconds, taken in groups
        ]
        works.sort(key=lambda work: -work.degree)
        return BalancedStep(tuple(works), longest, bound, {s: n for s, n in left.items() if n})

    def _split(self, shape: Hashable, degree: int, count: int) -> tuple[int, ...]:
        key = shape, degree, count
        if key not in self._splits:
            seconds = self._seconds[shape][degree]
            self._splits[key] = split_batches(seconds, count) if self.repeat else (count,)
        return self._splits[key]

    def _search(self, counts: dict[Hashable, int], bound: float) -> tuple[_Packed | None, float]:
        """Bisects for the least time that the ranks suffice for."""
        low, high, limit = bound, 0.0, FIRST * bound
        best, longest = None, float("inf")
        degrees: dict[Hashable, int] = {}
        for number in range(TRIES):
            chosen = dict(degrees)
            packed = self._pack(counts, limit, 0.0, chosen)
            if packed is None or any(packed[1].values()):
                low = limit
                limit = (low + high) / 2 if high else limit * WIDEN ** (2 ** min(number, 6))
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
        if best is None and self.repeat:
            best = self._together(counts)
            longest = best[0][0][1]
        return best, longest

    def _shortened(
        self,
        counts: dict[Hashable, int],
        bound: float,
        best: _Packed,
        longest: float,
        lost: float,
        most: int,
    ) -> tuple[_Packed, float]:
        """Tries shorter and shorter times with other degrees, until the ranks do not suffice."""
        degrees: dict[Hashable, int] = {}
        shorter = SHORTER
        for _ in range(TRIES):
            limit = max(bound, (1 - shorter) * longest)
            chosen = dict(degrees)
            packed = self._pack(counts, limit, lost, chosen, most=most)
            if packed is not None and not any(packed[1].values()):
                degrees = chosen
                best, longest = packed, max(group[1] for group in packed[0])
                shorter *= 2
            else:
                shorter /= 2
                if shorter < SHORTER:
                    break
        return best, longest

    def _together(self, counts: dict[Hashable, int]) -> _Packed:
        """All samples in one group of the degree that ends soonest: always possible."""
        found = []
        for degree in {d for rows in self._seconds.values() for d in rows}:
            if all(degree in self._ends[shape] for shape in counts):
                seconds = sum(self._ends[shape][degree][n] for shape, n in counts.items())
                found.append((seconds, degree))
        if not found:
            raise GulliverError(
                f"no {self.ranks} ranks can run these shapes in one step: {list(counts)}"
            )
        seconds, degree = min(found)
        return [(degree, seconds, list(counts.items()))], {}

    def _most(self, counts: dict[Hashable, int]) -> _Packed:
        """Deals as many samples as find a place when time does not matter."""
        packed = self._pack(counts, float("inf"), 0.0, {}, partly=True)
        assert packed is not None, "what does not fit is left"
        return packed

    def _degree(
        self, shape: Hashable, count: int, limit: float, ranks: int, lost: float
    ) -> int | None:
        """Degree of least rank seconds; what groups leave unused counts by `lost`."""
        least, chosen = float("inf"), None
        for degree, ends in self._ends[shape].items():
            if degree <= ranks and ends[1] <= limit:
                fits = count
                if count >= len(ends) or ends[count] > limit:
                    fits = bisect_right(ends, limit, 1, min(len(ends), count + 1)) - 1
                left = limit - ends[fits] if lost and fits < count else 0.0
                each = degree * (ends[fits] + lost * left) / fits
                if each < least:
                    least, chosen = each, degree
        return chosen

    def _pack(
        self,
        counts: dict[Hashable, int],
        limit: float,
        lost: float,
        degrees: dict[Hashable, int],
        partly: bool = False,
        most: int | None = None,
    ) -> _Packed | None:
        """Fills groups up to a time; None where a sample does not fit it or ranks run out.

        `degrees` keeps what shapes have chosen, for times near each other choose alike.
        """
        for shape, count in counts.items():
            known = degrees.get(shape)
            if known is not None and self._ends[shape][known][1] <= limit:
                continue
            degree = self._degree(shape, count, limit, most or self.ranks, lost)
            if degree is None and most is not None:
                degree = self._degree(shape, count, limit, self.ranks, lost)
            if degree is None:
                return None
            degrees[shape] = degree
        order = sorted(counts, key=lambda s: (-degrees[s], -self._ends[s][degrees[s]][1]))
        left, free, groups = dict(counts), self.ranks, []
        while order:
            first = order[0]
            degree = degrees[first]
            if degree > free:
                found = self._degree(first, left[first], limit, free, 0.0) if free else None
                if found is None and partly:
                    order.pop(0)
                    continue
                if found is None:
                    return None
                degree = found
            groups.append((degree, *self._fill(order, left, degree, limit)))
            free -= degree
            if not free and order:
                return (groups, left) if partly else None
        return groups, left

    def _fill(
        self, order: list[Hashable], left: dict[Hashable, int], degree: int, limit: float
    ) -> tuple[float, list[tuple[Hashable, int]]]:
        """Fills one group with what fits, the largest first; takes it from `order` and `left`."""
        spent, taken = 0.0, []
        for shape in list(order):
            ends = self._ends[shape].get(degree)
            if ends is None or spent + ends[1] > limit:
                continue
            count = left[shape]
            if count >= len(ends) or spent + ends[count] > limit:
                count = bisect_right(ends, limit - spent, 1, min(len(ends), count + 1)) - 1
                if not count:  # sums of floats may disagree in the last digit
                    continue
            spent += ends[count]
            taken.append((shape, count))
            left[shape] -= count
            if not left[shape]:
                order.remove(shape)
            if not self.repeat:
                break
        return spent, taken
