"""A step's work cut in two, so that something else can run between both.

What runs between needs all ranks at once, as does the end. So both halves shall end together on all
groups: each group gives the first half the micro-batch, or the two, whose seconds come nearest to a
common time, for several such times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gulliver.solve.steps import BalancedStep, GroupWork, WorkPiece

MOST = 24
"""Micro-batches of a group up to which pairs are looked at."""

Times = Callable[[Hashable, int, int], float]
"""Seconds of a micro-batch of (shape, degree, samples)."""


def halves(step: BalancedStep, times: Times) -> Iterator[tuple[BalancedStep, BalancedStep]]:
    """Yields ways to cut a step in two; groups and their order are the same in both halves."""
    works = [_batches(work, times) for work in step.groups]
    if not works or min(map(len, works)) < 2:
        return
    for wanted in sorted({round(seconds, 9) for *_, seconds in works[0]}):
        firsts = [_nearest(work, wanted) for work in works]
        parts = [
            [
                [one for n, one in enumerate(work) if (n in first) == early]
                for early in (True, False)
            ]
            for work, first in zip(works, firsts, strict=True)
        ]
        early, late = (
            [_work(work.degree, part[half]) for work, part in zip(step.groups, parts, strict=True)]
            for half in (0, 1)
        )
        yield _time_of_step(early, step), _time_of_step(late, step)


_Batch = tuple[Hashable, int, float]


def _batches(work: GroupWork, times: Times) -> list[_Batch]:
    return [
        (piece.shape, size, times(piece.shape, work.degree, size))
        for piece in work.pieces
        for size in piece.batches
    ]


def _nearest(work: list[_Batch], wanted: float) -> tuple[int, ...]:
    """The micro-batch, or the pair with something left, whose seconds come nearest."""
    numbers = range(len(work))
    ways: list[tuple[int, ...]] = [(n,) for n in numbers]
    if 2 < len(work) <= MOST:
        ways += itertools.combinations(numbers, 2)
    return min(ways, key=lambda way: abs(sum(work[n][2] for n in way) - wanted))


def _work(degree: int, batches: list[_Batch]) -> GroupWork:
    by_shape: dict[Hashable, list[int]] = {}
    for shape, size, _ in batches:
        by_shape.setdefault(shape, []).append(size)
    pieces = tuple(WorkPiece(shape, tuple(sizes)) for shape, sizes in by_shape.items())
    return GroupWork(degree, sum(seconds for *_, seconds in batches), pieces)


def _time_of_step(works: list[GroupWork], whole: BalancedStep) -> BalancedStep:
    longest = max(work.seconds for work in works)
    return BalancedStep(tuple(works), longest, min(longest, whole.bound), {})


# How long the ranks of a pipeline take for the orders of their schedule, and how long they wait.
#
# Each rank does the next thing of its order as soon as what that needs is there: a forward, the
# forward of the stage before; a backward, the own forward and the backward of the stage after it
# (or the part of it that is for the inputs); the part for the weights, that for the inputs.
# Messages between ranks take `link` seconds and no rank's time.


FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Kinds of work: forward, backward, and the two parts of a backward that is split."""
Work = tuple[str, int, int]
"""The kind, stage and micro-batch of an action."""


@dataclass(frozen=True)
class Prediction:
    """A step of a pipeline."""

    # Time until the last rank is done.
    seconds: float
    # Seconds that each rank computes.
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def schedule_seconds(
    orders: Sequence[Sequence[Work]],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
    link: float = 0.0,
) -> Prediction:
    """Walks through the orders of all ranks."""
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    done: dict[Work, float] = {}
    following = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                work = order[following[rank]]
                ready = _ready(work, done, rank_of, link)
                if ready is None:
                    break
                spent = times[work[0]][work[1]]
                clocks[rank] = done[work] = max(clocks[rank], ready) + spent
                busy[rank] += spent
                following[rank] += 1
                left -= 1
        assert left < before, "a schedule can be run"
    return Prediction(max(clocks), tuple(busy))


def _ready(
    work: Work, done: Mapping[Work, float], rank_of: Mapping[int, int], link: float
) -> float | None:
    """When what some work needs is there; None while it is not known."""
    kind, stage, micro = work
    needs: list[tuple[tuple[str, ...], int]] = []
    if kind == FORWARD and stage > 0:
        needs = [((FORWARD,), stage - 1)]
    elif kind in (BACKWARD, INPUTS):
        needs = [((FORWARD,), stage)]
        if stage < len(rank_of) - 1:
            needs.append(((BACKWARD, INPUTS), stage + 1))
    elif kind == WEIGHTS:
        needs = [((INPUTS,), stage)]
    latest = 0.0
    for kinds, other in needs:
        known = [done[k, other, micro] for k in kinds if (k, other, micro) in done]
        if not known:
            return None
        latest = max(latest, known[0] + (link if rank_of[other] != rank_of[stage] else 0.0))
    return latest
