"""Freed memory goes back to the system: glibc's malloc is set to return it, while a limit is set.

By default glibc keeps what is freed, below a size that grows up to 32 MiB, in heaps where it serves
whoever asks for less next. A manager that shares a limit with activations needs it back: their
memory would stay resident after backward, while chunks want the room.
"""

from __future__ import annotations

import ctypes
import os

# From malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED = 1 << 20
"""Bytes from which memory is mapped by itself and goes back as soon as it is freed."""
# Once set, glibc's thresholds do not move by themselves again, and cannot be asked where they were.
# So they are put to where they end up in a process that trains, or to what its environment says.
_GROWN_MMAP, _GROWN_TRIM = 32 << 20, 64 << 20
_ALL = (1 << 31) - 1


# [Note: page faults] The price is that each large tensor of a step begins on pages that the system
# clears one by one: 0.7 million faults of a step of 250 M parameters and 512 tokens, a tenth of its
# seconds. Where memory is not what a step waits for, it is kept after all (`FreedMemory.keep`), and
# takes up to two fifths more room, because freed pieces do not fit the next tensors exactly.
class FreedMemory:
    """Returns freed memory to the system until `close`; of several, until the last one's."""

    _open = 0

    def __init__(self, mapped: int = MAPPED) -> None:
        # Why nothing is done here; empty where it is.
        self.reason = _reason()
        self._libc = None if self.reason else ctypes.CDLL(None)
        self._mapped = mapped
        if self._libc is not None:
            FreedMemory._open += 1
            self.keep(False)

    def keep(self, keeps: bool) -> None:
        """Keeps freed memory for the next allocations of the process, or returns it at once."""
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _GROWN_MMAP if keeps else self._mapped)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _ALL if keeps else self._mapped)
            if not keeps:
                self.trim()

    def trim(self) -> None:
        """Gives back free pages between what is used; costs a walk over all heaps."""
        if self._libc is not None:
            trim_heaps()

    def close(self) -> None:
        """Makes glibc keep freed memory again, as its environment says or as it does by itself."""
        libc, self._libc = self._libc, None
        if libc is None:
            return
        FreedMemory._open -= 1
        if not FreedMemory._open:
            libc.mallopt(_M_MMAP_THRESHOLD, _said("MALLOC_MMAP_THRESHOLD_", _GROWN_MMAP))
            libc.mallopt(_M_TRIM_THRESHOLD, _said("MALLOC_TRIM_THRESHOLD_", _GROWN_TRIM))


def trim_heaps() -> None:
    """Gives back what is freed already, where malloc is glibc's."""
    if not _reason():
        ctypes.CDLL(None).malloc_trim(0)


def _said(name: str, default: int) -> int:
    """What glibc's variable says, if it is one that glibc would have understood."""
    text = os.environ.get(name, "")
    return min(int(text), (1 << 31) - 1) if text.isdecimal() else default


def _reason() -> str:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        version = None
    if not version or not version.startswith("glibc"):
        return "freed memory stays in the process's heaps: only glibc's malloc is told to free it"
    preloaded = os.environ.get("LD_PRELOAD", "")
    for other in ("jemalloc", "tcmalloc", "mimalloc"):
        if other in preloaded:
            return f"freed memory goes back as {other} likes: only glibc's malloc is told to"
    return ""
