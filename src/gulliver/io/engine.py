"""Arguments, results and argument checks of the I/O engines."""

from __future__ import annotations

import atexit
import ctypes
import errno
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError, check_known

BLOCK = 4096
"""Alignment of pages and direct I/O, in bytes."""
Auto = bool | Literal["auto"]
Call = Literal["open", "fallocate", "write", "read", "fsync", "truncate"]
CALLS: tuple[Call, ...] = ("open", "fallocate", "write", "read", "fsync", "truncate")


class IoError(GulliverError):
    """A file could not be opened, read, written or synced.

    Attributes:
        path: path of the file.
        offset: byte offset of the failed call; None for calls without one (opening, fsync).
        errno: system error number; `errno.ENODATA` if the file is too short.
    """

    def __init__(self, action: str, path: str | Path, offset: int | None, number: int) -> None:
        where = "" if offset is None else f" at byte {offset}"
        reason = "the file is too short" if number == errno.ENODATA else os.strerror(number)
        super().__init__(f"cannot {action} {path}{where}: {reason}")
        self.action = action
        self.path = Path(path)
        self.offset = offset
        self.errno = number

    def __reduce__(self) -> tuple[type[IoError], tuple[str, Path, int | None, int]]:
        return IoError, (self.action, self.path, self.offset, self.errno)

    def again(self) -> IoError:
        """Returns a copy, so that several threads can raise the error with their own tracebacks."""
        return IoError(self.action, self.path, self.offset, self.errno)


class File:
    """Handle of a file opened by an engine; only that engine accepts it."""

    # Path that it was opened with.
    path: Path
    # Size when it was opened, or the size given to `create`.
    nbytes: int


@dataclass(frozen=True)
class StridedView:
    """Non-contiguous elements in memory, in the row-major order of `sizes`.

    Attributes:
        address: address of the first element.
        itemsize: bytes per element.
        sizes: size of each dim, in elements.
        strides: stride of each dim, in elements.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Page:
    """A page of the pool, returned by `Engine.acquire`.

    Attributes:
        index: index of the page in the pool.
        address: address of its first byte, a multiple of 4096.
        nbytes: size of the page.
    """

    index: int
    address: int
    nbytes: int

    @property
    def array(self) -> NDArray[np.uint8]:
        """The page's memory, (nbytes,); valid until the page is written or released."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


@dataclass(frozen=True)
class Counters:
    """Totals of an engine since it was created."""

    written: int
    read: int
    # Bytes written and read with direct I/O.
    direct: int
    # Number of requests queued or in flight.
    pending: int
    # Number of free pages.
    free_pages: int


@dataclass(frozen=True)
class Request:
    """A request submitted to an engine."""

    # Operation; `page` writes an acquired page.
    kind: Literal["stage", "page", "write", "read", "sync"]
    # File to read, write or sync.
    file: File
    # Byte offset in the file.
    offset: int = 0
    # First byte in memory; staged requests get their page later.
    address: int = 0
    # Number of bytes.
    nbytes: int = 0
    # Priority; higher goes first.
    priority: int = 0
    # Table (n, 2): address and bytes of the staged segments.
    table: NDArray[np.int64] | None = None
    # Views of non-contiguous segments, by segment index.
    views: Mapping[int, StridedView] = field(default_factory=dict)
    # Acquired page to write.
    page: Page | None = None
    # Whether to compute a checksum of the data read.
    checksum: bool = False


def check_process(owner: int) -> None:
    if os.getpid() != owner:
        raise GulliverError(
            "this I/O engine belongs to the parent process, whose threads do not exist here; "
            "create another one after forking"
        )


def check_segments(segments: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    table = np.ascontiguousarray(segments, dtype=np.int64).reshape(-1, 2)
    # In floating point: a sum of 64-bit integers could wrap around.
    if len(table) and (table[:, 1].min() < 0 or table[:, 1].sum(dtype=np.float64) > page_bytes):
        raise GulliverError(
            f"segments of {table[:, 1].tolist()} bytes do not fit into a page of {page_bytes} bytes"
        )
    return table


def check_sizes(page_bytes: int, **counts: int) -> None:
    if page_bytes < BLOCK or page_bytes % BLOCK:
        raise GulliverError(f"page_bytes={page_bytes} must be a positive multiple of {BLOCK}")
    for name, value in counts.items():
        if value < 1:
            raise GulliverError(f"{name}={value} must be at least 1")


# The engine interface: moves bytes between memory and files in background threads.
#
# Requests are submitted as (address, bytes, file, offset) and complete with the two events of a
# `Ticket`: `copied`, when the source may be reused, and `done`, when the bytes have been handed to
# the file. Two implementations share this interface: `NativeEngine` (C++, never holds the GIL) and
# `PythonEngine` (small; used if no compiler was available). `default_engine` picks one.
#
# Staged data goes through a pool of aligned pages::
#
#     stage(segments)     waits for a page -> gather, checksum -> COPIED -> I/O queue -> DONE
#     acquire, fill it, write_page(page)   -> checksum         -> COPIED -> I/O queue -> DONE
#     read, write         straight between the file and the caller's memory   -> I/O queue -> DONE
#     sync(file)          waits for the writes submitted before it on that file -> I/O queue -> DONE
#
# Addresses are not checked: the caller keeps its memory alive until `copied` (staging) or `done`
# (reading, writing).


NO_VIEWS: Mapping[int, StridedView] = MappingProxyType({})
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Ticket(ABC):
    """Handle of a submitted request."""

    def __init__(self, process: int) -> None:
        self._process = process

    @property
    @abstractmethod
    def copied(self) -> bool:
        """Whether the source may be reused; same as `done` for `read`, `write` and `sync`."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the request has completed or failed."""

    @property
    @abstractmethod
    def checksum(self) -> int | None:
        """CRC-32 of the bytes, as `zlib.crc32` computes it; None if pending or not requested."""

    def wait_copied(self, timeout: float | None = None) -> None:
        """Waits until the source may be reused; also returns if the request failed."""
        check_process(self._process)
        if not self._wait_copied(timeout):
            raise TimeoutError(f"the source was not copied within {timeout:g} s")

    def wait(self, timeout: float | None = None) -> None:
        check_process(self._process)
        if not self._wait_done(timeout):
            raise TimeoutError(f"the request did not complete within {timeout:g} s")
        failure = self._failure()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # the traceback holds this frame, and so the callers' variables

    @abstractmethod
    def _wait_copied(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def _wait_done(self, timeout: float | None) -> bool: ...

    @abstractmethod
    def _failure(self) -> IoError | None:
        """Returns a new error on each call, because several threads may raise it."""


class Engine(ABC):
    """Moves bytes between memory and files; all methods are thread-safe.

    Queued requests are served by priority, then by age. Arguments are validated here;
    implementations override the methods that begin with an underscore.

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
        """Number of pages in the pool."""

    @property
    @abstractmethod
    def regions(self) -> list[tuple[int, int]]:
        """The pool's memory as (address, bytes): one region at first, one more per `grow`."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """Returns a snapshot of the counters."""

    def grow(self, pages: int) -> None:
        """Adds pages to the pool; their memory is committed before it returns.

        Raises:
            GulliverError: there is not enough memory.
        """
        self._check_process()
        if pages < 1:
            raise GulliverError(f"pages={pages} must be at least 1")
        self._grow(pages)

    def create(self, path: str | Path, nbytes: int) -> File:
        """Creates a file for writing and reading, and preallocates `nbytes` if the file system can.

        Raises:
            IoError: the file exists, the disk is full (no file is left behind), or another system
                error occurred.
        """
        self._check_process()
        return self._create(Path(path), nbytes)

    def open(self, path: str | Path) -> File:
        """Opens a file for reading.

        Raises:
            IoError: the file does not exist, is a folder, or another system error occurred.
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
        """Gathers segments of memory into a page and writes the page.

        Blocks only while `queue` requests are in flight; it does not wait for a page or the disk.

        Args:
            file: file to write to.
            offset: byte offset in the file; multiples of 4096 allow direct I/O.
            segments: table (n, 2) of addresses and byte counts; the total is at most a page.
            priority: higher values are served first.
            views: non-contiguous segments, by row of the table. The table has the position of such
                a segment's first byte in the view instead of an address.

        Returns:
            A ticket; once it is `copied`, the segments may change and the checksum is known.

        Raises:
            GulliverError: the segments exceed a page, or the file or engine is closed.
        """
        self._check_process()
        table = check_segments(segments, self.page_bytes)
        total = int(table[:, 1].sum())
        # Copied: the caller may reuse the table for the next page.
        request = Request("stage", file, offset, 0, total, priority, table.copy(), dict(views))
        return self._submit(request)

    def copy_now(self, tickets: Iterable[Ticket]) -> None:
        """Copies staged segments in the calling thread, unless copying has begun."""
        return  # for engines without threads that copy

    @abstractmethod
    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        """Acquires a page for the caller to fill; return it with `write_page` or `release`.

        Waits in the same priority queue as staged requests.

        Raises:
            TimeoutError: no page became free in time.
        """

    def write_page(
        self, file: File, offset: int, page: Page, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes the first bytes of an acquired page and returns the page to the pool.

        Returns:
            A ticket; it is `copied` once its checksum is known.
        """
        self._check_process()
        if nbytes > page.nbytes:
            raise GulliverError(f"{nbytes} bytes exceed the page of {page.nbytes} bytes")
        request = Request("page", file, offset, page.address, nbytes, priority, page=page)
        return self._submit(request)

    @abstractmethod
    def release(self, page: Page) -> None:
        """Returns an acquired page to the pool without writing it."""

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
        """Reads directly into memory.

        Uses direct I/O if offset and address are multiples of 4096 and the file was not prefetched.
        Reading past the end of the file raises an error.
        """
        self._check_process()
        request = Request("read", file, offset, address, nbytes, priority, checksum=checksum)
        return self._submit(request)

    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        """Writes directly from memory, which must not change until the ticket is `done`."""
        self._check_process()
        return self._submit(Request("write", file, offset, address, nbytes, priority))

    def prefetch(self, file: File, offset: int, nbytes: int) -> None:
        """Asks the system to read ahead; later reads of this file use the page cache."""
        self._check_process()
        self._prefetch(file, offset, nbytes)

    def sync(self, file: File) -> Ticket:
        """Syncs a file to disk after all previously submitted writes.

        Also fails if any earlier write to the file failed, so waiting for the sync alone is enough.
        """
        self._check_process()
        return self._submit(Request("sync", file))

    @abstractmethod
    def close_file(self, file: File) -> None:
        """Closes a file after its pending requests; may be called twice.

        Raises:
            IoError: the system reports a deferred write failure.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes all submitted requests, stops the threads and frees the pool.

        Engines still open at interpreter exit are closed then. No acquired page may be in use.
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
        """Injects failures into future system calls, for tests.

        Args:
            call: kind of system call.
            nth: first call to fail; 1 is the next.
            errno: error number to fail with.
            short: maximum number of bytes to transfer, instead of an error.
            times: number of consecutive calls that fail.
        """
        check_known("call", call, CALLS)
        if nth < 1 or times < 1:
            raise GulliverError("nth and times must be at least 1")
        self._inject(call, nth, errno, short, times)

    @abstractmethod
    def hold(self, held: bool) -> None:
        """Blocks reads, writes and syncs while `held`, like a hanging disk; for tests."""

    @abstractmethod
    def _grow(self, pages: int) -> None: ...

    @abstractmethod
    def _create(self, path: Path, nbytes: int) -> File: ...

    @abstractmethod
    def _open(self, path: Path) -> File: ...

    @abstractmethod
    def _submit(self, request: Request) -> Ticket:
        """Submits a validated request; blocks while the queue is full."""

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
        check_process(self._process)


@atexit.register
def _finish_all() -> None:
    for engine in list(_open_engines):
        if engine._process == os.getpid():
            engine.close()
