"""A step that repeats: when each object is needed next, what stays until then, what room is left.

A *position* is the number of an event of the step. What is held "at" a position is held after its
event, until the next. Positions beyond the last belong to the next repetition.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from gulliver.solve.residency import ROUNDS, Gap, Ints, Residency, plan_residency

NEVER = 1 << 60
"""Position of a use that is not on the schedule."""
MARGIN_SHARE = 4
"""The margins take this part of the room, unless they are given."""
WORTH = 1.618
"""Moves with margins, over those without, up to which they are worth it; see the note."""
FEW, TURNS = 60, 6
"""Most gaps, and most steps, of a plan over several steps."""
What = Literal["use", "done", "discard", "lend", "give", "budget"]


# [Note: margins] An object that leaves is still being written for a while, and has to be on its way
# back before it is needed. So every gap between two uses has two *margins*, in which the object has
# its room whether it stays or not: one after the use before it, one ahead of the use after it. They
# are measured in bytes used, not in seconds: what is decided must not depend on how fast a disk is.
# Between the margins, `plan_residency` decides.
#
# Where objects are few and large, the room of margins may cost many moves. With :math:`c` seconds
# of compute and :math:`m` of moves a step takes :math:`max(c, m)` with margins, and at most
# :math:`c + m_0` without. Whatever :math:`c` is, the worse choice is at most :math:`m / m_0` times
# as slow without compute, and :math:`1 + m_0 / m` times where compute covers the moves: both are
# equal at the golden ratio, from which on there are no margins.
#
# [Note: taking turns] Where few objects compete for the same room, less moves if one stays in this
# step and another in the next: of three, in memory for two, one after another, three loads do for
# two steps. `plan_cycle` looks for such plans over a few steps while the problem is small, and the
# bound, which holds for any number of steps, says that there is something to win. With many objects
# there is next to nothing: of n equal ones, in memory for k, n - k + 1 loads a step in place of n
# (n - k) / (n - 1).
class Event(NamedTuple):
    """Something that happens in a step.

    Attributes:
        what: kind of event.
        key: object; of memory that is lent or given back its bytes, of a budget the new one.
        write: whether a use changes the object.
        fresh: whether a use overwrites it as a whole.
    """

    what: What
    key: Hashable
    write: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class Span:
    """The gap before a use, as it was planned.

    Attributes:
        length: positions from the end of the use before it.
        lead: positions of the margin ahead of the use.
        keep: whether the object stays.
        fresh: whether its content is not needed then.
    """

    length: int
    lead: int
    keep: bool
    fresh: bool


class Cycle:
    """The schedule of a step, and the plan for it."""

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
        # Number of events of all steps that are planned together.
        self.length = len(self.events)
        self._sizes = sizes
        self._prices = np.array([*prices] * repeats) if prices else None
        self._where: dict[tuple[What, Hashable], list[int]] = {}
        for position, event in enumerate(self.events):
            self._where.setdefault(_mark(event), []).append(position)
        self._uses: dict[Hashable, list[int]] = {}
        self._ends: dict[Hashable, list[int]] = {}  # of gaps: uses, and where content is forgotten
        self._marks: dict[Hashable, list[tuple[int, str, bool, bool]]] = {}
        self._spans: dict[int, Span] = {}
        # Positions of the uses of objects that are not in use already.
        self.outer: set[int] = set()
        room = self._follow(budget, held, dict(pins or {}))
        self._plan(room, ahead, rounds)

    @property
    def cost(self) -> float:
        """Bytes read and written in a step, on average."""
        return self.residency.cost / self.repeats

    @property
    def bound(self) -> float:
        """No policy with the same margins moves less in a step, in the long run."""
        return self.residency.bound / self.repeats

    def after(self, event: Event, cursor: int, end: int) -> int | None:
        """Returns the next position of an event like this one, before an end."""
        positions = self._where.get(_mark(event), ())
        place = bisect_left(positions, cursor, hi=bisect_left(positions, end))
        return positions[place] if place < len(positions) and positions[place] < end else None

    def matches(self, position: int, event: Event) -> bool:
        """Whether an event like this one is at a position."""
        return _mark(self.events[position]) == _mark(event)

    def next_use(self, key: Hashable, cursor: int) -> int:
        """Returns the position of an object's next use from a position on."""
        positions = self._uses.get(key)
        if not positions:
            return NEVER
        place = bisect_left(positions, cursor)
        return positions[place] if place < len(positions) else positions[0] + self.length

    def span(self, position: int) -> Span | None:
        """Returns the gap that ends at a position; None where there is none."""
        return self._spans.get(position % self.length)

    def stays(self, key: Hashable, cursor: int) -> bool:
        """Whether the plan keeps an object that is not in use at a position."""
        positions = self._ends.get(key)
        if not positions:
            return False
        place = bisect_left(positions, cursor) % len(positions)
        span = self._spans.get(positions[place])
        return span is not None and span.keep

    def _follow(self, budget: int, held: int, pins: dict[Hashable, int]) -> list[int]:
        """Notes the marks of objects; returns what is not in use at each position."""
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
        # Whether the step ends as it begins.
        self.closed = begun == (budget, held, {key: count for key, count in pins.items() if count})
        return room

    def _plan(self, room: list[int], ahead: int | None, rounds: int) -> None:
        """Decides which gaps are kept, with the widest margins that there is room for."""
        gaps, writes, owners = self._gaps()
        margin = ahead if ahead is not None else min(room, default=0) // (2 * MARGIN_SHARE)
        edges, free = self._margins(gaps, writes, room, margin)
        inner = _between(gaps, edges)
        # Plan of what stays.
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
        # Bytes of two repetitions that nothing has been planned for.
        self.slack: Ints = slack.copy()

    def _margins(
        self, gaps: Sequence[Gap], writes: Sequence[float], room: Sequence[int], margin: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """The widest margins that there is room for, and the room beside them."""
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
        """Returns the gaps, what writing costs in each period, and which gaps end afresh."""
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
        """Returns the positions of the two margins of a gap."""
        if not margin:
            return 0, 0
        length = gap.end - gap.begin
        lag = bisect_right(traffic, traffic[gap.begin + 1] + margin) - 1 - gap.begin
        last = gap.end + self.length  # of the second repetition, so that there is one before
        # With itself no more than the margin is on its way, but one object always is.
        lead = last - bisect_left(traffic, traffic[last] - max(margin - gap.nbytes, 0))
        return (min(lag, length) if changes else 0), (min(lead, length) if gap.read else 0)

    def _without(
        self, room: Sequence[int], gaps: Sequence[Gap], edges: Sequence[tuple[int, int]]
    ) -> tuple[list[int], int]:
        """Returns the room beside the margins, at least 0, and the least of it."""
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
    """Plans a step, or a few together where objects that take turns move less."""
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
    """What of the gaps lies between their margins; None where nothing does."""
    return [
        Gap(gap.begin + lag, gap.end - lead, gap.nbytes, gap.read, gap.period)
        if lag + lead < gap.end - gap.begin
        else None
        for gap, (lag, lead) in zip(gaps, edges, strict=True)
    ]


def _mark(event: Event) -> tuple[What, Hashable]:
    """What identifies an event: budgets may differ from step to step."""
    return event.what, (None if event.what == "budget" else event.key)


def _follows_discard(marks: Sequence[tuple[int, str, bool, bool]], number: int) -> bool:
    return marks[number][1] == "use" and marks[number - 1][1] == "discard"


def _charge(slack: Ints, begin: int, end: int, nbytes: int, length: int) -> None:
    """Takes bytes away from a part of the circle, in both repetitions."""
    for start in range(begin, end, length):
        stop = min(end, start + length)
        low, high = start % length, start % length + stop - start
        parts = [(low, min(high, length)), (0, max(high - length, 0))]
        for one, other in parts:
            slack[one:other] -= nbytes
            slack[length + one : length + other] -= nbytes
