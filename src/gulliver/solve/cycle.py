"""Plans which objects stay in fast memory during a repeating step.

A *position* is the index of an event in the step. The state "at" a position holds from its event to
the next one. Positions beyond the last belong to the next repetition.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Residency in a fast tier for repeating accesses: a plan, and a lower bound.
#
# Between two uses of an object is a *gap*, in which it stays or leaves. With :math:`x_g = 1` for
# gaps in which it leaves, sizes :math:`s_g`, and :math:`W_p` for writing back the changes of one
# *period* (from one write to the next), the cheapest plan is::
#
#     minimize    sum_g r_g x_g + sum_p W_p y_p                        bytes read and written
#     subject to  x_g <= y_p                     for each gap g of a period p
#                 sum_{g covers t} s_g (1 - x_g) <= room_t             for each position t
#
# Time is circular: a gap may extend from the end of a cycle into the next.


ROUNDS = 200  # iterations of the subgradient method
SNAPSHOTS = 10  # iterations between plans built from the current prices
STATES = 4000  # maximum number of states visited by the depth-first search
LONGEST = 200  # maximum number of gaps for the depth-first search
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


# [Note: bound and plan] The rows of `room` are relaxed with prices per byte and position. The rest
# decomposes into periods and is solved exactly. The best prices (Polyak's subgradient steps) give
# the value of the linear relaxation, a lower bound on the long-run cost of any policy. The same
# prices rank which objects to keep. The cheapest is taken of the plans built from them and of a
# sweep that evicts the farthest next use (Belady's rule, exact for equal sizes and costs on a
# line). Depth-first search then tries to close the gap to the bound: each gap in turn stays or
# leaves while the choices fit and the prices allow an improvement. If it ends before `STATES`
# states, the plan is optimal.
@dataclass(frozen=True)
class Gap:
    """The interval between two uses of an object, during which it may be evicted."""

    # First position at which it is not in use.
    begin: int
    # Position of its next use (exclusive); beyond the last position if it is in the next cycle.
    end: int
    # Size of the object.
    nbytes: int
    # Cost of loading it at the end; 0 if its content is not needed then.
    read: float
    # Index of the period: leaving in any of its gaps costs one write.
    period: int


@dataclass(frozen=True)
class Residency:
    """The gaps in which objects stay, with the cost and a lower bound."""

    # Whether the object stays in each gap.
    keep: tuple[bool, ...]
    # Cost per cycle.
    cost: float
    # Lower bound on the long-run cost per cycle of any policy.
    bound: float
    # States visited by the depth-first search.
    states: int = 0
    # Prices per position that give the bound.
    prices: tuple[float, ...] = ()


def plan_residency(
    gaps: Sequence[Gap],
    writes: Sequence[float],
    room: Sequence[int],
    rounds: int = ROUNDS,
    prices: Floats | None = None,
) -> Residency:
    """Chooses the gaps in which objects stay resident: the least traffic that the memory allows."""
    if not gaps:
        return Residency((), 0.0, 0.0)
    problem = _Problem(gaps, writes, room)
    best = problem.sweep()
    cost = problem.cost(best)
    even = np.full(problem.length, 1.0)
    for plan in (problem.pack(even), problem.refill(best)):
        if problem.cost(plan) < cost:
            best, cost = plan, problem.cost(plan)
    bound, scale, since = 0.0, 1.0, 0
    prices = dearest = np.zeros(problem.length) if prices is None else prices
    for number in range(rounds):
        value, wanted = problem.relaxed(prices)
        since += 1
        if value > bound:
            bound, since, dearest = value, 0, prices
        if since >= 10:
            scale, since = scale / 2, 0
        excess = problem.usage(wanted) - problem.room
        square = float(excess @ excess)
        if cost - bound <= 1e-9 * cost or not square:
            break
        if number % SNAPSHOTS == SNAPSHOTS - 1:
            plan = problem.pack(prices + 1e-6 * (prices.mean() + 1e-30))
            if problem.cost(plan) < cost:
                best, cost = plan, problem.cost(plan)
        prices = np.maximum(0.0, prices + scale * max(cost - value, 0.0) / square * excess)
    states = 0
    if rounds and len(gaps) <= LONGEST:
        search = _Search(problem, dearest, best, cost)
        search.run()
        best, cost, states = search.best, search.cost, search.states
    kept, dearest = tuple(best.tolist()), tuple(dearest.tolist())
    return Residency(kept, cost, min(bound, cost), states, dearest)


class _Problem:
    def __init__(self, gaps: Sequence[Gap], writes: Sequence[float], room: Sequence[int]) -> None:
        self.begin: Ints = np.array([g.begin for g in gaps], dtype=np.int64)
        self.end: Ints = np.array([g.end for g in gaps], dtype=np.int64)
        self.size: Floats = np.array([g.nbytes for g in gaps], dtype=np.float64)
        self.read: Floats = np.array([g.read for g in gaps], dtype=np.float64)
        self.period: Ints = np.array([g.period for g in gaps], dtype=np.int64)
        self.writes: Floats = np.array(writes, dtype=np.float64)
        self.room: Floats = np.array(room, dtype=np.float64)
        self.length = len(room)
        members: list[list[int]] = [[] for _ in writes]
        for number, gap in enumerate(gaps):
            members[gap.period].append(number)
        whole = [many for many, write in zip(members, writes, strict=True) if write and many[1:]]
        self.items = [[number] for number in range(len(gaps))] + whole
        self._spans = [self._positions(gap) for gap in gaps]
        self._nbytes: list[float] = self.size.tolist()

    def cost(self, keep: Flags) -> float:
        left = np.bincount(self.period[~keep], minlength=len(self.writes)) > 0
        return float(self.read[~keep].sum() + self.writes[left].sum())

    def usage(self, keep: Flags) -> Floats:
        changes = np.zeros(2 * self.length + 1)
        np.add.at(changes, self.begin[keep], self.size[keep])
        np.add.at(changes, self.end[keep], -self.size[keep])
        held = np.cumsum(changes)[: 2 * self.length]
        return held[: self.length] + held[self.length :]

    def relaxed(self, prices: Floats) -> tuple[float, Flags]:
        """Returns the Lagrangian bound at given prices, and the gaps that it keeps."""
        paid = self.paid(prices)
        kinds = len(self.writes)
        staying = np.bincount(self.period, paid, kinds)
        cheaper = np.minimum(self.read, paid)
        leaving = self.writes + np.bincount(self.period, cheaper, kinds)
        keep = np.where((staying <= leaving)[self.period], True, paid <= self.read)
        value = np.minimum(staying, leaving).sum() - float(prices @ self.room)
        return float(value), keep

    def pack(self, prices: Floats) -> Flags:
        """Greedily keeps the gaps with the highest saving per price, as long as they fit."""
        return self._fill(np.zeros(len(self.size), dtype=bool), prices)

    def refill(self, keep: Flags) -> Flags:
        return self._fill(keep.copy(), np.ones(self.length))

    def sweep(self) -> Flags:
        """Walks the cycle once; where memory is full, evicts the object used farthest ahead."""
        keep = np.ones(len(self.size), dtype=bool)
        usage = self.usage(keep)
        start = int(np.argmax(usage - self.room))
        for step in range(self.length):
            now = (start + step) % self.length
            while usage[now] > self.room[now]:
                victim = self._farthest(keep, now)
                keep[victim] = False
                self.change(usage, victim, -float(self.size[victim]))
        return keep

    def _farthest(self, keep: Flags, now: int) -> int:
        """Returns the kept gap over a position with the lowest cost per length."""
        over = np.where(self.begin <= now, now, now + self.length)
        rest = np.where(keep & (self.begin <= over) & (over < self.end), self.end - over, 0)
        return int(np.argmax(rest * self.size / (self.values() + 1e-30) * (rest > 0)))

    def values(self) -> Floats:
        """Returns the cost of evicting in each gap if all others are kept."""
        return self.read + self.writes[self.period]

    def paid(self, prices: Floats) -> Floats:
        total = np.concatenate(([0.0], np.cumsum(np.concatenate((prices, prices)))))
        return self.size * (total[self.end] - total[self.begin])

    def _fill(self, keep: Flags, prices: Floats) -> Flags:
        slack = self.room - self.usage(keep)
        paid = self.paid(prices)
        alone = np.bincount(self.period, minlength=len(self.writes)) == 1
        saved = np.where(alone[self.period], self.values(), self.read)
        worth = (saved / (paid + 1e-30)).tolist()
        for many in self.items[len(self.size) :]:
            both = self.read[many].sum() + self.writes[self.period[many[0]]]
            worth.append(both / (paid[many].sum() + 1e-30))
        for number in np.argsort(-np.array(worth), kind="stable").tolist():
            self._take(keep, slack, [n for n in self.items[number] if not keep[n]])
        return keep

    def _take(self, keep: Flags, slack: Floats, wanted: list[int]) -> None:
        for place, number in enumerate(wanted):
            if not self.fits(slack, number):
                for undone in wanted[:place]:
                    self.change(slack, undone, self._nbytes[undone])
                return
            self.change(slack, number, -self._nbytes[number])
        keep[wanted] = True

    def _positions(self, gap: Gap) -> list[slice]:
        if gap.end <= self.length:
            spans = [slice(gap.begin, gap.end)]
        elif gap.begin >= self.length:
            spans = [slice(gap.begin - self.length, gap.end - self.length)]
        else:
            spans = [slice(gap.begin, self.length), slice(0, gap.end - self.length)]
        return [span for span in spans if span.start < span.stop]

    def change(self, held: Floats, number: int, nbytes: float) -> None:
        for span in self._spans[number]:
            held[span] += nbytes

    def fits(self, slack: Floats, number: int) -> bool:
        nbytes = self._nbytes[number]
        return all(np.minimum.reduce(slack[span]) >= nbytes for span in self._spans[number])


class _Search:
    def __init__(self, problem: _Problem, prices: Floats, best: Flags, cost: float) -> None:
        self.best, self.cost, self.states = best, cost, 0
        self._problem, self._keep = problem, best.copy()
        paid = problem.paid(prices)
        self._paid, self._read = paid.tolist(), problem.read.tolist()
        self._nbytes: list[float] = problem.size.tolist()
        self._cheaper = np.minimum(paid, problem.read).tolist()
        self._period, self._slack = problem.period.tolist(), problem.room.copy()
        # Cost of each period if all of its gaps stay, and if one leaves.
        self._stays = np.bincount(problem.period, paid, len(problem.writes)).tolist()
        leaves = np.bincount(problem.period, self._cheaper, len(problem.writes))
        self._leaves = (problem.writes + leaves).tolist()
        self._offset = float(prices @ problem.room)
        # Heaviest first, so that the bound decides the light ones.
        self._order = np.argsort(-problem.values() * paid, kind="stable").tolist()
        costs = [*problem.read.tolist(), *problem.writes.tolist()]
        self._grain = float(math.gcd(*(int(value) for value in costs))) if costs else 0.0

    def run(self) -> None:
        pairs = zip(self._stays, self._leaves, strict=True)
        self._go(0, sum(min(pair) for pair in pairs) - self._offset)

    def _go(self, depth: int, bound: float) -> None:
        # Costs are sums of integer sizes: differences below the grain are zero.
        if bound > self.cost - max(self._grain, 1.0) + 1e-6 * self.cost or self.states >= STATES:
            return
        self.states += 1
        if depth == len(self._order):
            cost = self._problem.cost(self._keep)
            if cost < self.cost:
                self.best, self.cost = self._keep.copy(), cost
            return
        gap = self._order[depth]
        first = self._paid[gap] <= self._read[gap] or bool(self.best[gap])
        for stays in (first, not first):
            self._choose(gap, stays, depth, bound)

    def _choose(self, gap: int, stays: bool, depth: int, bound: float) -> None:
        if stays and not self._problem.fits(self._slack, gap):
            return
        period, nbytes = self._period[gap], self._nbytes[gap]
        before = self._stays[period], self._leaves[period]
        own = self._paid[gap] if stays else self._read[gap]
        after = before[0] if stays else math.inf, before[1] + own - self._cheaper[gap]
        if stays:
            self._problem.change(self._slack, gap, -nbytes)
        self._stays[period], self._leaves[period] = after
        self._keep[gap] = stays
        self._go(depth + 1, bound + min(after) - min(before))
        self._stays[period], self._leaves[period] = before
        if stays:
            self._problem.change(self._slack, gap, nbytes)


NEVER = 1 << 60  # position of a use that is not in the schedule
MARGIN_SHARE = 4  # margins may use 1 / MARGIN_SHARE of the memory by default
WORTH = 1.618  # margins are used if they increase the moves at most by this factor; see the note
FEW, TURNS = 60, 6  # limits of a plan over several steps: number of gaps, and of steps
What = Literal["use", "done", "discard", "lend", "give", "budget"]


# [Note: margins] An evicted object is still being written for a while, and its load must start
# before it is needed. So every gap has two *margins*, one after the previous use and one before the
# next, in which the object occupies memory whether it stays or not. They are measured in bytes
# used, not in seconds, because decisions must not depend on disk speed. Between the margins,
# `plan_residency` decides.
#
# For few, large objects, margins may cost many moves. With :math:`c` seconds of compute and
# :math:`m` of moves a step takes :math:`max(c, m)` with margins, and at most :math:`c + m_0`
# without. For any :math:`c`, the worse choice is at most :math:`m / m_0` times as slow without
# compute, and :math:`1 + m_0 / m` times if compute covers the moves. Both are equal at the golden
# ratio; above it margins are not used.
#
# [Note: taking turns] If few objects compete for the same memory, alternating between steps saves
# moves: with three objects and memory for two, three loads are enough for two steps. `plan_cycle`
# searches for such plans over a few steps while the problem is small; the bound, which holds for
# any number of steps, shows whether an improvement is possible. With many objects there is little
# to gain: n equal ones with memory for k take n - k + 1 loads per step instead of n (n - k) / (n -
# 1).
class Event(NamedTuple):
    """An event of a step.

    Attributes:
        what: kind of event.
        key: the object, the bytes of a buffer, or the new budget.
        write: whether the use modifies the object.
        fresh: whether the use overwrites the whole object.
    """

    what: What
    key: Hashable
    write: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class Span:
    """The gap before a use, with its plan.

    Attributes:
        length: number of positions since the end of the previous use.
        lead: number of positions before the use at which its memory is reserved.
        keep: whether the object stays.
        fresh: whether the use ignores the previous content.
    """

    length: int
    lead: int
    keep: bool
    fresh: bool


class Cycle:
    """The events of a step, and the residency plan for them."""

    def __init__(
        self,
        events: Sequence[Event],
        sizes: Mapping[Hashable, int],
        budget: int,
        held: int = 0,
        pins: Mapping[Hashable, int] | None = None,
        ahead: int | None = None,
        repeats: int = 1,
        rounds: int = ROUNDS,
        prices: Sequence[float] = (),
    ) -> None:
        self.events, self.repeats, self.step = list(events) * repeats, repeats, len(events)
        # Number of events of all steps planned together.
        self.length = len(self.events)
        self._sizes = sizes
        self._prices = np.array([*prices] * repeats) if prices else None
        self._where: dict[tuple[What, Hashable], list[int]] = {}
        for position, event in enumerate(self.events):
            self._where.setdefault(_mark(event), []).append(position)
        self._uses: dict[Hashable, list[int]] = {}
        self._ends: dict[Hashable, list[int]] = {}  # ends of gaps: uses, and discards
        self._marks: dict[Hashable, list[tuple[int, str, bool, bool]]] = {}
        self._spans: dict[int, Span] = {}
        # Positions of uses of objects that are not already in use.
        self.outer: set[int] = set()
        room = self._follow(budget, held, dict(pins or {}))
        self._plan(room, ahead, rounds)

    @property
    def cost(self) -> float:
        return self.residency.cost / self.repeats

    @property
    def bound(self) -> float:
        """Lower bound on the long-run bytes moved per step by any policy with the same margins."""
        return self.residency.bound / self.repeats

    def after(self, event: Event, cursor: int, end: int) -> int | None:
        positions = self._where.get(_mark(event), ())
        place = bisect_left(positions, cursor, hi=bisect_left(positions, end))
        return positions[place] if place < len(positions) and positions[place] < end else None

    def matches(self, position: int, event: Event) -> bool:
        return _mark(self.events[position]) == _mark(event)

    def next_use(self, key: Hashable, cursor: int) -> int:
        positions = self._uses.get(key)
        if not positions:
            return NEVER
        place = bisect_left(positions, cursor)
        return positions[place] if place < len(positions) else positions[0] + self.length

    def span(self, position: int) -> Span | None:
        return self._spans.get(position % self.length)

    def stays(self, key: Hashable, cursor: int) -> bool:
        positions = self._ends.get(key)
        if not positions:
            return False
        place = bisect_left(positions, cursor) % len(positions)
        span = self._spans.get(positions[place])
        return span is not None and span.keep

    def _follow(self, budget: int, held: int, pins: dict[Hashable, int]) -> list[int]:
        """Records the positions of each object's uses; returns its idle objects by position."""
        room, pinned = [], sum(self._sizes.get(key, 0) for key in pins)
        begun = budget, held, {**pins}
        for position, (what, key, write, fresh) in enumerate(self.events):
            if what == "lend" and isinstance(key, int):
                held += key
            elif what == "give" and isinstance(key, int):
                held -= key
            elif what == "budget" and isinstance(key, int):
                budget = key
            elif key in self._sizes:
                marks = self._marks.setdefault(key, [])
                if what == "discard":
                    self._ends.setdefault(key, []).append(position)
                    marks.append((position, "discard", False, False))
                elif what == "use":
                    if not pins.get(key, 0):
                        pinned += self._sizes[key]
                        self.outer.add(position)
                        self._uses.setdefault(key, []).append(position)
                        self._ends.setdefault(key, []).append(position)
                    outer = "use" if not pins.get(key, 0) else "again"
                    marks.append((position, outer, write or fresh, fresh))
                    pins[key] = pins.get(key, 0) + 1
                elif pins.get(key, 0):
                    pins[key] -= 1
                    if not pins[key]:
                        pinned -= self._sizes[key]
                        marks.append((position, "done", False, False))
            room.append(max(budget - pinned - held, 0))
        # Whether the step ends in the state in which it begins.
        self.closed = begun == (budget, held, {key: count for key, count in pins.items() if count})
        return room

    def _plan(self, room: list[int], ahead: int | None, rounds: int) -> None:
        """Decides which gaps to keep, with the widest margins that fit."""
        gaps, writes, owners = self._gaps()
        margin = ahead if ahead is not None else min(room, default=0) // (2 * MARGIN_SHARE)
        edges, free = self._margins(gaps, writes, room, margin)
        inner = _between(gaps, edges)
        # Residency plan.
        self.residency = self._decide(inner, writes, free, rounds)
        if ahead is None and self.margin:
            bare = [(0, 0)] * len(gaps)
            without = self._decide(_between(gaps, bare), writes, room, rounds=0)
            if self.residency.cost > WORTH * without.cost:
                self.margin, edges, free, inner = 0, bare, room, _between(gaps, bare)
                self.residency = self._decide(inner, writes, free, rounds)
        keep = iter(self.residency.keep)
        slack: Ints = np.tile(np.array(free, dtype=np.int64), 2)
        for gap, core, (_, lead), fresh in zip(gaps, inner, edges, owners, strict=True):
            stays = core is None or next(keep)
            if core is not None and stays:
                _charge(slack, core.begin, core.end, core.nbytes, self.length)
            span = Span(gap.end - gap.begin, lead, stays, fresh)
            self._spans[gap.end % self.length] = span
        self.base: Ints = slack
        # Unplanned bytes over two repetitions.
        self.slack: Ints = slack.copy()

    def _margins(
        self, gaps: Sequence[Gap], writes: Sequence[float], room: Sequence[int], margin: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns the widest margins that fit, and the memory left after them."""
        used = [0] * self.length
        for key, positions in self._uses.items():
            for position in positions:
                used[position] += self._sizes[key]
        traffic = [0, *accumulate(used * 3)]
        while True:
            edges = [self._edges(gap, traffic, margin, writes[gap.period] > 0) for gap in gaps]
            free, least = self._without(room, gaps, edges)
            if least >= 0 or not margin:
                break
            margin = margin // 2 if margin > 4096 else 0
        self.margin = margin
        return edges, free

    def _decide(
        self,
        inner: Sequence[Gap | None],
        writes: Sequence[float],
        free: Sequence[int],
        rounds: int,
    ) -> Residency:
        wanted = []
        for gap in inner:
            if gap is not None:
                shift = self.length if gap.begin >= self.length else 0
                ends = gap.begin - shift, gap.end - shift
                wanted.append(Gap(*ends, gap.nbytes, gap.read, gap.period))
        return plan_residency(wanted, writes, free, rounds, self._prices)

    def _gaps(self) -> tuple[list[Gap], list[float], list[bool]]:
        """Returns the gaps, the write cost of each period, and which gaps end with an overwrite."""
        gaps: list[Gap] = []
        writes: list[float] = []
        fresh_ends: list[bool] = []
        for key, marks in self._marks.items():
            size = self._sizes[key]
            changed = [n for n, mark in enumerate(marks) if mark[2] or _follows_discard(marks, n)]
            writes.append(float(size) if changed else 0.0)
            first = changed[0] if changed else 0
            for step in range(len(marks)):
                number = (first + step) % len(marks)
                if step and number in changed:
                    writes.append(float(size))
                if marks[number][1] != "done":
                    continue
                begin = marks[number][0]
                after, what, _, fresh = marks[(number + 1) % len(marks)]
                end = after if after > begin else after + self.length
                needed = what == "use" and not fresh
                gaps.append(Gap(begin, end, size, float(size) * needed, len(writes) - 1))
                fresh_ends.append(not needed)
        return gaps, writes, fresh_ends

    def _edges(
        self, gap: Gap, traffic: Sequence[int], margin: int, changes: bool
    ) -> tuple[int, int]:
        if not margin:
            return 0, 0
        length = gap.end - gap.begin
        lag = bisect_right(traffic, traffic[gap.begin + 1] + margin) - 1 - gap.begin
        last = gap.end + self.length  # of the second repetition, so that there is one before
        # At most the margin is in flight, including this object, but at least one object.
        lead = last - bisect_left(traffic, traffic[last] - max(margin - gap.nbytes, 0))
        return (min(lag, length) if changes else 0), (min(lead, length) if gap.read else 0)

    def _without(
        self, room: Sequence[int], gaps: Sequence[Gap], edges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], int]:
        """Returns the memory left after the margins (at least 0), and its minimum."""
        free: Ints = np.tile(np.array(room, dtype=np.int64), 2)
        for gap, (lag, lead) in zip(gaps, edges, strict=True):
            if lag + lead >= gap.end - gap.begin:
                _charge(free, gap.begin, gap.end, gap.nbytes, self.length)
            else:
                _charge(free, gap.begin, gap.begin + lag, gap.nbytes, self.length)
                _charge(free, gap.end - lead, gap.end, gap.nbytes, self.length)
        least = int(free.min()) if self.length else 0
        return np.maximum(free[: self.length], 0).tolist(), least


def plan_cycle(
    events: Sequence[Event],
    sizes: Mapping[Hashable, int],
    budget: int,
    held: int = 0,
    pins: Mapping[Hashable, int] | None = None,
    ahead: int | None = None,
) -> Cycle:
    """Plans one step, or several steps together if alternating plans reduce traffic."""
    once = best = Cycle(events, sizes, budget, held, pins, ahead)
    most = min(FEW // max(len(once.residency.keep), 1), TURNS) if once.closed else 1
    for repeats in range(2, most + 1):
        if best.cost <= (1 + 1e-6) * once.bound:
            break
        prices = once.residency.prices
        found = Cycle(events, sizes, budget, held, pins, ahead, repeats, ROUNDS // 20, prices)
        if found.cost < (1 - 1e-6) * best.cost:
            best = found
    return best


def _between(gaps: Sequence[Gap], edges: Sequence[tuple[int, int]]) -> list[Gap | None]:
    return [
        Gap(gap.begin + lag, gap.end - lead, gap.nbytes, gap.read, gap.period)
        if lag + lead < gap.end - gap.begin
        else None
        for gap, (lag, lead) in zip(gaps, edges, strict=True)
    ]


def _mark(event: Event) -> tuple[What, Hashable]:
    """Identity of an event; only budgets may differ between steps."""
    return event.what, (None if event.what == "budget" else event.key)


def _follows_discard(marks: Sequence[tuple[int, str, bool, bool]], number: int) -> bool:
    return marks[number][1] == "use" and marks[number - 1][1] == "discard"


def _charge(slack: Ints, begin: int, end: int, nbytes: int, length: int) -> None:
    """Subtracts bytes from a segment of the cycle, in both repetitions."""
    for start in range(begin, end, length):
        stop = min(end, start + length)
        low, high = start % length, start % length + stop - start
        parts = [(low, min(high, length)), (0, max(high - length, 0))]
        for one, other in parts:
            slack[one:other] -= nbytes
            slack[length + one : length + other] -= nbytes
