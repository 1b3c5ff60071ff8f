"""Memory of the fast tier as buffers of whole pages, which shrink and grow where they lie."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which the module mmap does not name."""
HUGE = 1 << 21
"""Bytes of a huge page."""
ROOM = 4
"""A buffer uses at least this part of the addresses that it has."""


# [Note: pages] A page that the system gives is filled with zeros, and costs a fault where it is
# first touched: more than it takes to read its content from a fast disk. Objects have many sizes,
# so what leaves is seldom of the size of what comes, and to free one buffer and make another would
# cost a fault for each page that moves. So a buffer has room to grow: addresses cost nothing. One
# that takes the place of another keeps the pages that it has, and what it has too many goes back to
# the system at once (MADV_DONTNEED), even if views of it are left.
@dataclass(frozen=True)
class _Room:
    """Addresses of a buffer."""

    memory: mmap.mmap
    # Offset of the first, on a page, or a huge page if there is one.
    begin: int
    nbytes: int

    @classmethod
    def of(cls, nbytes: int) -> _Room:
        """Maps private memory, none of which is there yet."""
        # A process that is forked finds zeros in it: copies of what changes here while a loader's
        # workers live would be memory that no budget knows of, and a read in flight would
        # end in the child's copy.
        spare = HUGE if nbytes >= HUGE else 0
        memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system that does not know it copies
            memory.madvise(WIPE_ON_FORK)
        first = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        return cls(memory, -first % HUGE if spare else 0, nbytes)

    def shown(self, nbytes: int) -> Tensor:
        """Shows the first bytes as a flat uint8 tensor; only these may be touched."""
        # Fewer page faults where it is first touched, which would cost more than a copy. Only huge
        # pages that lie inside: one that is touched is there as a whole.
        if self.nbytes >= HUGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            inside = nbytes // HUGE * HUGE
            if inside:
                self.memory.madvise(mmap.MADV_HUGEPAGE, self.begin, inside)
            if self.nbytes > inside:
                rest = self.begin + inside, self.nbytes - inside
                self.memory.madvise(mmap.MADV_NOHUGEPAGE, *rest)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=self.begin)

    def free(self, start: int, stop: int) -> None:
        """Gives the pages between two places back to the system."""
        self.memory.madvise(mmap.MADV_DONTNEED, self.begin + start, stop - start)


def page_aligned(nbytes: int) -> Tensor:
    """Makes a flat uint8 tensor of memory that begins on a page, and returns to the system."""
    # It is private, and counts as such; see `_Room.of` for forks.
    return _Room.of(nbytes).shown(nbytes)


class Pages:
    """Makes buffers of whole pages, and others of them that keep their pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[int, _Room] = {}
        # Whether buffers keep pages, and can give them back although views are left: on a CPU.
        self.keeps = device.type == "cpu" and hasattr(mmap, "MADV_NOHUGEPAGE")

    def fresh(self, size: int) -> Tensor:
        """Makes a buffer of new pages."""
        with torch.inference_mode(False):  # it serves a training, too
            if self._device.type != "cpu":
                return torch.empty(size, dtype=torch.uint8, device=self._device)
            try:
                room = _Room.of(1 << (size - 1).bit_length() if self.keeps else size)
            except OSError:  # a process may be given a limit for addresses, too
                room = _Room.of(size)
            memory = room.shown(size)
            self._rooms[memory.data_ptr()] = room
            return memory

    def settle(self, memory: Tensor) -> None:
        """Waits until a buffer may be used for something else."""

    def fits(self, memory: Tensor, size: int) -> bool:
        """Whether a buffer may become one of another size."""
        room = self._rooms.get(memory.data_ptr()) if self.keeps else None
        return room is not None and room.nbytes <= ROOM * size and size <= room.nbytes

    def resized(self, memory: Tensor, size: int) -> Tensor:
        """Makes a buffer of another size, with the pages that both have; the old one is no more."""
        room, before = self._rooms[memory.data_ptr()], memory.numel()
        if size < before:
            room.free(size, before)
        with torch.inference_mode(False):
            return room.shown(size)

    def drop(self, memory: Tensor) -> None:
        """Gives all pages of a buffer back."""
        room = self._rooms.pop(memory.data_ptr(), None)
        if room is not None and self.keeps:
            room.free(0, memory.numel())  # views of buffers that it was before may live on
