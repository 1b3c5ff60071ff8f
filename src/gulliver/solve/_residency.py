r"""What a fast tier keeps from use to use, for accesses that repeat: a plan, and a lower bound.

Between two uses of an object lies a *gap*, in which it stays or leaves. With :math:`x_g = 1` for a
gap that it leaves in, sizes :math:`s_g`, and :math:`W_p` for writing back what one *period* (from
one write to the next) has changed, the cheapest plan is::

    minimize    sum_g r_g x_g + sum_p W_p y_p                        bytes read and written
    subject to  x_g <= y_p                     for each gap g of a period p
                sum_{g covers t} s_g (1 - x_g) <= room_t             for each position t

Time is a circle: a gap may reach from the end of a cycle into the next.

[Note: bound and plan] The rows of `room` are relaxed with prices per byte and position; what is
left falls apart into periods, and is solved exactly. The best prices (subgradient steps of Polyak)
give the linear relaxation's value, below which no policy comes in the long run, however it moves.
The same prices rank what to keep. Of the plans made by them, and by a sweep that lets go of the
farthest next use (Belady's rule, exact for equal sizes and costs on a line), the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 200
"""Steps of the subgradient method."""
SNAPSHOTS = 10
"""Rounds between the plans that are made from its prices."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Gap:
    """A time in which an object is not in use, between two uses.

    Attributes:
        begin: first position at which it is not in use.
        end: position of its next use, which is not part of the gap; of a gap that reaches into the
            next cycle it is beyond the last position.
        nbytes: size of the object.
        read: cost of bringing it back at the end; 0 where its content is not needed then.
        period: number of the period: leaving in any of its gaps costs one write.
    """

    begin: int
    end: int
    nbytes: int
    read: float
    period: int


@dataclass(frozen=True)
class Residency:
    """A plan of what stays.

    Attributes:
        keep: whether the object stays in each gap.
        cost: cost of a cycle.
        bound: no policy has a lower cost per cycle in the long run.
    """

    keep: tuple[bool, ...]
    cost: float
    bound: float


def plan_residency(
    gaps: Sequence[Gap], writes: Sequence[float], room: Sequence[int], rounds: int = ROUNDS
) -> Residency:
    """Chooses the gaps in which objects stay.

    Args:
        gaps: gaps of one cycle.
        writes: cost of writing back, by period; 0 for one in which nothing was changed.
        room: bytes at each position of the cycle that are not in use.
        rounds: steps towards the bound; without any only the quick plans are made.

    Returns:
        The best plan that was found.
    """
    if not gaps:
        return Residency((), 0.0, 0.0)
    problem = _Problem(gaps, writes, room)
    best = problem.sweep()
    cost = problem.cost(best)
    prices = np.full(problem.length, 1.0)
    for plan in (problem.pack(prices), problem.refill(best)):
        if problem.cost(plan) < cost:
            best, cost = plan, problem.cost(plan)
    bound, scale, since = 0.0, 1.0, 0
    prices = np.zeros(problem.length)
    for number in range(rounds):
        value, wanted = problem.relaxed(prices)
        since += 1
        if value > bound:
            bound, since = value, 0
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
    return Residency(tuple(best.tolist()), cost, min(bound, cost))


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
        paid = self._paid(prices)
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
                self._change(usage, victim, -float(self.size[victim]))
        return keep

    def _farthest(self, keep: Flags, now: int) -> int:
        """Returns the kept gap over a position that costs least for the time it covers."""
        over = np.where(self.begin <= now, now, now + self.length)
        rest = np.where(keep & (self.begin <= over) & (over < self.end), self.end - over, 0)
        return int(np.argmax(rest * self.size / (self._values() + 1e-30) * (rest > 0)))

    def _values(self) -> Floats:
        return self.read + self.writes[self.period]

    def _paid(self, prices: Floats) -> Floats:
        total = np.concatenate(([0.0], np.cumsum(np.concatenate((prices, prices)))))
        return self.size * (total[self.end] - total[self.begin])

    def _fill(self, keep: Flags, prices: Floats) -> Flags:
        slack = self.room - self.usage(keep)
        paid = self._paid(prices)
        singles = len(self.size)
        worth = [self.read[n] / (paid[n] + 1e-30) for n in range(singles)]
        for many in self.items[singles:]:
            saved = self.read[many].sum() + self.writes[self.period[many[0]]]
            worth.append(saved / (paid[many].sum() + 1e-30))
        alone = np.bincount(self.period, minlength=len(self.writes)) == 1
        for number in range(singles):
            if alone[self.period[number]]:
                worth[number] = self._values()[number] / (paid[number] + 1e-30)
        for number in np.argsort(-np.array(worth), kind="stable").tolist():
            self._take(keep, slack, [n for n in self.items[number] if not keep[n]])
        return keep

    def _take(self, keep: Flags, slack: Floats, wanted: list[int]) -> None:
        """Keeps all of some gaps, or none."""
        taken = []
        for number in wanted:
            self._change(slack, number, -float(self.size[number]))
            taken.append(number)
            if self._least(slack, number) < 0:
                for undone in taken:
                    self._change(slack, undone, float(self.size[undone]))
                return
        keep[wanted] = True

    def _spans(self, number: int) -> list[slice]:
        begin, end = int(self.begin[number]), int(self.end[number])
        if end <= self.length:
            return [slice(begin, end)]
        if begin >= self.length:
            return [slice(begin - self.length, end - self.length)]
        return [slice(begin, self.length), slice(0, end - self.length)]

    def _change(self, held: Floats, number: int, nbytes: float) -> None:
        for span in self._spans(number):
            held[span] += nbytes

    def _least(self, held: Floats, number: int) -> float:
        return min(
            (float(held[span].min()) for span in self._spans(number) if held[span].size),
            default=0.0,
        )
