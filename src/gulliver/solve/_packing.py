"""Things into bins of one size, so that few bins do: best fit, the largest first.

Each thing, the largest first, goes into the fullest bin that still has room for it. At most
11/9 OPT + 4 bins (Johnson, Demers, Ullman, Garey, Graham 1974, "Worst-Case Performance Bounds for
Simple One-Dimensional Packing Algorithms"); for many small things hardly more than the bound.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """Things that lie together."""

    # Numbers of the things of each bin, the largest of them first.
    bins: list[list[int]]
    # Number of bins that no packing can do without.
    bound: int


def pack(sizes: Sequence[int], capacity: int) -> Packing:
    """Packs things into bins; the same for the same sizes in the same order."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for thing in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[thing]
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[at]
            number = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        bins[number].append(thing)
        left = room - size
        alike = with_room.setdefault(left, [])
        if not alike:
            bisect.insort(rooms, left)
        alike.append(number)
    halves = sum(2 * size > capacity for size in sizes)
    return Packing(bins, max(halves, -(-sum(sizes) // capacity)))
