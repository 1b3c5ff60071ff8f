"""Micro-batches of groups whose ranks are stages of a pipeline: smaller ones fill it sooner.

Micro-batches of p_1, ..., p_n seconds on each of S equal stages, one after the other, end after

    p_1 + ... + p_n + (S - 1) max p

seconds: the makespan of a proportionate flow shop, in whatever order they run (Pinedo,
"Scheduling", section 6.1). So few large micro-batches, which compute best, let stages wait longest.
`fill_stages` cuts the samples of each group again, with several limits of what one micro-batch may
take, and keeps what ends soonest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np

from gulliver.solve._accumulation import split_batches
from gulliver.solve._steps import BalancedStep, GroupWork, WorkPiece

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
