"""Placing blocks in slabs: best fit by size class; holes that touch become one.

Sizes are rounded up to classes of eight steps per doubling, so that a block wastes less than an
eighth of what was asked for, besides the rest of a page, and blocks of nearly the same size can
take each other's place. Of the holes that are large enough the smallest is taken, the first of
them if several are; what is left over stays a hole.

It does not know what a slab is made of, nor when a block is no longer needed.
"""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE = 4096
"""Bytes of a page; blocks are whole pages, so that they begin on one."""
STEPS = 8
"""Size classes per doubling."""


# [Note: best fit] Taking the first hole that is large enough would break up the large ones for
# small blocks. The smallest that is large enough is, with few size classes, most often one that a
# block of the same class has left: it is filled whole.
def size_class(size: int) -> int:
    """Returns the bytes of a block for `size` > 0 bytes: less than ``size * 9 / 8 + PAGE``."""
    step = max(PAGE, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step


class Extents:
    """The holes of a set of slabs."""

    # Each call takes time logarithmic in the number of holes, apart from shifting a list of as many
    # entries.

    def __init__(self) -> None:
        self._slabs: dict[int, int] = {}
        # The same holes three times: by size to find one, by start and by end to join neighbours.
        self._by_size: list[tuple[int, int, int]] = []
        self._size_from: dict[tuple[int, int], int] = {}
        self._start_before: dict[tuple[int, int], int] = {}

    @property
    def slabs(self) -> dict[int, int]:
        """Slab to its bytes, a copy."""
        return dict(self._slabs)

    @property
    def free(self) -> int:
        """Bytes of all holes."""
        return sum(size for size, _, _ in self._by_size)

    def add(self, slab: int, size: int) -> None:
        """Adds an empty slab under a number not yet in use."""
        assert slab not in self._slabs, slab
        self._slabs[slab] = size
        self._open(slab, 0, size)

    def is_empty(self, slab: int) -> bool:
        """Whether no block lies in a slab."""
        return self._size_from.get((slab, 0)) == self._slabs[slab]

    def remove(self, slab: int) -> None:
        """Takes an empty slab away."""
        assert self.is_empty(slab)
        self._close(slab, 0, self._slabs.pop(slab))

    def take(self, size: int) -> tuple[int, int] | None:
        """Places a block in the smallest hole that holds it."""
        place = bisect_left(self._by_size, (size, -1, -1))
        if place == len(self._by_size):
            return None
        hole, slab, start = self._by_size[place]
        self._close(slab, start, hole)
        if hole > size:
            self._open(slab, start + size, hole - size)
        return slab, start

    def give(self, slab: int, start: int, size: int) -> None:
        """Makes a block, or a part of one, a hole, and joins it with the holes at its ends."""
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
