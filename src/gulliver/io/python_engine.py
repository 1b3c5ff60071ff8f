"""Python implementation of the I/O engine, for machines without the native one.

A request waits in one of two heaps, for a page or for the disk. The thread that frees a page
immediately fills it for the first waiting request; `writers` threads make the system calls. One
condition guards all shared state and is notified of every change. All I/O uses the page cache, and
staged requests get pages before calls to `acquire` do.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import stat
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError
from gulliver.io.engine import (
    Auto,
    Call,
    Counters,
    Engine,
    File,
    IoError,
    Page,
    Request,
    StridedView,
    Ticket,
    check_sizes,
)

UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)


class PythonFile(File):
    """An open file descriptor and its pending requests, guarded by the engine's condition."""

    def __init__(self, owner: Engine, path: Path, handle: int, nbytes: int = 0) -> None:
        self.owner, self.path, self.nbytes, self.handle = owner, path, nbytes, handle
        self.closed, self.pending, self.writing = False, 0, 0
        self.error: IoError | None = None
        self.syncs: list[PythonTicket] = []


class PythonTicket(Ticket):
    """A submitted request."""

    def __init__(self, request: Request, file: PythonFile) -> None:
        super().__init__(os.getpid())
        self.request, self.file = request, file
        self.page, self.address = request.page, request.address
        self.number = self.ahead = 0  # ahead: writes that a sync waits for
        self.is_copied, self.is_done = threading.Event(), threading.Event()
        self.error: IoError | None = None
        self.crc32: int | None = None

    def __lt__(self, other: PythonTicket) -> bool:
        mine, theirs = self.request.priority, other.request.priority
        return (-mine, self.number) < (-theirs, other.number)

    @property
    def copied(self) -> bool:
        return self.is_copied.is_set()

    @property
    def done(self) -> bool:
        return self.is_done.is_set()

    @property
    def checksum(self) -> int | None:
        return self.crc32

    def _wait_copied(self, timeout: float | None) -> bool:
        return self.is_copied.wait(timeout)

    def _wait_done(self, timeout: float | None) -> bool:
        return self.is_done.wait(timeout)

    def _failure(self) -> IoError | None:
        return None if self.error is None else self.error.again()


class PythonEngine(Engine):
    """I/O engine with Python threads; see `NativeEngine` for the arguments."""

    # There are no copier threads: the thread that submits, or frees a page, copies. `direct` and
    # `nice` are not used.

    kind = "python threads"

    def __init__(
        self,
        *,
        page_bytes: int = 4 * 2**20,
        pages: int = 16,
        copiers: int = 2,
        writers: int = 2,
        queue: int = 4096,
        direct: Auto = "auto",
        nice: int = 0,
    ) -> None:
        check_sizes(page_bytes, pages=pages, copiers=copiers, writers=writers, queue=queue)
        self.page_bytes, self._queue = page_bytes, queue
        self._changed, self._numbers = threading.Condition(), itertools.count()
        self._memory: list[mmap.mmap] = []
        self._free: list[Page] = []
        self._lent: set[Page] = set()
        self._for_page: list[PythonTicket] = []  # heaps
        self._for_disk: list[PythonTicket] = []
        self._files: set[PythonFile] = set()
        self._pending, self._moved = 0, Counter[str]()
        self._held = self._closing = self._closed = False
        self._made, self._failures = Counter[Call](), dict[tuple[Call, int], Any]()
        self._grow(pages)
        super().__init__()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(writers)]
        for thread in self._threads:
            thread.start()

    # Page pool

    @property
    def pages(self) -> int:
        return sum(len(memory) for memory in self._memory) // self.page_bytes

    @property
    def regions(self) -> list[tuple[int, int]]:
        return [(_start(memory), len(memory)) for memory in self._memory]

    @property
    def counters(self) -> Counters:
        self._check_process()
        with self._changed:
            moved = self._moved
            return Counters(moved["write"], moved["read"], 0, self._pending, len(self._free))

    def _grow(self, pages: int) -> None:
        size, first = self.page_bytes, self.pages
        with self._changed:
            self._check_open()
            try:
                memory = mmap.mmap(-1, pages * size)
            except (OSError, OverflowError) as error:
                text = f"no memory for {pages} pages of {size} bytes: {error}"
                raise GulliverError(text) from error
            start = _start(memory)
            # Touched now: the first access to fresh memory is several times slower than later ones.
            ctypes.memset(start, 0, len(memory))
            self._memory.append(memory)
            self._free += [Page(first + n, start + n * size, size) for n in range(pages)]
            self._grant()

    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closing, timeout)
            self._check_open()
            if not self._free:
                raise TimeoutError(f"no page was free within {timeout:g} s")
            page = self._free.pop()
            self._lent.add(page)
            return page

    def release(self, page: Page) -> None:
        self._check_process()
        with self._changed:
            self._take_back(page)
            self._free.append(page)
            self._grant()

    def _take_back(self, page: Page) -> None:
        if page not in self._lent:
            raise GulliverError(f"page {page.index} is not acquired")
        self._lent.remove(page)

    def _grant(self) -> None:
        """Fills free pages for waiting requests, in order, and notifies all threads."""
        while self._for_page and self._free:
            ticket = heappop(self._for_page)
            ticket.page = self._free.pop()
            self._fill(ticket, ticket.page)
        self._changed.notify_all()

    def _fill(self, ticket: PythonTicket, page: Page) -> None:
        request, ticket.address = ticket.request, page.address
        if request.table is not None:
            gather_slowly(page.address, request.table, request.views)
        ticket.crc32 = zlib.crc32(memory_at(page.address, request.nbytes))
        ticket.is_copied.set()
        heappush(self._for_disk, ticket)

    # Files

    def _create(self, path: Path, nbytes: int) -> File:
        file = self._opened(path, "create", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._reserve(file, nbytes)
        except BaseException:
            self.close_file(file)
            path.unlink(missing_ok=True)
            raise
        return file

    def _reserve(self, file: PythonFile, nbytes: int) -> None:
        """Preallocates a file, so that a full disk is detected early."""
        handle, file.nbytes = file.handle, nbytes
        try:
            if nbytes:
                what = "reserve space for"
                self._call("fallocate", what, file, lambda _: _fallocate(handle, nbytes))
        except IoError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._call("truncate", "set the size of", file, lambda _: os.ftruncate(handle, nbytes))

    def _open(self, path: Path) -> File:
        file = self._opened(path, "open", os.O_RDONLY)
        status = os.fstat(file.handle)
        if stat.S_ISDIR(status.st_mode):
            self.close_file(file)
            raise IoError("open", path, None, errno.EISDIR)
        file.nbytes = status.st_size
        return file

    def _opened(self, path: Path, action: str, flags: int) -> PythonFile:
        file = PythonFile(self, path, -1)
        with self._changed:
            self._check_open()
            file.handle = self._call("open", action, file, lambda _: os.open(path, flags, 0o666))
            self._files.add(file)
        return file

    def close_file(self, file: File) -> None:
        self._check_process()
        file = self._of(file)
        with self._changed:
            if file.closed:
                return
            file.closed = True
            self._changed.wait_for(lambda: not file.pending)
            self._files.discard(file)
        try:
            os.close(file.handle)
        except OSError as error:
            raise IoError("close", file.path, None, error.errno or errno.EIO) from error

    def _of(self, file: File) -> PythonFile:
        if not isinstance(file, PythonFile) or file.owner is not self:
            raise GulliverError(f"{file} was not opened by this I/O engine")
        return file

    def _check_open(self, file: PythonFile | None = None) -> None:
        if self._closing:
            raise GulliverError("this I/O engine is closed")
        if file is not None and file.closed:
            raise GulliverError(f"{file.path} is closed")

    def _prefetch(self, file: File, offset: int, nbytes: int) -> None:
        self._check_open(self._of(file))  # only a hint; every file is read through the page cache

    # Requests

    def _submit(self, request: Request) -> Ticket:
        file = self._of(request.file)
        ticket = PythonTicket(request, file)
        with self._changed:
            self._check_open(file)
            # The holder of a page must not wait here: the queue may be waiting for this very page.
            while request.page is None and self._pending >= self._queue:
                self._changed.wait()
                self._check_open(file)
            if request.page is not None:
                self._take_back(request.page)
            ticket.number, ticket.ahead = next(self._numbers), file.writing
            self._pending, file.pending = self._pending + 1, file.pending + 1
            file.writing += request.kind in ("stage", "page", "write")
            if request.kind == "sync" and ticket.ahead:
                file.syncs.append(ticket)
            elif request.page is not None:
                self._fill(ticket, request.page)
            else:
                heappush(self._for_page if request.kind == "stage" else self._for_disk, ticket)
            self._grant()
        return ticket

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._for_disk and not self._held) or self._closed)
                if not self._for_disk:
                    return
                ticket = heappop(self._for_disk)
            try:
                self._attempt(ticket)
            except IoError as error:
                ticket.error = error
            except Exception:
                # Any exception: if this thread died, all waiting callers would hang.
                logging.getLogger("gulliver").exception("an I/O thread failed")
                ticket.error = IoError("use", ticket.file.path, None, errno.EIO)
            with self._changed:
                self._finish(ticket)

    def _attempt(self, ticket: PythonTicket) -> None:
        request, file, done = ticket.request, ticket.file, 0
        if request.kind == "sync":
            if file.error is not None:
                raise file.error
            self._call("fsync", "sync", file, lambda _: os.fsync(file.handle))
            return
        call: Call = "read" if request.kind == "read" else "write"

        def move(short: int | None) -> int:
            left = request.nbytes - done
            part = memory_at(ticket.address + done, left if short is None else min(left, short))
            if call == "write":
                return os.pwrite(file.handle, part, request.offset + done)
            return os.preadv(file.handle, [part], request.offset + done)

        while done < request.nbytes:
            moved = self._call(call, call, file, move, request.offset + done)
            if not moved:
                number = errno.EIO if call == "write" else errno.ENODATA
                raise IoError(call, file.path, request.offset + done, number)
            done += moved
        if request.checksum:
            ticket.crc32 = zlib.crc32(memory_at(ticket.address, request.nbytes))
        with self._changed:
            self._moved[call] += done

    def _finish(self, ticket: PythonTicket) -> None:
        file = ticket.file
        if ticket.request.kind in ("stage", "page", "write"):
            file.writing -= 1
            file.error = file.error or ticket.error
            for sync in [sync for sync in file.syncs if sync.number > ticket.number]:
                sync.ahead -= 1
                if not sync.ahead:
                    file.syncs.remove(sync)
                    heappush(self._for_disk, sync)
        if ticket.page is not None:
            self._free.append(ticket.page)
        self._pending, file.pending = self._pending - 1, file.pending - 1
        ticket.is_copied.set()
        ticket.is_done.set()
        self._grant()

    def _call(
        self,
        call: Call,
        action: str,
        file: PythonFile,
        function: Callable[[int | None], Any],
        offset: int | None = None,
    ) -> Any:
        while True:
            try:
                return function(self._injected(call))
            except InterruptedError:
                continue
            except OSError as error:
                raise IoError(action, file.path, offset, error.errno or errno.EIO) from error

    # Shutdown and tests

    def close(self) -> None:
        self._check_process()
        with self._changed:
            self._closing, self._held = True, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending)
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in list(self._files):
            self.close_file(file)
        # The memory is freed with the last array on it: mmap refuses to close while one exists.
        self._memory.clear()

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def _inject(
        self, call: Call, nth: int, errno: int | None, short: int | None, times: int
    ) -> None:
        with self._changed:
            first = self._made[call] + nth
            self._failures |= {(call, first + more): (errno, short) for more in range(times)}

    def _injected(self, call: Call) -> int | None:
        """Raises an injected error, or returns an injected byte limit."""
        with self._changed:
            self._made[call] += 1
            number, short = self._failures.pop((call, self._made[call]), (None, None))
        if number is not None:
            raise OSError(number, os.strerror(number))
        return short


def _start(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _fallocate(handle: int, nbytes: int) -> None:
    """Calls fallocate directly, because `os.posix_fallocate` falls back to writing zeros."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(handle, 0, 0, nbytes):
        raise OSError(number := ctypes.get_errno(), os.strerror(number))


def gather_slowly(target: int, table: NDArray[np.int64], views: Mapping[int, StridedView]) -> None:
    for number, (begin, nbytes) in enumerate(table.tolist()):
        if number in views and nbytes:
            view = views[number]
            found = _elements(view)[begin // view.itemsize : (begin + nbytes) // view.itemsize]
            np.frombuffer(memory_at(target, nbytes), found.dtype)[:] = found
        else:
            ctypes.memmove(target, begin, nbytes)
        target += nbytes


def memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


def _elements(view: StridedView) -> np.flatiter:
    # Opaque elements: numpy has no bfloat16, and a copy only needs their size.
    kind = np.dtype((np.void, view.itemsize))
    spans = zip(view.sizes, view.strides, strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in spans)
    memory = np.frombuffer(memory_at(view.address, reach * view.itemsize), kind)
    steps = [stride * view.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(memory, view.sizes, steps, writeable=False).flat
