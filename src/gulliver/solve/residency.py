r"""What a fast tier keeps from use to use, for accesses that repeat: a plan, and a lower bound.

Between two uses of an object lies a *gap*, in which it stays or leaves. With :math:`x_g = 1` for a
gap that it leaves in, sizes :math:`s_g`, and :math:`W_p` for writing back what one *period* (from
one write to the next) has changed, the cheapest plan is::

    minimize    sum_g r_g x_g + sum_p W_p y_p                        bytes read and written
    subject to  x_g <= y_p                     for each gap g of a period p
                sum_{g covers t} s_g (1 - x_g) <= room_t             for each position t

Time is a circle: a gap may reach from the end of a cycle into the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 200
"""Steps of the subgradient method."""
SNAPSHOTS = 10
"""Rounds between the plans that are made from its prices."""
STATES = 4000
"""Most states that the search in depth looks at."""
LONGEST = 200
"""Most gaps of a problem that is searched in depth."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


# [Note: bound and plan] The rows of `room` are relaxed with prices per byte and position; what is
# left falls apart into periods, and is solved exactly. The best prices (subgradient steps of
# Polyak) give the linear relaxation's value, below which no policy comes in the long run, however
# it moves. The same prices rank what to keep. Of the plans made by them, and by a sweep that lets
# go of the farthest next use (Belady's rule, exact for equal sizes and costs on a line), the
# cheapest is taken. What is left between it and the bound is searched in depth: gap after gap stays
# or leaves, as long as what is decided fits and the prices leave something to win. Where that ends
# before `STATES` states were looked at, the plan is the best that there is.
@dataclass(frozen=True)
class Gap:
    """A time in which an object is not in use, between two uses."""

    # First position at which it is not in use.
    begin: int
    # Position of its next use, which is not part of the gap; of a gap that reaches into the next
    # cycle it is beyond the last position.
    end: int
    # Size of the object.
    nbytes: int
    # Cost of bringing it back at the end; 0 where its content is not needed then.
    read: float
    # Number of the period: leaving in any of its gaps costs one write.
    period: int


@dataclass(frozen=True)
class Residency:
    """A plan of what stays."""

    # Whether the object stays in each gap.
    keep: tuple[bool, ...]
    # Cost of a cycle.
    cost: float
    # No policy has a lower cost per cycle in the long run.
    bound: float
    # States that the search in depth looked at.
    states: int = 0
    # Prices of each position's room that give the bound.
    prices: tuple[float, ...] = ()


def plan_residency(
    gaps: Sequence[Gap],
    writes: Sequence[float],
    room: Sequence[int],
    rounds: int = ROUNDS,
    prices: Floats | None = None,
) -> Residency:
    """Chooses the gaps in which objects stay."""
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
    """The arrays of one problem, and steps on them."""

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
        """Returns the cost of a plan."""
        left = np.bincount(self.period[~keep], minlength=len(self.writes)) > 0
        return float(self.read[~keep].sum() + self.writes[left].sum())

    def usage(self, keep: Flags) -> Floats:
        """Returns the bytes that a plan keeps at each position."""
        changes = np.zeros(2 * self.length + 1)
        np.add.at(changes, self.begin[keep], self.size[keep])
        np.add.at(changes, self.end[keep], -self.size[keep])
        held = np.cumsum(changes)[: 2 * self.length]
        return held[: self.length] + held[self.length :]

    def relaxed(self, prices: Floats) -> tuple[float, Flags]:
        """Returns the bound that prices give, and what would be kept at these prices."""
        paid = self.paid(prices)
        kinds = len(self.writes)
        staying = np.bincount(self.period, paid, kinds)
        cheaper = np.minimum(self.read, paid)
        leaving = self.writes + np.bincount(self.period, cheaper, kinds)
        keep = np.where((staying <= leaving)[self.period], True, paid <= self.read)
        value = np.minimum(staying, leaving).sum() - float(prices @ self.room)
        return float(value), keep

    def pack(self, prices: Floats) -> Flags:
        """Keeps what saves most for its price, one after the other, as long as it fits."""
        return self._fill(np.zeros(len(self.size), dtype=bool), prices)

    def refill(self, keep: Flags) -> Flags:
        """Keeps more where there is room left."""
        return self._fill(keep.copy(), np.ones(self.length))

    def sweep(self) -> Flags:
        """Goes once round, and lets go of the farthest next use wherever there is too much."""
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
        """Returns the kept gap over a position that costs least for the time it covers."""
        over = np.where(self.begin <= now, now, now + self.length)
        rest = np.where(keep & (self.begin <= over) & (over < self.end), self.end - over, 0)
        return int(np.argmax(rest * self.size / (self.values() + 1e-30) * (rest > 0)))

    def values(self) -> Floats:
        """Returns what leaving in each gap alone would cost."""
        return self.read + self.writes[self.period]

    def paid(self, prices: Floats) -> Floats:
        """Returns what staying in each gap costs at these prices."""
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
        """Keeps all of some gaps, or none."""
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
        """Adds bytes at all positions of a gap."""
        for span in self._spans[number]:
            held[span] += nbytes

    def fits(self, slack: Floats, number: int) -> bool:
        """Whether a gap's bytes are free at all of its positions."""
        nbytes = self._nbytes[number]
        return all(np.minimum.reduce(slack[span]) >= nbytes for span in self._spans[number])


class _Search:
    """Looks for a cheaper plan in depth, gap after gap."""

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
        # What weighs most first: the least is left open where a bound can decide.
        self._order = np.argsort(-problem.values() * paid, kind="stable").tolist()
        costs = [*problem.read.tolist(), *problem.writes.tolist()]
        self._grain = float(math.gcd(*(int(value) for value in costs))) if costs else 0.0

    def run(self) -> None:
        """Looks at `STATES` states at most."""
        pairs = zip(self._stays, self._leaves, strict=True)
        self._go(0, sum(min(pair) for pair in pairs) - self._offset)

    def _go(self, depth: int, bound: float) -> None:
        # Costs are sums of whole sizes: less than the grain is nothing.
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
        """Goes on with a gap that stays or leaves, if there is room."""
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
