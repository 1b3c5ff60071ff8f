"""Arguments and results of the I/O engines, and the checks before anything is done."""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError, nearest

BLOCK = 4096
"""Bytes: alignment of pages, and of whatever goes past the page cache."""
Auto = bool | Literal["auto"]
Call = Literal["open", "fallocate", "write", "read", "fsync", "truncate"]
CALLS: tuple[Call, ...] = ("open", "fallocate", "write", "read", "fsync", "truncate")


class IoError(GulliverError):
    """A file could not be opened, written, read or forced to the disk.

    Attributes:
        path: file that it is about.
        offset: byte at which it failed; None where the call has none (opening, fsync).
        errno: error number of the system; `errno.ENODATA` where a file ended early.
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
        """Copies the error: several threads may raise one failure, each with its own traceback."""
        return IoError(self.action, self.path, self.offset, self.errno)


class File:
    """A file that an engine has open; only that engine takes it."""

    # Path that it was opened by.
    path: Path
    # Size when it was opened, or the size that `create` was given.
    nbytes: int


@dataclass(frozen=True)
class StridedView:
    """Elements that lie apart in memory, one behind the other in the row-major order of `sizes`.

    Attributes:
        address: address of the first element.
        itemsize: bytes of an element.
        sizes: size of each dim, in elements.
        strides: stride of each dim, in elements.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Page:
    """A page of the pool, lent by `Engine.acquire`.

    Attributes:
        index: number of the page in the pool.
        address: address of its first byte, a multiple of 4096.
        nbytes: size of the page.
    """

    index: int
    address: int
    nbytes: int

    @property
    def array(self) -> NDArray[np.uint8]:
        """The page's memory, (nbytes,); to be used only until it is written or released."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


@dataclass(frozen=True)
class Counters:
    """Counts of what an engine has done so far."""

    written: int
    read: int
    # Bytes, written and read, that went past the page cache.
    direct: int
    # Number of requests in flight or waiting.
    pending: int
    # Number of pages that nobody has.
    free_pages: int


@dataclass(frozen=True)
class Request:
    """A request as it is submitted, to either engine."""

    # Operation; `page` writes an acquired page.
    kind: Literal["stage", "page", "write", "read", "sync"]
    # File to read, write or sync.
    file: File
    # First byte in the file.
    offset: int = 0
    # First byte in memory; of a staged request the page is not known yet.
    address: int = 0
    # Number of bytes.
    nbytes: int = 0
    # Order of service; the higher goes first.
    priority: int = 0
    # Table (n, 2), address and bytes of the segments that are staged.
    table: NDArray[np.int64] | None = None
    # Views of segments whose elements lie apart, by the number of the segment.
    views: Mapping[int, StridedView] = field(default_factory=dict)
    # Acquired page that is written.
    page: Page | None = None
    # Whether what is read is to be summed.
    checksum: bool = False


def check_process(owner: int) -> None:
    """Refuses to use an engine, or to wait for its ticket, in another process than its own."""
    if os.getpid() != owner:
        raise GulliverError(
            "this I/O engine belongs to the parent process and has no threads here: make another "
            "one after forking"
        )


def check_segments(segments: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    """Refuses segments that no page can hold: they would be written over other memory."""
    table = np.ascontiguousarray(segments, dtype=np.int64).reshape(-1, 2)
    # Floats: a sum of 64-bit integers could wrap around.
    if len(table) and (table[:, 1].min() < 0 or table[:, 1].sum(dtype=np.float64) > page_bytes):
        raise GulliverError(f"segments of {table[:, 1].tolist()} bytes do not fit {page_bytes}")
    return table


def check_sizes(page_bytes: int, **counts: int) -> None:
    """Refuses an engine that could not work."""
    if page_bytes < BLOCK or page_bytes % BLOCK:
        raise GulliverError(f"page_bytes {page_bytes} is not a positive multiple of {BLOCK}")
    for name, value in counts.items():
        if value < 1:
            raise GulliverError(f"{name} {value}: at least 1")


# The engine's interface: bytes between memory and files, moved by threads of its own.
#
# Submitted as (address, bytes, file, offset), completed as the two events of a `Ticket`: `copied`,
# when the source may change again, and `done`, when the bytes have been handed to the file. Two
# implementations take the same calls: `NativeEngine` (C++, never touches the GIL) and
# `PythonEngine` (small and plain; what runs where no compiler was). `default_engine` chooses.
#
# What is staged goes through a pool of aligned pages::
#
#     stage(segments)     waits for a page -> gather, checksum -> COPIED -> I/O queue -> DONE
#     acquire, fill it, write_page(page)   -> checksum         -> COPIED -> I/O queue -> DONE
#     read, write         straight between the file and the caller's memory   -> I/O queue -> DONE
#     sync(file)          waits for the writes submitted before it on that file -> I/O queue -> DONE
#
# Nothing here knows what the bytes mean. Addresses are believed: the caller keeps its memory alive
# until `copied` (staging) or `done` (reading, writing).


NO_VIEWS: Mapping[int, StridedView] = MappingProxyType({})
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Ticket(ABC):
    """A handle of one request, which tells whether, and how, it has ended."""

    def __init__(self, process: int) -> None:
        self._process = process

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

    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until the source may change again, which a failed request allows, too."""
        check_process(self._process)
        if not self._wait_copied(timeout):
            raise TimeoutError(f"not copied within {timeout:g} s")

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""
        check_process(self._process)
        if not self._wait_done(timeout):
            raise TimeoutError(f"not done within {timeout:g} s")
        failure = self._failure()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # which holds this frame, and so what its callers have

    @abstractmethod
    def _wait_copied(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def _wait_done(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def _failure(self) -> IoError | None:
        """Returns a new error each time: several threads may raise it."""


class Engine(ABC):
    """Moves bytes between memory and files; every method may be called from any thread.

    Among the requests that wait, the higher priority goes first; within one, the older. Impossible
    arguments are refused here; an implementation has the methods that begin with an underscore.

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
        """Returns what was done so far."""

    def grow(self, pages: int) -> None:
        """Adds pages to the pool, touched before this returns.

        Raises:
            GulliverError: there is no memory for them.
        """
        self._check_process()
        if pages < 1:
            raise GulliverError(f"pages {pages}: at least 1")
        self._grow(pages)

    def create(self, path: str | Path, nbytes: int) -> File:
        """Makes a new file for writing and reading, with space for `nbytes` where that can be had.

        Raises:
            IoError: it exists, or the disk has no room (then no file is left behind), or any other
                refusal of the system.
        """
        self._check_process()
        return self._create(Path(path), nbytes)

    def open(self, path: str | Path) -> File:
        """Opens a file for reading.

        Raises:
            IoError: it does not exist, or is a folder, or any other refusal of the system.
        """
        self._check_process()
        return self._open(Path(path))

    def stage(
        self,
        file: File,
        offset: int,
        segments: NDArray[np.int64],
        *,
        priority: int = 0,
        views: Mapping[int, StridedView] = NO_VIEWS,
    ) -> Ticket:
        """Gathers segments of memory into a page, and writes it.

        Does not wait for a page or the disk, only while `queue` requests are in flight.

        Args:
            file: file to write to.
            offset: byte in the file; multiples of 4096 may go past the page cache.
            segments: table (n, 2), address and bytes of each; together at most a page.
            priority: order of service; the higher goes first.
            views: views of segments whose elements lie apart, by the number of the segment. Such a
                segment has its first byte in the view in place of an address.

        Returns:
            A ticket with `copied` (the segments may change) and, from then on, a checksum.

        Raises:
            GulliverError: more than a page, a closed file, a closed engine.
        """
        self._check_process()
        table = check_segments(segments, self.page_bytes)
        total = int(table[:, 1].sum())
        # Copies: the caller may reuse the table for the next page.
        request = Request("stage", file, offset, 0, total, priority, table.copy(), dict(views))
        return self._submit(request)

    @abstractmethod
    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        """Lends a page for the caller to fill; `write_page` or `release` gives it back.

        Waits in one queue with what is staged, by priority.

        Raises:
            TimeoutError: none was free in time.
        """

    def write_page(
        self, file: File, offset: int, page: Page, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes the first bytes of an acquired page, which then returns to the pool.

        Returns:
            A ticket with a checksum; it is `copied` once that is known.
        """
        self._check_process()
        if nbytes > page.nbytes:
            raise GulliverError(f"{nbytes} bytes of a page of {page.nbytes}")
        request = Request("page", file, offset, page.address, nbytes, priority, page=page)
        return self._submit(request)

    @abstractmethod
    def release(self, page: Page) -> None:
        """Gives an acquired page back unwritten."""

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

        May go past the page cache where offset and address are multiples of 4096, unless the file
        has been prefetched. A file that ends early is an error.
        """
        self._check_process()
        request = Request("read", file, offset, address, nbytes, priority, checksum=checksum)
        return self._submit(request)

    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes straight from memory, which must not change until `done`."""
        self._check_process()
        return self._submit(Request("write", file, offset, address, nbytes, priority))

    def prefetch(self, file: File, offset: int, nbytes: int) -> None:
        """Asks the system to read ahead; from then on this file is read through the page cache."""
        self._check_process()
        self._prefetch(file, offset, nbytes)

    def sync(self, file: File) -> Ticket:
        """Forces a file to the disk, after the writes on it that were submitted before.

        An error of any earlier write on the file is the error of this: who waits for the sync
        alone must not take a broken file for a whole one.
        """
        self._check_process()
        return self._submit(Request("sync", file))

    @abstractmethod
    def close_file(self, file: File) -> None:
        """Closes a file after what is in flight on it; a second time does nothing.

        Raises:
            IoError: the system reports a late failure.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes everything that was submitted, ends the threads, frees the pool.

        At the interpreter's exit it is called for whatever engine is still open. Nobody must have
        an acquired page in use.
        """

    def inject(
        self,
        call: Call,
        nth: int = 1,
        errno: int | None = None,
        short: int | None = None,
        *,
        times: int = 1,
    ) -> None:
        """Makes system calls fail that have not been made yet; for tests.

        Args:
            call: kind of system call.
            nth: first one to fail, counted from now: 1 is the next.
            errno: error number that it fails with.
            short: most bytes that it moves, in place of an error.
            times: number of calls in a row.
        """
        if call not in CALLS:
            raise GulliverError(f"unknown call {call!r}: {nearest(call, CALLS)}")
        if nth < 1 or times < 1:
            raise GulliverError("injections count from 1")
        self._inject(call, nth, errno, short, times)

    @abstractmethod
    def hold(self, held: bool) -> None:
        """Lets no read, write or sync begin while held, as on a disk that hangs; for tests."""

    @abstractmethod
    def _grow(self, pages: int) -> None: ...

    @abstractmethod
    def _create(self, path: Path, nbytes: int) -> File: ...

    @abstractmethod
    def _open(self, path: Path) -> File: ...

    @abstractmethod
    def _submit(self, request: Request) -> Ticket:
        """Takes a request that is known to make sense, and waits for room in the queue."""

    @abstractmethod
    def _prefetch(self, file: File, offset: int, nbytes: int) -> None: ...

    @abstractmethod
    def _inject(
        self, call: Call, nth: int, errno: int | None, short: int | None, times: int
    ) -> None: ...

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        """Refuses a forked child: threads do not survive a fork, and it would wait for ever."""
        check_process(self._process)


@atexit.register
def _finish_all() -> None:
    """Finishes what was submitted before the interpreter ends."""
    for engine in list(_open_engines):
        if engine._process == os.getpid():
            engine.close()
