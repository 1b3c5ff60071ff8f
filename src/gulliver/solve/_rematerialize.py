"""Recomputation of a chain of stages on one device, in the manner of rotor.

Stage i turns the output of stage i - 1 into its own. Its backward needs that input, what its
forward saved, and the gradient of its output. What is not saved is computed again, from a
checkpoint that a first sweep has left, and again with checkpoints inside, as often as it pays.
A schedule is *persistent* if a checkpoint stays until the backward has passed it; the others are in
`_rematerialize_free.py`. For a part i..k
of the chain, whose input is kept by the caller, and m bytes for all else, the least seconds are

    time(m; i, k) = min of
      saved:       f_i + time(m - saved_i - output_i; i + 1, k) + b_i
      offloaded:   the same with less left in between, and the moves that nothing hides
      checkpoint j: f_i + ... + f_(j-1) + time(m - output_(j-1); j, k) + time(m; i, j - 1)

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, "Optimal checkpointing for
heterogeneous chains" (rotor); off-loading is bounded as the joint search does it (`_joint.py`).

Exact over persistent schedules if all sizes and the budget are multiples of `budget / slots`.
Otherwise sizes are rounded up, which never exceeds the budget, and the same with sizes rounded down
is a lower bound. O(stages^3 x slots) numbers in O(stages^2) operations on arrays; parts of equal
stages are solved once, so a chain of equal stages takes O(stages) of them.

The gradient of the chain's output is there from the start: let the last stage be the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve._joint import OffloadLink
from gulliver.solve._pareto import Floats
from gulliver.solve._rematerialize_free import free_steps
from gulliver.solve._stages import Schedule, Stage, Step

SLOTS = 500
LOOKS = 100_000


def rematerialize(
    stages: Sequence[Stage],
    budget: int,
    source: int = 0,
    link: OffloadLink | None = None,
    slots: int = SLOTS,
    free: bool = False,
    looks: int = LOOKS,
) -> Schedule:
    """Finds the schedule with the least seconds, of the persistent ones or of all.

    Args:
        stages: stages in the order of forward.
        budget: bytes that the chain may take.
        source: bytes of the chain's input, which stays.
        link: link to the slower tier; None: nothing is offloaded.
        slots: number of equal parts that the budget is measured in.
        free: whether checkpoints may go before they have served (`_rematerialize_free.py`); exact
            for some ten stages, and with a bound beyond.
        looks: number of states that a free schedule is looked for among.

    Raises:
        GulliverError: the budget is too small, and the least that would do; no stages or slots.
    """
    if slots < 1:
        raise GulliverError(f"slots={slots}: measure the budget in at least 1 part")
    if not stages:
        raise GulliverError("a chain has at least one stage")
    if free and link is not None:
        raise GulliverError("free recomputation moves nothing: leave the link out, or free=True")
    found = _persistent(stages, budget, source, link, slots)
    if free:
        found = _freed(stages, budget, source, found, looks)
    if found is None:
        least = least_budget(stages, source, link)
        raise GulliverError(f"a budget of {budget} bytes is too small: {least} would do")
    return found


def _persistent(
    stages: Sequence[Stage], budget: int, source: int, link: OffloadLink | None, slots: int
) -> Schedule | None:
    unit = _unit(stages, budget, source, slots)
    table = _Table(stages, budget, source, link, unit, math.ceil)
    seconds = float(table.whole[-1]) if budget >= source else math.inf
    if seconds == math.inf:
        fits = least_budget(stages, source, link) <= budget
        return _persistent(stages, budget, source, link, 4 * slots) if fits else None
    steps = tuple(table.steps())
    lower = seconds
    if any(size % unit for size in _sizes(stages, budget, source)):
        down = _Table(stages, budget, source, link, unit, math.floor)
        lower = min(float(down.whole[-1]), seconds)
    return Schedule(steps, seconds, lower, schedule_peak(stages, steps, source))


def _freed(
    stages: Sequence[Stage], budget: int, source: int, known: Schedule | None, looks: int
) -> Schedule | None:
    """The best of all schedules, given the best persistent one."""
    passes = sum(s.forward_s + s.backward_s for s in stages)
    # What rounding makes of equal sums is no gain.
    extra = math.inf if known is None else (known.seconds - passes) * (1 - 1e-12)
    steps, bound = free_steps(stages, budget, source, extra, looks)
    if steps is None:
        lower = passes + bound
        return known and Schedule(known.steps, known.seconds, min(lower, known.seconds), known.peak)
    seconds = recomputed_seconds(stages, steps)
    return Schedule(steps, seconds, seconds, schedule_peak(stages, steps, source))


def _unit(stages: Sequence[Stage], budget: int, source: int, slots: int) -> int:
    """The largest unit in which all sizes are whole, or the budget over the slots."""
    unit = math.gcd(*_sizes(stages, budget, source))
    return unit if unit and budget // unit <= slots else max(1, -(-budget // slots))


def _sizes(stages: Sequence[Stage], budget: int, source: int) -> list[int]:
    sizes = [source, budget]
    for s in stages:
        sizes += [s.output, s.saved, s.forward_bytes, s.backward_bytes, s.movable]
    return sizes


def least_budget(stages: Sequence[Stage], source: int = 0, link: OffloadLink | None = None) -> int:
    """Finds the least bytes with which some persistent schedule works.

    Least bytes of a part follow the recursion of its least seconds, with the larger of needs in
    place of sums: exact, in O(stages^3).

    Args:
        stages: stages in the order of forward.
        source: bytes of the chain's input, which stays.
        link: link to the slower tier; None: nothing is offloaded.
    """
    if not stages:
        return source
    chain, count = _Chain(stages, source, link), len(stages)
    known: dict[tuple[int, int], int] = {}
    for first in range(count - 1, -1, -1):
        for last in range(first, count):
            ways = [chain.saves(first, last)]
            if last > first:
                held = stages[first].saved + stages[first].output
                ways = [max(chain.saves(first, last), held + known[first + 1, last])]
                if chain.moves(first):
                    rest = held - stages[first].movable
                    ways.append(max(chain.offloads(first, last), rest + known[first + 1, last]))
            for j in range(first + 1, last + 1):
                inner = max(stages[j - 1].output + known[j, last], known[first, j - 1])
                ways.append(max(chain.sweep(first, j, last), inner))
            known[first, last] = min(ways)
    return source + known[0, count - 1]


class _Chain:
    """Bytes that pieces of a schedule need beside the input of their part."""

    def __init__(self, stages: Sequence[Stage], source: int, link: OffloadLink | None) -> None:
        self.stages, self.source, self.link = stages, source, link

    def output(self, number: int) -> int:
        """Bytes of the output of a stage; -1 is the chain's input."""
        return self.stages[number].output if number >= 0 else self.source

    def moves(self, number: int) -> bool:
        """Whether a stage can be offloaded."""
        return self.link is not None and self.stages[number].movable > 0

    def saves(self, number: int, last: int) -> int:
        """Need of a stage that is saved; the gradient of the part's output is there before."""
        stage = self.stages[number]
        held = stage.saved + stage.output
        back = stage.output + stage.backward_bytes + self.output(number - 1)
        return held + max(self.output(last) + stage.forward_bytes, back)

    def offloads(self, number: int, last: int) -> int:
        """Need of a stage that is offloaded, and of the next one's passes while it moves."""
        held = self.stages[number].saved + self.stages[number].output
        return max(self.saves(number, last), held + self.saves(number + 1, last))

    def sweep(self, first: int, stop: int, last: int) -> int:
        """Need of forwards without saving: of the first, whose input stays, and those up to one."""
        inputs = [0, *(self.output(number - 1) for number in range(first + 1, stop))]
        needs = (
            put + self.output(number) + self.stages[number].forward_bytes
            for put, number in zip(inputs, range(first, stop), strict=True)
        )
        return self.output(last) + max(needs)

    def exposed(self, number: int) -> float:
        """Seconds of a stage's moves that the next one's passes do not hide."""
        assert self.link is not None, "what is offloaded has a link"
        moved, after = self.stages[number].movable, self.stages[number + 1]
        out = max(0.0, moved * self.link.write_s - after.forward_s)
        return out + max(0.0, moved * self.link.read_s - after.backward_s)


class _Table:
    """Least seconds of all parts, for each number of slots.

    Args:
        stages: stages in the order of forward.
        budget: bytes that the chain may take.
        source: bytes of the chain's input.
        link: link to the slower tier.
        unit: bytes of a slot.
        to_whole: rounds a number of slots up or down.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        budget: int,
        source: int,
        link: OffloadLink | None,
        unit: int,
        to_whole: Callable[[float], int],
    ) -> None:
        sizes = ("output", "saved", "forward_bytes", "backward_bytes")
        whole = [{n: to_whole(getattr(s, n) / unit) for n in sizes} for s in stages]
        # What moves is taken off: it is rounded the other way, for what stays.
        for s, w in zip(stages, whole, strict=True):
            w["movable"] = w["saved"] - to_whole((s.saved - s.movable) / unit)
        pairs = zip(stages, whole, strict=True)
        self._stages = [Stage(s.forward_s, s.backward_s, **w) for s, w in pairs]
        self._exact = _Chain(stages, source, link)
        self._chain = _Chain(self._stages, to_whole(source / unit), link)
        self._link = link
        # With sizes rounded down, the budget may not be.
        self._most = budget // unit if to_whole is math.ceil else -(-budget // unit)
        self._most = max(0, self._most - self._chain.source)
        self._sums = np.concatenate([[0.0], np.cumsum([s.forward_s for s in stages])])
        self._known: list[Floats] = []
        self._number: dict[tuple[int, int], int] = {}
        self._solve()
        self.whole = self._part(0, len(stages) - 1)

    def _solve(self) -> None:
        """Solves all parts, the short ones first, and parts of equal stages once."""
        kinds: dict[object, int] = {}
        # The bytes of what comes before a stage matter, too.
        befores = [self._chain.output(n - 1) for n in range(len(self._stages))]
        pairs = zip(self._exact.stages, befores, strict=True)
        row = tuple(kinds.setdefault(pair, len(kinds)) for pair in pairs)
        seen: dict[tuple[int, ...], int] = {}
        for last in range(len(row)):
            for first in range(last, -1, -1):
                key = row[first : last + 1]
                if key not in seen:
                    seen[key] = len(self._known)
                    ways = self._ways(first, last)
                    self._known.append(np.minimum.reduce([way for way, _ in ways]))
                self._number[first, last] = seen[key]

    def _part(self, first: int, last: int) -> Floats:
        return self._known[self._number[first, last]]

    def _ways(self, first: int, last: int) -> list[tuple[Floats, tuple[str, int]]]:
        """Seconds of all ways to begin a part, by the number of slots."""
        chain, stage, real = self._chain, self._stages[first], self._exact.stages[first]
        passes = float(real.forward_s + real.backward_s)
        if first == last:
            alone = np.full(self._most + 1, passes)
            return [(self._from(alone, chain.saves(first, last)), ("save", first))]
        held, above = stage.saved + stage.output, self._part(first + 1, last)
        saved = passes + self._shifted(above, held)
        ways = [(self._from(saved, chain.saves(first, last)), ("save", first))]
        if self._exact.moves(first):
            away = passes + self._exact.exposed(first) + self._shifted(above, held - stage.movable)
            ways.append((self._from(away, chain.offloads(first, last)), ("offload", first)))
        for j in range(first + 1, last + 1):
            swept = float(self._sums[j] - self._sums[first])
            inner = self._shifted(self._part(j, last), self._stages[j - 1].output)
            both = swept + inner + self._part(first, j - 1)
            ways.append((self._from(both, chain.sweep(first, j, last)), ("check", j)))
        return ways

    def _from(self, seconds: Floats, least: int) -> Floats:
        seconds[:least] = math.inf
        return seconds

    def _shifted(self, seconds: Floats, by: int) -> Floats:
        moved = np.full(self._most + 1, math.inf)
        moved[by:] = seconds[: max(0, self._most + 1 - by)]
        return moved

    def steps(self) -> list[Step]:
        """The schedule with the least seconds in the whole budget."""
        return self._steps(0, len(self._stages) - 1, self._most)

    def _steps(self, first: int, last: int, room: int) -> list[Step]:
        ways = self._ways(first, last)
        kind, place = min(ways, key=lambda way: float(way[0][room]))[1]
        stage = self._stages[first]
        if kind == "check":
            swept = [Step("check", first), *(Step("forward", n) for n in range(first + 1, place))]
            rest = self._steps(place, last, room - self._stages[place - 1].output)
            return [*swept, *rest, *self._steps(first, place - 1, room)]
        inner = list[Step]()
        if first < last:
            held = stage.saved + stage.output - (stage.movable if kind == "offload" else 0)
            inner = self._steps(first + 1, last, room - held)
        return [Step(kind, first), *inner, Step("backward", first)]


def recomputed_seconds(
    stages: Sequence[Stage], steps: Sequence[Step], link: OffloadLink | None = None
) -> float:
    """Seconds of a schedule."""
    chain, seconds = _Chain(stages, 0, link), 0.0
    for kind, number in steps:
        stage = stages[number]
        passes = {"backward": stage.backward_s, "drop": 0.0}
        seconds += passes.get(kind, stage.forward_s)
        seconds += chain.exposed(number) if kind == "offload" else 0.0
    return seconds


def schedule_peak(stages: Sequence[Stage], steps: Sequence[Step], source: int = 0) -> int:
    """Most bytes at once, by walking through a schedule.

    Args:
        stages: stages in the order of forward.
        steps: steps of the schedule.
        source: bytes of the chain's input, which stays.

    Raises:
        GulliverError: a step needs what is not there.
    """
    walk = _Memory(stages, source)
    for kind, number in steps:
        walk.step(kind, number)
    return walk.peak


class _Memory:
    """What is in memory while a schedule runs."""

    def __init__(self, stages: Sequence[Stage], source: int) -> None:
        self._chain, self._stages = _Chain(stages, source, None), stages
        self._outputs, self._saved = {-1}, dict[int, int]()
        self._gradient, self._moving = len(stages) - 1, dict[int, int]()
        self.peak = 0

    def _live(self) -> int:
        outputs = self._outputs | set(self._saved)
        live = sum(self._chain.output(n) for n in outputs) + sum(self._saved.values())
        return live + self._chain.output(self._gradient)

    def step(self, kind: str, number: int) -> None:
        """Runs one step."""
        stage = self._stages[number]
        if kind == "drop":
            self._outputs.discard(number)
            return
        there = self._outputs | set(self._saved)
        if number - 1 not in there or (kind == "backward" and self._gradient != number):
            raise GulliverError(f"step {kind} of stage {number} needs what is not there")
        moving = self._moving.get(number - 1, 0)
        if kind == "backward":
            back = stage.movable if number in self._moving else 0
            before = self._chain.output(number - 1)
            self._top(moving + back + stage.backward_bytes + before)
            self._saved.pop(number)
            self._outputs.discard(number)
            self._gradient = number - 1
            if number - 1 not in self._saved and number > 0:
                # A checkpoint has served when the backward has passed it.
                self._outputs.discard(number - 1)
            return
        if kind in ("save", "offload"):
            self._outputs.discard(number)
            self._saved[number] = stage.saved
            self._top(moving + stage.forward_bytes)
            if kind == "offload":
                self._saved[number] -= stage.movable
                self._moving[number] = stage.movable
            return
        self._outputs.add(number)
        self._top(moving + stage.forward_bytes)
        if kind == "forward":
            self._outputs.discard(number - 1)

    def _top(self, extra: int) -> None:
        self.peak = max(self.peak, self._live() + extra)
