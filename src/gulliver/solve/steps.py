"""How many samples of one shape become micro-batches: a group's time, and the least of all ranks.

`accumulated` says how long a group takes for 1, 2, ... samples, `split_batches` into which
micro-batches they are cut for that, and `covering` the least rank seconds of any number of samples
on any groups, which bounds every plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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


class WorkPiece(NamedTuple):
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
    pieces: tuple[WorkPiece, ...]
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
                    WorkPiece(shapes[number], self._split(shapes[number], degree, n))
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
    cut = tuple(WorkPiece(piece.shape, sizes) for piece, sizes in pieces)
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


# Choice of the waiting samples that make a step, so that its groups of ranks end together.
#
# A step of few large samples cannot be dealt evenly whatever is done: two of 4.4 seconds on four
# ranks each fill eight ranks, one of them and some of 3.6 do not. But a window has many samples,
# and steps may be somewhat larger or smaller than asked for. So samples are chosen for steps, and
# not only dealt in them, as in cutting stock:
#
#     patterns (samples of a step) are packed up to many times around that of a mean step: those in
#     which a few micro-batches just end
#     the pattern that wastes least of its ranks' time is cut from the window as often as samples
#     last, smaller and larger ones in turn, so that the mean step is as asked for
#     small samples of which more is left than of others count more, so that no kind of them waits
#     for the window's end, and are at most a third of a pattern's work while there are others
#
# That is the sequential heuristic procedure; patterns are packed by `StepSolver`. The answer
# hangs on the samples, their costs and the ranks that are arranged for, and on nothing before.
#
# Source: Haessler 1975, "Controlling Cutting Pattern Changes in One-Dimensional Trim Problems".


SLACK = 0.45
"""Share by which a step may be larger or smaller than the mean one."""
NEAR = 0.02
"""Share up to which a step counts as a mean one."""
APART = 0.004
"""Share by which times that are tried differ."""
REPEATS, MOST_TIMES = 6, 64
"""Samples of one shape after whose ends patterns may end; times that are tried at most."""
SMALL, MOST_SMALL = 0.05, 0.35
"""Share of a step's rank seconds below which a sample is small; the most that small ones take."""
GOOD = 0.985
"""Used share of the ranks' time below which new patterns are looked for."""
URGE, MOST_URGE = 0.3, 3.0
"""What an excess of a small shape by as much again adds to its worth, and the most that counts."""
CHANGED = 0.8
"""New patterns are looked for when no more than this share is left since the last time."""


class StepArranger:
    """Chooses samples for steps."""

    def __init__(
        self, solver: StepSolver, weights: Mapping[Hashable, float], budget: float
    ) -> None:
        self._solver, self._weights, self._budget = solver, weights, budget

    def arrange(self, counts: Mapping[Hashable, int]) -> list[dict[Hashable, int]]:
        """Steps of waiting samples: how many of each shape; the same for the same counts."""
        names = sorted((shape for shape, n in counts.items() if n), key=repr)
        if not names:
            return []
        left = np.array([counts[name] for name in names])
        pool = _Pool(self._solver, names, left, self._weights, self._budget)
        steps: list[dict[Hashable, int]] = []
        for pattern, times in pool.cut():
            one = {names[n]: int(pattern[n]) for n in np.flatnonzero(pattern)}
            steps += [one] * times
        return steps


class _Pool:
    """Waiting samples of each shape, and patterns: rows of how many of each a step takes."""

    def __init__(
        self,
        solver: StepSolver,
        names: Sequence[Hashable],
        left: np.ndarray,
        weights: Mapping[Hashable, float],
        budget: float,
    ) -> None:
        self._solver, self._names, self._budget = solver, names, budget
        self._left, self._whole = left.copy(), left.copy()
        self._weights = np.array([weights[name] for name in names], dtype=float)
        self._worth = np.array([solver.rank_seconds(name) for name in names])
        self._mean = budget * (self._worth @ left) / (self._weights @ left) / solver.ranks
        self._small = self._worth < SMALL * self._mean * solver.ranks
        self._patterns = np.zeros((0, len(names)), dtype=np.int64)
        self._seconds, self._sizes, self._small_share = np.zeros((3, 0))
        self._known: set[bytes] = set()

    def cut(self) -> Iterator[tuple[np.ndarray, int]]:
        """Patterns and how often each is cut, until no two steps are left."""
        drift, searched, turned = 0.0, np.inf, 0
        while (total := float(self._weights @ self._left)) >= 2 * self._budget:
            best = self._best(large=drift <= 0)
            enough = 1.0 if best is None else CHANGED
            if total < enough * searched and (best is None or self._used(best) < GOOD):
                searched = total
                self._search()
                best = self._best(large=drift <= 0)
            if best is None:
                # None of the size that is due is left: the others may go on.
                drift, turned = (-1.0 if drift > 0 else 1.0), turned + 1
                if turned > 2:
                    return
                continue
            turned = 0
            times, over = self._times_of(best, drift)
            drift += times * over
            self._left -= times * self._patterns[best]
            yield self._patterns[best], times

    def _times_of(self, best: int, drift: float) -> tuple[int, float]:
        """How often a pattern is cut, and by how much it is over the budget."""
        pattern, over = self._patterns[best], float(self._sizes[best]) - self._budget
        needed = pattern > 0
        times = int((self._left[needed] // pattern[needed]).min())
        if abs(over) > NEAR * self._budget:
            times = min(times, int((abs(drift) + 1.5 * self._budget) / abs(over)))
        return max(1, times), over

    def _used(self, row: int) -> float:
        """Share of the ranks' time in which a pattern's samples run at their best rate."""
        useful = float(self._worth @ self._patterns[row])
        return useful / (self._solver.ranks * float(self._seconds[row]))

    def _best(self, large: bool) -> int | None:
        """The pattern of most worth a second that samples are left for."""
        near = np.abs(self._sizes - self._budget) <= NEAR * self._budget
        possible = (self._patterns <= self._left).all(axis=1)
        possible &= near | ((self._sizes >= self._budget) == large)
        mixed = possible & (self._small_share <= MOST_SMALL)
        if mixed.any():
            possible = mixed
        if not possible.any():
            return None
        mean = (self._worth @ self._left) / (self._worth @ self._whole)
        excess = np.clip(self._left / self._whole / mean - 1, -1.0, MOST_URGE)
        worth = self._worth * (1 + URGE * np.where(self._small, excess, 0.0))
        values = self._patterns @ worth / self._seconds
        return int(np.argmax(np.where(possible, values, -np.inf)))

    def _search(self) -> None:
        """Packs patterns of what is left, up to all times around the mean step's."""
        rows, seconds = [], []
        for taken, longest in self._packed():
            row = np.array([taken.get(name, 0) for name in self._names])
            fits = abs(float(self._weights @ row) / self._budget - 1) <= SLACK
            if fits and row.tobytes() not in self._known:
                self._known.add(row.tobytes())
                rows.append(row)
                seconds.append(longest)
        if not rows:
            return
        self._patterns = np.concatenate((self._patterns, np.array(rows)))
        self._seconds = np.concatenate((self._seconds, np.array(seconds)))
        worths = self._patterns * self._worth
        self._sizes = self._patterns @ self._weights
        self._small_share = worths[:, self._small].sum(axis=1) / worths.sum(axis=1)

    def _packed(self) -> Iterator[tuple[dict[Hashable, int], float]]:
        """Fillings of all ranks: of all shapes alike, and of large ones and then of small ones."""
        # More of a shape than all ranks can take need not be looked at.
        most = np.ceil((1 + SLACK) * self._mean * self._solver.ranks / self._worth)
        counts = np.minimum(self._left, most).astype(np.int64).tolist()
        waiting = np.argsort(-self._worth * self._left, kind="stable").tolist()
        few = set(np.flatnonzero(self._small).tolist())
        large = {s: counts[n] for n, s in enumerate(self._names) if counts[n] and n not in few}
        small = {self._names[n]: counts[n] for n in waiting if counts[n] and n in few}
        lot = max(map(self._solver.lot_seconds, small), default=0.0)
        tries = [({**large, **small}, limit, {}, 0.0) for limit in self._limits(0.0)]
        if small:
            tries += [(large, limit, small, limit + lot) for limit in self._limits(lot)]
        for one in tries:
            packed = self._solver.fill(*one)
            if packed is not None:
                yield packed

    def _limits(self, after: float) -> list[float]:
        """Times at which few micro-batches of a shape end; so much follows them."""
        mean = float(self._mean)
        low, high = (1 - SLACK) * mean - after, (1 + SLACK) * mean - after
        names = [self._names[n] for n in np.flatnonzero(self._left).tolist()]
        ends = {end for name in names for end in self._solver.first_ends(name, REPEATS)}
        ends |= {low + part * (high - low) for part in (0.25, 0.5, 0.75)}
        found = sorted(end for end in ends if low <= end <= high)
        kept = [end for end, later in pairwise([*found, np.inf]) if later > end * (1 + APART)]
        # Of many shapes there are more ends than it takes to find good patterns.
        thinned = kept[:: -(-len(kept) // MOST_TIMES)] if kept else []
        return [end * (1 + 1e-9) for end in thinned]
