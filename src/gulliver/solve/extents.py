"""Allocates blocks in slabs by best fit, with size classes; adjacent holes are merged.

Sizes are rounded up to eight classes per doubling, so that blocks of similar size are
interchangeable and a block wastes less than an eighth of the requested size plus a page. A block
goes into the smallest hole that fits, the first of several; the remainder stays a hole.
"""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE = 4096  # bytes of a page; block sizes are multiples of it
STEPS = 8  # number of size classes per doubling


# [Note: best fit] First fit would break up large holes for small blocks. With few size classes the
# smallest hole that fits was most often left by a block of the same class and is filled completely.
def size_class(size: int) -> int:
    """Returns the block size for `size` > 0 bytes: less than ``size * 9 / 8 + PAGE``."""
    step = max(PAGE, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step


class Extents:
    """Free list of a set of slabs."""

    # Each call takes time logarithmic in the number of holes, apart from shifting a list of as many
    # entries.

    def __init__(self) -> None:
        self._slabs: dict[int, int] = {}
        # The same holes three times: by size for allocation, by start and by end to merge
        # neighbours.
        self._by_size: list[tuple[int, int, int]] = []
        self._size_from: dict[tuple[int, int], int] = {}
        self._start_before: dict[tuple[int, int], int] = {}

    @property
    def slabs(self) -> dict[int, int]:
        """Bytes by slab (a copy)."""
        return dict(self._slabs)

    @property
    def free(self) -> int:
        return sum(size for size, _, _ in self._by_size)

    def add(self, slab: int, size: int) -> None:
        assert slab not in self._slabs, slab
        self._slabs[slab] = size
        self._open(slab, 0, size)

    def is_empty(self, slab: int) -> bool:
        return self._size_from.get((slab, 0)) == self._slabs[slab]

    def remove(self, slab: int) -> None:
        assert self.is_empty(slab)
        self._close(slab, 0, self._slabs.pop(slab))

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
        """Frees a block or a part of one, and merges it with adjacent holes."""
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
