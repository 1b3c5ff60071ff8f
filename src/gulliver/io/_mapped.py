"""Memory that is a file: where it lies, and how its pages go back to the system."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

PAGEOUT = 21
"""`MADV_PAGEOUT` of Linux 5.4 and later."""


# [Note: mapped files] State that does not fit into memory lies in files that are mapped: a page is
# read when it is touched, and stays until the system needs the room. Whoever goes once through a
# file larger than memory would push out what is used all the time, and under a limit of the system
# have it made room for page by page. So what has been gone through is given back (`MADV_PAGEOUT`),
# which writes what was changed and loses nothing; `MADV_DONTNEED` would empty memory that is no
# file.
class FileMappings:
    """Files that are mapped into this process, as the system tells it now."""

    def __init__(self, maps: str = "/proc/self/maps") -> None:
        self._begins: list[int] = []
        self._stops: list[int] = []
        try:
            lines = Path(maps).read_text(errors="replace").splitlines()
        except OSError:
            return  # no Linux: nothing is known to be a file
        for line in lines:
            # Libraries are mapped privately; shared memory without a file is /dev/zero or /dev/shm.
            if "s " not in line[:50] or " /" not in line or " /dev/" in line:
                continue
            begin, stop = (int(edge, 16) for edge in line.split(maxsplit=1)[0].split("-"))
            self._begins.append(begin)
            self._stops.append(stop)

    def hold(self, address: int, nbytes: int) -> bool:
        """Whether memory is that of a file."""
        number = bisect_right(self._begins, address) - 1
        return number >= 0 and 0 < nbytes <= self._stops[number] - address

    def let_go(self, address: int, nbytes: int) -> None:
        """Gives the whole pages of memory back to the system, where they are a file's."""
        # It is advice: where the system does not take it nothing happens.
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if size > 0 and self.hold(address, nbytes):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), PAGEOUT)
