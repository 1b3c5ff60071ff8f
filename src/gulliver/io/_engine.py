"""The engine's interface: bytes between memory and files, moved by threads of its own.

Submitted as (address, bytes, file, offset), completed as the two events of a `Ticket`: `copied`,
when the source may change again, and `done`, when the bytes have been handed to the file. Two
implementations take the same calls: `NativeEngine` (C++, never touches the GIL) and `TwinEngine`
(Python; its oracle, and what runs where no compiler was). `_default` chooses.

What is staged goes through a pool of aligned pages::

    stage(segments)     waits for a page -> copier: gather, checksum -> COPIED -> I/O queue -> DONE
    acquire, fill it, write_page(page)   -> copier: checksum         -> COPIED -> I/O queue -> DONE
    read, write         straight between the file and the caller's memory      -> I/O queue -> DONE
    sync(file)          waits for the writes submitted before it on that file  -> I/O queue -> DONE

Nothing here knows what the bytes mean. Addresses are believed: whoever submits one keeps its memory
alive until `copied` (staging) or `done` (reading, writing).
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError, nearest

BLOCK = 4096
"""Bytes: alignment of pages, and of whatever goes past the page cache."""
SLICE = 8 * 2**20
"""Bytes that one system call moves at most: large requests are shared among the I/O threads."""
Auto = bool | Literal["auto"]
Call = Literal["open", "fallocate", "write", "read", "fsync", "truncate"]
CALLS: tuple[Call, ...] = ("open", "fallocate", "write", "read", "fsync", "truncate")


class IoError(GulliverError):
    """A file could not be opened, written, read or forced to the disk.

    Attributes:
        path: the file.
        offset: byte at which it failed; None where the call has none (opening, fsync).
        errno: of the system; `errno.ENODATA` where a file ended early.
    """

    def __init__(self, action: str, path: str | Path, offset: int | None, number: int) -> None:
        where = "" if offset is None else f" at byte {offset}"
        reason = "the file ends there" if number == errno.ENODATA else os.strerror(number)
        super().__init__(f"cannot {action} {path}{where}: {reason}")
        self.action = action
        self.path = Path(path)
        self.offset = offset
        self.errno = number

    def __reduce__(self) -> tuple[type[IoError], tuple[str, Path, int | None, int]]:
        return IoError, (self.action, self.path, self.offset, self.errno)

    def again(self) -> IoError:
        """A copy to raise: one failure may be waited for by several threads."""
        return IoError(self.action, self.path, self.offset, self.errno)


class File:
    """A file that an engine has open; only that engine takes it.

    Attributes:
        path: as it was opened.
        nbytes: its size when it was opened, or what was asked of `create`.
    """

    path: Path
    nbytes: int


@dataclass(frozen=True)
class View:
    """Elements that lie apart in memory, one behind the other in the row-major order of `sizes`.

    Attributes:
        address: of the first.
        itemsize: bytes of an element.
        sizes: of the dims.
        strides: elements from one to the next, along each dim.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Page:
    """A page of the pool, lent by `Engine.acquire`.

    Attributes:
        index: its number in the pool.
        address: where it begins, a multiple of 4096.
        nbytes: its size.
    """

    index: int
    address: int
    nbytes: int

    @property
    def array(self) -> NDArray[np.uint8]:
        """Its memory, (nbytes,); to be used only until it is written or released."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


@dataclass(frozen=True)
class Counters:
    """What an engine has done so far.

    Attributes:
        written: bytes.
        read: bytes.
        direct: of both together, the bytes that went past the page cache.
        pending: requests under way or waiting.
        free_pages: pages that nobody has.
    """

    written: int
    read: int
    direct: int
    pending: int
    free_pages: int


class Ticket(ABC):
    """One request: whether, and how, it has ended."""

    @property
    @abstractmethod
    def copied(self) -> bool:
        """Whether the source may change again (for `read`, `write` and `sync`: same as `done`)."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, well or not."""

    @property
    @abstractmethod
    def checksum(self) -> int | None:
        """CRC-32 of the bytes as `zlib.crc32`; None until known, or where none was asked for."""

    @abstractmethod
    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until the source may change again.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            IoError: the request failed before that.
            TimeoutError: not within the timeout.
        """

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Waits until it has ended.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            IoError: it failed.
            TimeoutError: not within the timeout.
        """


NO_VIEWS: Mapping[int, View] = MappingProxyType({})


class Engine(ABC):
    """Moves bytes between memory and files; every method may be called from any thread.

    Among the requests that wait, the higher priority goes first; within one, the older.

    Attributes:
        kind: ``native io_uring``, ``native threads`` or ``python threads``.
        page_bytes: size of a page.
    """

    kind: str
    page_bytes: int

    def __init__(self) -> None:
        self._process = os.getpid()
        _open_engines.add(self)

    @property
    @abstractmethod
    def pages(self) -> int:
        """Pages in the pool."""

    @property
    @abstractmethod
    def regions(self) -> list[tuple[int, int]]:
        """The pool's memory as (address, bytes): one region at first, one more for each growth."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """What was done so far."""

    @abstractmethod
    def grow(self, pages: int) -> None:
        """Adds pages to the pool, touched before this returns.

        Raises:
            GulliverError: there is no memory for them.
        """

    @abstractmethod
    def create(self, path: str | Path, nbytes: int) -> File:
        """Makes a new file for writing and reading, with space for `nbytes` where that can be had.

        Raises:
            IoError: it exists, or the disk has no room (then no file is left behind), or any other
                refusal of the system.
        """

    @abstractmethod
    def open(self, path: str | Path) -> File:
        """Opens a file for reading.

        Raises:
            IoError: it does not exist, or is a folder, or any other refusal of the system.
        """

    @abstractmethod
    def stage(
        self,
        file: File,
        offset: int,
        segments: NDArray[np.int64],
        *,
        priority: int = 0,
        views: Mapping[int, View] = NO_VIEWS,
    ) -> Ticket:
        """Gathers segments of memory into a page, and writes it.

        Never waits for a page or the disk; only while `queue` requests are under way.

        Args:
            file: to write to.
            offset: byte in the file; multiples of 4096 go past the page cache.
            segments: (n, 2), address and bytes of each; together at most a page.
            priority: the higher goes first.
            views: by the number of a segment: what it is of, where its elements lie apart. Such a
                segment has its first byte in the view in place of an address.

        Returns:
            A ticket with `copied` (the segments may change) and, from then on, a checksum.

        Raises:
            GulliverError: more than a page, a closed file, a closed engine.
        """

    @abstractmethod
    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        """Lends a page to somebody who fills it himself; it comes back by one of the next two.

        Waits in one line with what is staged, by priority.

        Raises:
            TimeoutError: none was free in time.
        """

    @abstractmethod
    def write_page(
        self, file: File, offset: int, page: Page, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes the first bytes of an acquired page, which then returns to the pool.

        Returns:
            A ticket with a checksum; it is `copied` once that is known.
        """

    @abstractmethod
    def release(self, page: Page) -> None:
        """Gives an acquired page back unwritten."""

    @abstractmethod
    def read(
        self,
        file: File,
        offset: int,
        address: int,
        nbytes: int,
        *,
        priority: int = 0,
        checksum: bool = False,
    ) -> Ticket:
        """Reads straight into memory.

        Past the page cache where offset and address are multiples of 4096, unless the file has
        been prefetched. That the file ends early is an error.
        """

    @abstractmethod
    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes straight from memory, which must not change until `done`."""

    @abstractmethod
    def prefetch(self, file: File, offset: int, nbytes: int) -> None:
        """Asks the system to read ahead; from then on this file is read through the page cache."""

    @abstractmethod
    def sync(self, file: File) -> Ticket:
        """Forces a file to the disk, after the writes on it that were submitted before.

        An error of any write on the file, ever, is the error of this.
        """

    @abstractmethod
    def close_file(self, file: File) -> None:
        """Closes a file after what is under way on it; a second time does nothing.

        Raises:
            IoError: the system reports a late failure.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes everything that was submitted, ends the threads, frees the pool.

        At the interpreter's exit it is called for whatever engine is still open. Nobody must have
        an acquired page in use.
        """

    @abstractmethod
    def inject(
        self,
        call: Call,
        nth: int = 1,
        errno: int | None = None,
        short: int | None = None,
        *,
        times: int = 1,
    ) -> None:
        """For tests: makes system calls fail that have not been made yet.

        Args:
            call: which kind.
            nth: the first one to fail, counted from now: 1 is the next.
            errno: what it fails with.
            short: instead, how many bytes it moves at most.
            times: how many in a row.
        """

    @abstractmethod
    def hold(self, held: bool) -> None:
        """For tests: while held, no read, write or sync begins, as on a disk that hangs."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        """Threads do not survive a fork: a child that waited for them would wait for ever."""
        check_process(self._process)


def check_process(owner: int) -> None:
    """Refuses to use an engine, or to wait for its ticket, in another process than its own."""
    if os.getpid() != owner:
        raise GulliverError(
            "this I/O engine belongs to the parent process and has no threads here: make another "
            "one after forking"
        )


def check_range(offset: int, nbytes: int) -> None:
    """Refuses what no file has."""
    if offset < 0 or nbytes < 0:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: neither can be negative")
    if offset + nbytes >= 2**63:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: no file is that large")


def check_segments(segments: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    """Refuses segments that no page can hold.

    Args:
        segments: (n, 2), address and bytes.
        page_bytes: what they may have together.

    Returns:
        The same, contiguous and of 64 bits.
    """
    table = np.ascontiguousarray(segments, dtype=np.int64)
    if table.size == 0:
        return table.reshape(0, 2)
    if table.ndim != 2 or table.shape[1] != 2:
        raise GulliverError(f"segments have shape {table.shape}: (n, 2), address and bytes")
    if int(table[:, 1].min()) < 0:
        raise GulliverError("a segment has a negative size")
    # Floats: a sum of 64-bit integers could wrap around.
    if float(table[:, 1].sum(dtype=np.float64)) > page_bytes:
        total = sum(table[:, 1].tolist())
        raise GulliverError(f"segments of {total} bytes do not fit a page of {page_bytes}")
    return table


def check_views(table: NDArray[np.int64], views: Mapping[int, View]) -> None:
    """Refuses segments that are not whole elements of their views."""
    for number, view in views.items():
        begin, nbytes = (int(value) for value in table[number])
        if begin % view.itemsize or nbytes % view.itemsize:
            raise GulliverError(f"bytes {begin} to {begin + nbytes} of a view cut its elements")
        if begin < 0 or begin + nbytes > view.nbytes:
            raise GulliverError(f"a view of {view.nbytes} bytes has no byte {begin + nbytes}")


def check_sizes(page_bytes: int, pages: int, copiers: int, writers: int, queue: int) -> None:
    """Refuses an engine that could not work."""
    if page_bytes < BLOCK or page_bytes % BLOCK:
        raise GulliverError(f"page_bytes {page_bytes} is not a positive multiple of {BLOCK}")
    sizes = {"pages": pages, "copiers": copiers, "writers": writers, "queue": queue}
    for name, value in sizes.items():
        if value < 1:
            raise GulliverError(f"{name} {value}: at least 1")


def check_injection(call: Call, nth: int, times: int) -> None:
    """Refuses an injection that would never happen."""
    if call not in CALLS:
        raise GulliverError(f"unknown call {call!r}: {nearest(call, CALLS)}")
    if nth < 1 or times < 1:
        raise GulliverError("injections count from 1")


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """What was submitted is finished before the interpreter ends."""
    for engine in list(_open_engines):
        if engine._process == os.getpid():
            engine.close()
