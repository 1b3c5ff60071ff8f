"""Recomputation of a chain with nothing prescribed: checkpoints may go before they have served.

The schedules of `_rematerialize.py` hold a checkpoint until the backward has passed it. Here one
may be dropped to make room, and computed again. Three things need no look: what a stage saves stays
until its backward, or its forward had better saved nothing; each stage is saved once, so forwards
that save nothing are all that differs; and an output need not go before its room is needed. What is
left is a shortest path over

    (gradient, outputs that are held, stages that are saved)

whose steps cost the forwards that save nothing (Dijkstra 1959). States grow like 3^stages; after
`looks` of them the least seconds of those still to be looked at are a bound, which is told.

Source: Checkmate (Jain et al. 2020) states the problem for graphs; rotor (2019) gives a chain for
which no persistent schedule is best.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gulliver.solve._stages import Stage, Step


class Held(NamedTuple):
    """Contents of memory.

    Attributes:
        gradient: number of the stage whose output's gradient is there.
        outputs: outputs that are held as checkpoints, a bit for each stage.
        saved: stages that are saved, outputs with them.
    """

    gradient: int
    outputs: int
    saved: int


class _Move(NamedTuple):
    seconds: float
    dropped: tuple[int, ...]
    step: Step
    held: Held


class _Way(NamedTuple):
    before: Held
    move: _Move


def free_steps(
    stages: Sequence[Stage], budget: int, source: int, known: float, looks: int
) -> tuple[tuple[Step, ...] | None, float]:
    """The steps with the least forwards that save nothing, and a bound of their seconds.

    Args:
        stages: stages in the order of forward.
        budget: bytes that the chain may take.
        source: bytes of the chain's input, which stays.
        known: seconds of such forwards of a known schedule.
        looks: number of states to look at.

    Returns:
        The steps, None where none were found below what is known; and the least seconds that such
        forwards of any schedule take, infinite if nothing keeps to the budget.
    """
    memory = _Memory(stages, budget, source)
    start = Held(len(stages) - 1, 0, 0)
    best, came = {start: 0.0}, dict[Held, _Way]()
    heap, counter, done = [(0.0, 0, start)], itertools.count(1), set[Held]()
    while heap:
        seconds, _, held = heapq.heappop(heap)
        if held in done:
            continue
        if seconds >= known or len(done) >= looks:
            return None, min(seconds, known)
        if held.gradient < 0:
            return _traced(came, start, held), seconds
        done.add(held)
        for move in memory.moves(held):
            total = seconds + move.seconds
            if total < min(known, best.get(move.held, math.inf)):
                best[move.held], came[move.held] = total, _Way(held, move)
                heapq.heappush(heap, (total, next(counter), move.held))
    return None, known


def _traced(came: dict[Held, _Way], start: Held, end: Held) -> tuple[Step, ...]:
    steps = list[Step]()
    while end != start:
        end, move = came[end]
        steps += [move.step, *(Step("drop", stage) for stage in move.dropped)]
    return tuple(reversed(steps))


class _Memory:
    """Steps that the budget allows."""

    def __init__(self, stages: Sequence[Stage], budget: int, source: int) -> None:
        self._stages, self._budget, self._source = stages, budget, source

    def _output(self, number: int) -> int:
        return self._stages[number].output if number >= 0 else self._source

    def _live(self, held: Held) -> int:
        live = self._source + self._output(held.gradient)
        for number, stage in enumerate(self._stages):
            live += stage.output if (held.outputs | held.saved) >> number & 1 else 0
            live += stage.saved if held.saved >> number & 1 else 0
        return live

    def moves(self, held: Held) -> Iterator[_Move]:
        """All steps, with the least that they have to drop."""
        last, live, there = held.gradient, self._live(held), held.outputs | held.saved
        if held.saved >> last & 1 and (not last or there >> (last - 1) & 1):
            left = (1 << max(0, last - 1)) - 1
            after = Held(last - 1, held.outputs & left, held.saved & ~(1 << last))
            need = live + self._stages[last].backward_bytes + self._output(last - 1)
            step = Step("backward", last)
            yield from self._fitting(held, after, need, step, 0.0)
            if need <= self._budget and self._live(after) <= live:
                return  # Whatever else is done has more room afterwards.
        for number, stage in enumerate(self._stages[: last + 1]):
            one = 1 << number
            if held.saved & one or (number and not there >> (number - 1) & 1):
                continue
            new = 0 if there & one else stage.output
            need = live + new + stage.forward_bytes
            saved = Held(last, held.outputs & ~one, held.saved | one)
            step = Step("save", number)
            yield from self._fitting(held, saved, need + stage.saved, step, 0.0)
            if number < last and not there & one:
                kept = Held(last, held.outputs | one, held.saved)
                step = Step("check", number)
                yield from self._fitting(held, kept, need, step, stage.forward_s)

    def _fitting(
        self, held: Held, after: Held, need: int, step: Step, seconds: float
    ) -> Iterator[_Move]:
        """A step with each set of outputs that has to go, and of which none could stay."""
        over = need - self._budget
        if over <= 0:
            yield _Move(seconds, (), step, after)
            return
        free = [
            number
            for number, stage in enumerate(self._stages)
            if held.outputs >> number & 1 and stage.output and number != step.stage - 1
        ]
        if step.kind == "save":
            # An output that is there stays, as part of what is saved.
            free = [number for number in free if number != step.stage]
        found = list[set[int]]()
        for count in range(1, len(free) + 1):
            for some in itertools.combinations(free, count):
                enough = sum(self._stages[number].output for number in some) >= over
                if enough and not any(less <= set(some) for less in found):
                    found.append(set(some))
                    gone = sum(1 << number for number in some)
                    left = Held(after.gradient, after.outputs & ~gone, after.saved)
                    yield _Move(seconds, some, step, left)
