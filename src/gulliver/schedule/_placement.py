"""Splits jobs over nodes so that they lose the least speed to the links between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

Parts = tuple[int, ...]
"""Slots of a job on each node."""
Loss = Callable[[int, Parts], float]
EXACT_NODES, EXACT_SLOTS, EXACT_JOBS = 4, 8, 6
"""Nodes, slots of a node and jobs up to which the placement is exact."""
SCATTERED = 1e-7
"""Weight of scattered free slots: small, so that it only breaks ties."""


def place(counts: Sequence[int], free: Sequence[int], loss: Loss) -> list[Parts]:
    """Splits jobs over nodes."""
    assert sum(counts) <= sum(free), "more slots than there are"
    # Few jobs on few nodes are placed exactly: all splits of each job, memoised by the free slots
    # left. Others go largest first into the node that they fill best (best-fit decreasing; Johnson
    # 1973, "Near-optimal bin packing algorithms"). Ties are broken by keeping free slots together.
    small = len(free) <= EXACT_NODES and max(free, default=0) <= EXACT_SLOTS
    exact = small and len(counts) <= EXACT_JOBS
    return (_exact if exact else _greedy)(counts, free, loss)


def scattered(free: Sequence[int]) -> float:
    """Cost of free slots: less where they are together."""
    return -SCATTERED * sum(room * room for room in free)


def splits(count: int, free: Sequence[int]) -> Iterator[Parts]:
    """All ways to take `count` slots from nodes."""
    if not free:
        if count == 0:
            yield ()
        return
    for here in range(max(0, count - sum(free[1:])), min(count, free[0]) + 1):
        for rest in splits(count - here, free[1:]):
            yield (here, *rest)


def _exact(counts: Sequence[int], free: Sequence[int], loss: Loss) -> list[Parts]:
    # Nodes are alike, so what is left is remembered in falling order, and put back afterwards.
    @cache
    def best(job: int, room: Parts) -> tuple[float, Parts]:
        if job == len(counts):
            return scattered(room), ()
        found: tuple[float, Parts] | None = None
        for parts in splits(counts[job], room):
            behind = tuple(sorted((r - p for r, p in zip(room, parts, strict=True)), reverse=True))
            cost = loss(job, parts) + best(job + 1, behind)[0]
            if found is None or cost < found[0]:
                found = cost, parts
        assert found is not None
        return found

    left, placed = list(free), []
    for job in range(len(counts)):
        order = sorted(range(len(left)), key=lambda node: -left[node])
        parts = best(job, tuple(left[node] for node in order))[1]
        own = dict(zip(order, parts, strict=True))
        placed.append(tuple(own[node] for node in range(len(left))))
        left = [room - part for room, part in zip(left, placed[-1], strict=True)]
    return placed


def _greedy(counts: Sequence[int], free: Sequence[int], loss: Loss) -> list[Parts]:
    del loss
    left = list(free)
    placed: dict[int, Parts] = {}
    for job in sorted(range(len(counts)), key=lambda number: -counts[number]):
        parts, count = [0] * len(left), counts[job]
        fits = [node for node, room in enumerate(left) if room >= count]
        if count and fits:
            parts[min(fits, key=lambda node: left[node])] = count
        else:
            for node in sorted(range(len(left)), key=lambda number: -left[number]):
                parts[node] = min(left[node], count - sum(parts))
        left = [room - part for room, part in zip(left, parts, strict=True)]
        placed[job] = tuple(parts)
    return [placed[job] for job in range(len(counts))]
