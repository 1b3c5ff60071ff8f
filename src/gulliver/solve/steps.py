"""How many samples of one shape become micro-batches: a group's time, and the least of all ranks.

`accumulated` says how long a group takes for 1, 2, ... samples, `split_batches` into which
micro-batches they are cut for that, and `covering` the least rank seconds of any number of samples
on any groups, which bounds every plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve.packing import FallbackAnswer, step_tables


def accumulated(seconds: np.ndarray, most: int) -> np.ndarray:
    """Seconds of 0, 1, ... samples on one group, cut into micro-batches."""
    # Samples are cut evenly, into as few micro-batches as fit or into those of the best rate, or
    # into whole ones of the best rate and a rest. The first is best where seconds grow faster and
    # faster with a batch, the last where they grow slower and slower.
    counts = np.arange(most + 1)
    _, found = _ways(seconds, counts)
    return np.maximum.accumulate(np.min(found, axis=0))


def split_batches(seconds: np.ndarray, count: int) -> tuple[int, ...]:
    """Cuts samples into micro-batches in the way that `accumulated` took, the largest first.

    Args:
        seconds: seconds of micro-batches of 1, 2, ... samples: [B].
        count: number of samples, at least 1.
    """
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
    """The least rank seconds of 0, 1, ... samples in micro-batches on groups of any size."""
    # Exact: least(n) = min over b of least(n - b) + w(b), where w(b) is the least over degrees. It
    # is a bound for every way in which a step may deal the samples.
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
    """Numbers of even parts of three ways [3][K]; seconds of those and of best ones [4, K]."""
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


# Steps dealt to groups of ranks: who shares which samples, so that all ranks end together.
#
# Samples of a shape are alike. A micro-batch of b of them on a group of d ranks takes t(shape, d,
# b) seconds, and a group runs its micro-batches one after the other. Given how many samples there
# are of each shape, ranks are partitioned into groups, and samples dealt to them, so that the
# longest group is as short as possible. That is makespan on moldable machines with batches, which
# is NP-hard; what is done is McNaughton's wrap-around rule inside a search:
#
#     for a time T, found by bisection between the bound and the best so far:
#         every shape names the degree at which it costs least rank seconds and one sample fits in T
#         shapes in order of degree, then of one sample's seconds, the largest first
#         a group of the first shape's degree opens and is filled up to T: as many samples of each
#         shape in that order as fit, so that small samples close what large ones leave
#         T is possible if the ranks suffice
#
# The bound of a step: the ranks' time together is at least the least rank seconds of every shape's
# samples, whatever groups they are in (`covering`, exact by dynamic programming), and some group
# runs the sample that takes longest.
#
# Read `plan_step` first. It knows nothing of torch, files, or of what a sample is.
#
# Source: McNaughton 1959, "Scheduling with Deadlines and Loss Functions" (the wrap-around rule).


REMEMBERED = 4096
"""Steps whose plans are kept: some come again."""


class GroupSamples(NamedTuple):
    """Samples of one shape that a group runs: the sizes of their micro-batches."""

    shape: Hashable
    batches: tuple[int, ...]


class GroupWork(NamedTuple):
    """What one group of ranks runs in a step."""

    # Ranks of the group.
    degree: int
    # Seconds of all its micro-batches.
    seconds: float
    # Micro-batches by shape, in order.
    pieces: tuple[GroupSamples, ...]
    # Seconds of those in which stages of a pipeline fill and drain.
    filling: float = 0.0


@dataclass(frozen=True, slots=True)
class BalancedStep:
    """A step: groups, the widest first."""

    # Groups with work; ranks that are in none have none.
    groups: tuple[GroupWork, ...]
    # Seconds of the longest group.
    seconds: float
    # Seconds that no plan can be under.
    bound: float
    # Samples that found no place, by shape, where a group may run one micro-batch only.
    left: dict[Hashable, int]


@dataclass(slots=True)
class _Found:
    """Shapes of a step in order, their groups by number, and the bound."""

    # Groups are kept as objects from the second time on that they are asked for: those of thousands
    # of steps that never come again would be looked through by the garbage collector.

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
        """Kind of the packer: ranks whose packers differ would plan different steps."""
        for shape, rows in seconds.items():
            self.add(shape, rows)

    def add(self, shape: Hashable, rows: Mapping[int, np.ndarray]) -> None:
        """Adds a shape with its seconds by degree."""
        fit = {d: np.asarray(t) for d, t in sorted(rows.items()) if len(t) and d <= self.ranks}
        if not fit:
            raise GulliverError(f"shape {shape!r} fits at no degree of up to {self.ranks} ranks")
        self._seconds[shape], self._names[shape], self._known[shape] = fit, repr(shape), 0
        self._one[shape] = min(float(t.min()) for t in fit.values())
        # Plans that were found are of other costs.
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
        number = self._numbers.setdefault(shape, len(self._numbers))
        # Tables grow by doubling: new counts make a shape learn again only a few times.
        self._tables.learn(number, self._ends[shape], self._rate[shape])

    def rank_seconds(self, shape: Hashable) -> float:
        """The least rank seconds of a sample of a shape, in the best micro-batch."""
        return self._rate[shape]

    def one_sample_seconds(self, shape: Hashable) -> float:
        """The least seconds that a micro-batch with such a sample takes."""
        return self._one[shape]

    @property
    def seconds(self) -> Mapping[Hashable, Mapping[int, np.ndarray]]:
        """Seconds of micro-batches of 1, 2, ... samples, by shape and degree."""
        return self._seconds

    def bound(self, counts: Mapping[Hashable, int]) -> float:
        """Seconds that no plan of so many samples of each shape can be under."""
        together = longest = 0.0
        for shape, count in counts.items():
            least, one = self._least[shape], self._one[shape]
            together += least[count] if count < len(least) else count * self._rate[shape]
            longest = one if one > longest else longest
        return max(together / self.ranks, longest)

    def step_times(self, counts: Mapping[Hashable, int]) -> tuple[float, float]:
        """Seconds of the longest group of `plan_step` and the bound, without the groups."""
        if not counts:
            return 0.0, 0.0
        found = self._found(counts)
        return found.answer.seconds, found.bound

    def plan_step(self, counts: Mapping[Hashable, int]) -> BalancedStep:
        """Deals samples to groups of ranks; the same answer for the same counts in any order."""
        if not counts:
            return BalancedStep((), 0.0, 0.0, {})
        found = self._found(counts)
        step = found.step or self._dealt(found, counts)
        found.asked, found.step = True, step if found.asked else None
        return step

    def _dealt(self, found: _Found, counts: Mapping[Hashable, int]) -> BalancedStep:
        """The groups that were found."""
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
        # The order of a mapping is the order of arrival: answers must not depend on it.
        shapes = sorted(counts, key=self._names.__getitem__)
        sizes = [counts[shape] for shape in shapes]
        for shape, count in zip(shapes, sizes, strict=True):
            if count > self._known[shape]:
                self._learn(shape, count)
        bound = self.bound(dict(zip(shapes, sizes, strict=True)))
        packing = self._tables.packing([self._numbers[shape] for shape in shapes], sizes)
        found = packing.search(bound)
        if found is None:
            raise GulliverError(f"no {self.ranks} ranks can run these shapes in one step: {shapes}")
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
    """Samples that are not left."""
    each = zip(shapes, left, strict=True)
    return {shape: counts[shape] - rest for shape, rest in each if counts[shape] > rest}


# Micro-batches of groups whose ranks are stages of a pipeline: smaller ones fill it sooner.
#
# Micro-batches of p_1, ..., p_n seconds on each of S equal stages, one after the other, end after
#
#     p_1 + ... + p_n + (S - 1) max p
#
# seconds: the makespan of a proportionate flow shop, in whatever order they run (Pinedo,
# "Scheduling", section 6.1). So few large micro-batches, which compute best, let stages wait
# longest. `fill_stages` cuts the samples of each group again, with several limits of what one
# micro-batch may take, and keeps what ends soonest.


LIMITS = 12
"""Limits that are tried for each group, from the largest micro-batch to an eighth of it or less."""
SHORTER = 0.8
"""Share of a limit that the next one is."""

Seconds = Mapping[Hashable, Mapping[int, np.ndarray]]
"""Seconds that a stage takes for micro-batches of 1, 2, ... samples, by shape and degree."""


def fill_stages(step: BalancedStep, seconds: Seconds, stages: int) -> BalancedStep:
    """Cuts the samples of each group into the micro-batches with which its stages end soonest."""
    if stages == 1:
        return step
    groups = tuple(_filled(work, seconds, stages) for work in step.groups)
    return replace(step, groups=groups, seconds=max((w.seconds for w in groups), default=0.0))


def _filled(work: GroupWork, seconds: Seconds, stages: int) -> GroupWork:
    tables = [seconds[shape][work.degree] for shape, _ in work.pieces]
    counts = [sum(sizes) for _, sizes in work.pieces]
    tried = [tuple(sizes for _, sizes in work.pieces)]
    limit = _longest(tables, tried[0])
    # No limit may be under what single samples take.
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
    """Seconds of all micro-batches, and those in which stages fill and drain."""
    pairs = zip(tables, sizes, strict=True)
    spent = sum(float(table[size - 1]) for table, row in pairs for size in row)
    return spent, (stages - 1) * _longest(tables, sizes)
