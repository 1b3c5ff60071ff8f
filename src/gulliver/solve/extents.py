"""Allocates blocks in slabs by best fit; adjacent holes are merged.

A block goes into the smallest hole that fits, the first of several; the remainder stays a hole.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Free list of a set of slabs."""

    # Each call takes time logarithmic in the number of holes, apart from shifting a list of as many
    # entries.

    def __init__(self) -> None:
        # The same holes three times: by size for allocation, by start and by end to merge
        # neighbours.
        self._by_size: list[tuple[int, int, int]] = []
        self._size_from: dict[tuple[int, int], int] = {}
        self._start_before: dict[tuple[int, int], int] = {}

    def add(self, slab: int, size: int) -> None:
        self._open(slab, 0, size)

    def take(self, size: int) -> tuple[int, int] | None:
        """Allocates a block; returns its slab and start, or None if no hole fits."""
        place = bisect_left(self._by_size, (size, -1, -1))
        if place == len(self._by_size):
            return None
        hole, slab, start = self._by_size[place]
        self._close(slab, start, hole)
        if hole > size:
            self._open(slab, start + size, hole - size)
        return slab, start

    def give(self, slab: int, start: int, size: int) -> None:
        after = self._size_from.get((slab, start + size))
        if after is not None:
            self._close(slab, start + size, after)
            size += after
        before = self._start_before.get((slab, start))
        if before is not None:
            self._close(slab, before, start - before)
            size, start = size + start - before, before
        self._open(slab, start, size)

    def _open(self, slab: int, start: int, size: int) -> None:
        insort(self._by_size, (size, slab, start))
        self._size_from[slab, start] = size
        self._start_before[slab, start + size] = start

    def _close(self, slab: int, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, slab, start))]
        del self._size_from[slab, start]
        del self._start_before[slab, start + size]
