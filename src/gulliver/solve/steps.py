"""Splits samples of one shape into micro-batches, and samples of a step into groups of ranks.

`accumulated` returns the time of a group for 1, 2, ... samples, `split_batches` the corresponding
micro-batches, and `covering` the fewest rank-seconds for each number of samples on any groups,
which bounds every plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve.packing import FallbackAnswer, step_tables


def accumulated(seconds: np.ndarray, most: int) -> np.ndarray:
    """Seconds of 0, 1, ... samples on one group, split into micro-batches."""
    # Samples are split evenly into the fewest micro-batches that fit, evenly into those with the
    # best rate, or into full ones with the best rate plus a remainder. The first is best if seconds
    # grow superlinearly with the batch size, the last if they grow sublinearly.
    counts = np.arange(most + 1)
    _, found = _ways(seconds, counts)
    return np.maximum.accumulate(np.min(found, axis=0))


def split_batches(seconds: np.ndarray, count: int) -> tuple[int, ...]:
    """Splits samples into the micro-batches that `accumulated` chose, largest first."""
    ways, found = _ways(seconds, np.array([count]))
    way = int(np.argmin(found[:, 0]))
    if way < len(ways):
        parts = int(ways[way][0])
        low, more = divmod(count, parts)
        return (low + 1,) * more + (low,) * (parts - more)
    best = _best_batch(seconds)
    whole, rest = divmod(count, best)
    return (best,) * whole + ((rest,) if rest else ())


def covering(rank_seconds: Mapping[int, np.ndarray], most: int) -> tuple[np.ndarray, float]:
    """Minimum rank-seconds of 0, 1, ... samples, in micro-batches on groups of any size."""
    # Exact: least(n) = min over b of least(n - b) + w(b), where w(b) is the minimum over degrees. A
    # lower bound for any assignment of samples to groups in a step.
    size = max(map(len, rank_seconds.values()))
    one = np.full(size, np.inf)
    for row in rank_seconds.values():
        one[: len(row)] = np.minimum(one[: len(row)], row)
    most = min(most, 1024)
    least = np.zeros(most + 1)
    for n in range(1, most + 1):
        reach = min(n, size)
        least[n] = np.min(least[n - reach : n][::-1] + one[:reach])
    return least, float(np.min(one / np.arange(1, size + 1)))


def _best_batch(seconds: np.ndarray) -> int:
    return int(np.argmin(seconds / np.arange(1, len(seconds) + 1))) + 1


def _ways(seconds: np.ndarray, counts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Part counts of three even splits, [3][K]; seconds of each and of the best, [4, K]."""
    size, best = len(seconds), _best_batch(seconds)
    at = np.concatenate(([0.0], seconds))
    fewest = np.maximum(1, -(-counts // size))
    ways = [fewest, np.maximum(fewest, counts // best), np.maximum(fewest, -(-counts // best))]
    found = []
    for parts in ways:
        low = counts // parts
        more = counts - low * parts
        found.append((parts - more) * at[low] + more * at[np.minimum(low + 1, size)])
    whole, rest = np.divmod(counts, best)
    found.append(whole * at[best] + at[rest])
    return ways, np.array(found)


# Assigns a step's samples to groups of ranks so that all ranks finish together.
#
# Samples of a shape are equal. A micro-batch of b of them on a group of d ranks takes t(shape, d,
# b) seconds, and a group runs its micro-batches sequentially. Given the number of samples of each
# shape, ranks are partitioned into groups and samples assigned to them so that the longest group is
# as short as possible. This is makespan minimization for moldable jobs with batching, which is
# NP-hard; the heuristic is McNaughton's wrap-around rule inside a search:
#
#     for a time T, found by bisection between the bound and the best so far:
#         every shape takes the degree with the fewest rank seconds at which one sample fits in T
#         shapes are ordered by degree, then by the seconds of one sample, largest first
#         a group of the first shape's degree opens and is filled up to T: as many samples of
#             each shape in that order as fit, so that small samples fill the gaps of large ones
#         T is possible if the ranks suffice
#
# The bound of a step: the ranks' total time is at least the fewest rank seconds of every shape's
# samples on any groups (`covering`, exact by dynamic programming), and some group runs the longest
# sample.
#
# Start with `plan_step`.
#
# Source: McNaughton 1959, "Scheduling with Deadlines and Loss Functions" (the wrap-around rule).


REMEMBERED = 4096  # number of cached plans; steps may recur


class GroupSamples(NamedTuple):
    """Samples of one shape in a group, as sizes of micro-batches."""

    shape: Hashable
    batches: tuple[int, ...]


class GroupWork(NamedTuple):
    """Work of one group of ranks in a step."""

    # Ranks of the group.
    degree: int
    # Seconds of all its micro-batches.
    seconds: float
    # Micro-batches by shape, in order.
    pieces: tuple[GroupSamples, ...]
    # Seconds in which pipeline stages fill and drain.
    filling: float = 0.0


@dataclass(frozen=True, slots=True)
class BalancedStep:
    """A planned step: its groups, widest first."""

    # Groups with work; ranks in no group are idle.
    groups: tuple[GroupWork, ...]
    # Seconds of the longest group.
    seconds: float
    # Lower bound over all plans.
    bound: float
    # Unassigned samples by shape, if each group may run only one micro-batch.
    left: dict[Hashable, int]


@dataclass(slots=True)
class _Found:
    # Group objects are cached from the second request on: caching those of thousands of steps that
    # never recur would burden the garbage collector.

    shapes: list[Hashable]
    answer: FallbackAnswer
    bound: float
    asked: bool = False
    step: BalancedStep | None = None


class StepSolver:
    """Plans steps from tables of seconds."""

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
        self._plans: dict[frozenset[tuple[Hashable, int]], _Found] = {}
        self._numbers: dict[Hashable, int] = {}
        self._tables = step_tables(ranks, repeat)
        self.packer = type(self._tables).__name__
        """Kind of packer; must be the same on all ranks, or their plans would differ."""
        for shape, rows in seconds.items():
            self.add(shape, rows)

    def add(self, shape: Hashable, rows: Mapping[int, np.ndarray]) -> None:
        fit = {d: np.asarray(t) for d, t in sorted(rows.items()) if len(t) and d <= self.ranks}
        if not fit:
            raise GulliverError(f"shape {shape!r} does not fit at any degree up to {self.ranks}")
        self._seconds[shape], self._names[shape], self._known[shape] = fit, repr(shape), 0
        self._one[shape] = min(float(t.min()) for t in fit.values())
        # Cached plans used other costs.
        self._plans.clear()
        self._learn(shape, 16)

    def _learn(self, shape: Hashable, count: int) -> None:
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
        number = self._numbers.setdefault(shape, len(self._numbers))
        # Tables grow by doubling, so that a shape is updated only a few times.
        self._tables.learn(number, self._ends[shape], self._rate[shape])

    def rank_seconds(self, shape: Hashable) -> float:
        """Fewest rank-seconds per sample of a shape, in the best micro-batch."""
        return self._rate[shape]

    def one_sample_seconds(self, shape: Hashable) -> float:
        """Minimum seconds of a micro-batch with one sample of a shape."""
        return self._one[shape]

    @property
    def seconds(self) -> Mapping[Hashable, Mapping[int, np.ndarray]]:
        return self._seconds

    def bound(self, counts: Mapping[Hashable, int]) -> float:
        """Lower bound on the seconds of any plan for these samples."""
        together = longest = 0.0
        for shape, count in counts.items():
            least, one = self._least[shape], self._one[shape]
            together += least[count] if count < len(least) else count * self._rate[shape]
            longest = one if one > longest else longest
        return max(together / self.ranks, longest)

    def step_times(self, counts: Mapping[Hashable, int]) -> tuple[float, float]:
        """Seconds of the longest group of `plan_step`, and the bound; computes no groups."""
        if not counts:
            return 0.0, 0.0
        found = self._found(counts)
        return found.answer.seconds, found.bound

    def plan_step(self, counts: Mapping[Hashable, int]) -> BalancedStep:
        """Assigns samples to groups of ranks, independently of the order of the counts."""
        if not counts:
            return BalancedStep((), 0.0, 0.0, {})
        found = self._found(counts)
        step = found.step or self._dealt(found, counts)
        found.asked, found.step = True, step if found.asked else None
        return step

    def _dealt(self, found: _Found, counts: Mapping[Hashable, int]) -> BalancedStep:
        shapes, (groups, rest) = found.shapes, found.answer.packed()
        left = {shape: n for shape, n in zip(shapes, rest, strict=True) if n}
        bound = self.bound(_less(counts, shapes, rest)) if left else found.bound
        works = [
            GroupWork(
                degree,
                seconds,
                tuple(
                    GroupSamples(shapes[number], self._split(shapes[number], degree, n))
                    for number, n in taken
                ),
            )
            for degree, seconds, taken in groups
        ]
        works.sort(key=lambda work: -work.degree)
        return BalancedStep(tuple(works), found.answer.seconds, bound, left)

    def _found(self, counts: Mapping[Hashable, int]) -> _Found:
        key = frozenset(counts.items())
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            found = self._plans[key] = self._searched(counts)
        return found

    def _searched(self, counts: Mapping[Hashable, int]) -> _Found:
        # Mappings keep insertion order, and the result must not depend on it.
        shapes = sorted(counts, key=self._names.__getitem__)
        sizes = [counts[shape] for shape in shapes]
        for shape, count in zip(shapes, sizes, strict=True):
            if count > self._known[shape]:
                self._learn(shape, count)
        bound = self.bound(dict(zip(shapes, sizes, strict=True)))
        packing = self._tables.packing([self._numbers[shape] for shape in shapes], sizes)
        found = packing.search(bound)
        if found is None:
            raise GulliverError(f"{self.ranks} ranks cannot run these shapes in one step: {shapes}")
        return _Found(shapes, found, bound)

    def _split(self, shape: Hashable, degree: int, count: int) -> tuple[int, ...]:
        key = shape, degree, count
        if key not in self._splits:
            seconds = self._seconds[shape][degree]
            self._splits[key] = split_batches(seconds, count) if self.repeat else (count,)
        return self._splits[key]


def _less(
    counts: Mapping[Hashable, int], shapes: Iterable[Hashable], left: Iterable[int]
) -> dict[Hashable, int]:
    each = zip(shapes, left, strict=True)
    return {shape: counts[shape] - rest for shape, rest in each if counts[shape] > rest}


# Micro-batches for groups whose ranks are pipeline stages: smaller ones fill the pipeline sooner.
#
# Micro-batches of p_1, ..., p_n seconds on each of S equal stages end after
#
#     p_1 + ... + p_n + (S - 1) max p
#
# seconds in any order: the makespan of a proportionate flow shop (Pinedo, "Scheduling", section
# 6.1). So large micro-batches, which compute most efficiently, have the largest bubbles.
# `fill_stages` splits the samples of each group again, with several limits on the seconds of a
# micro-batch, and keeps the fastest.


LIMITS = 12
"""Number of micro-batch limits to try per group, from the largest to an eighth of it or less."""
SHORTER = 0.8  # ratio of successive limits

Seconds = Mapping[Hashable, Mapping[int, np.ndarray]]
"""Seconds of a stage for micro-batches of 1, 2, ... samples, by shape and degree."""


def fill_stages(step: BalancedStep, seconds: Seconds, stages: int) -> BalancedStep:
    """Splits each group's samples into the micro-batches with the shortest pipeline."""
    if stages == 1:
        return step
    groups = tuple(_filled(work, seconds, stages) for work in step.groups)
    return replace(step, groups=groups, seconds=max((w.seconds for w in groups), default=0.0))


def _filled(work: GroupWork, seconds: Seconds, stages: int) -> GroupWork:
    tables = [seconds[shape][work.degree] for shape, _ in work.pieces]
    counts = [sum(sizes) for _, sizes in work.pieces]
    tried = [tuple(sizes for _, sizes in work.pieces)]
    limit = _longest(tables, tried[0])
    # No limit may be below the time of a single sample.
    least = max(float(table[0]) for table in tables)
    for _ in range(LIMITS):
        limit = max(limit * SHORTER, least)
        most = [max(1, int(np.searchsorted(table, limit, side="right"))) for table in tables]
        pairs = zip(tables, most, counts, strict=True)
        tried.append(tuple(split_batches(table[:size], count) for table, size, count in pairs))
        if limit == least:
            break
    ends = [_end(tables, sizes, stages) for sizes in tried]
    best = int(np.argmin([end + filling for end, filling in ends]))
    pieces = zip(work.pieces, tried[best], strict=True)
    spent, filling = ends[best]
    cut = tuple(GroupSamples(piece.shape, sizes) for piece, sizes in pieces)
    return work._replace(seconds=spent + filling, pieces=cut, filling=filling)


def _longest(tables: list[np.ndarray], sizes: tuple[tuple[int, ...], ...]) -> float:
    pairs = zip(tables, sizes, strict=True)
    return max(float(table[size - 1]) for table, row in pairs for size in row)


def _end(
    tables: list[np.ndarray], sizes: tuple[tuple[int, ...], ...], stages: int
) -> tuple[float, float]:
    """Total seconds of all micro-batches, and of pipeline fill and drain."""
    pairs = zip(tables, sizes, strict=True)
    spent = sum(float(table[size - 1]) for table, row in pairs for size in row)
    return spent, (stages - 1) * _longest(tables, sizes)
