"""A step's work cut in two, so that something else can run between both.

What runs between needs all ranks at once, as does the end. So both halves shall end together on all
groups: each group gives the first half the micro-batch, or the two, whose seconds come nearest to a
common time, for several such times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator

from gulliver.solve._steps import BalancedStep, GroupWork, WorkPiece

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
