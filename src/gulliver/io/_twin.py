"""The engine in pure Python: what the native one is held against, and what runs without it.

Read `_engine` first. One lock guards everything that is shared; the conditions on it are `_to_copy`
(copiers sleep there), `_to_move` (I/O threads), `_room` (callers, while the queue is full) and
`_quiet` (whoever closes a file or the engine). System calls and copies run without it.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import itertools
import logging
import mmap
import os
import stat
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError
from gulliver.io._engine import (
    BLOCK,
    NO_VIEWS,
    SLICE,
    Auto,
    Call,
    Counters,
    Engine,
    File,
    IoError,
    Page,
    Ticket,
    View,
    check_injection,
    check_process,
    check_range,
    check_segments,
    check_sizes,
    check_views,
)

Result = TypeVar("Result")
Kind = Literal["write", "read", "fsync", "prefetch"]
ACTIONS: dict[Kind, str] = {
    "write": "write",
    "read": "read",
    "fsync": "force to the disk",
    "prefetch": "read",
}


class TwinTicket(Ticket):
    """Two events, an error and a checksum."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._copied = threading.Event()
        self._done = threading.Event()
        self._error: IoError | None = None
        self._checksum: int | None = None

    @property
    def copied(self) -> bool:
        return self._copied.is_set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def checksum(self) -> int | None:
        return self._checksum

    def wait_copied(self, timeout: float | None = None) -> None:
        check_process(self._process)
        if not self._copied.wait(timeout):
            raise TimeoutError(f"not copied within {timeout:g} s")

    def wait(self, timeout: float | None = None) -> None:
        check_process(self._process)
        if not self._done.wait(timeout):
            raise TimeoutError(f"not done within {timeout:g} s")
        if self._error is not None:
            raise self._error.again()

    def _finish(self, error: IoError | None) -> None:
        self._error = error
        self._copied.set()
        self._done.set()


class TwinFile(File):
    """Its descriptors, and what is under way on it (under the engine's lock)."""

    def __init__(
        self, owner: Engine, path: Path, nbytes: int, buffered: int, direct: int | None
    ) -> None:
        self.owner = owner
        self.path = path
        self.nbytes = nbytes
        self.buffered = buffered
        self.direct = direct
        self.retired: int | None = None
        self.prefetched = False
        self.closed = False
        self.error: IoError | None = None
        self.pending = 0
        # Numbers of unfinished writes; a dict keeps them in the order of submission.
        self.writes: dict[int, None] = {}
        self.syncs: deque[_Request] = deque()


@dataclass(eq=False)
class _Request:
    """One submission on its way. `cursor` is what has been handed out, `active` who works on it."""

    kind: Kind
    file: TwinFile
    offset: int
    address: int
    nbytes: int
    priority: int
    number: int
    segments: NDArray[np.int64] | None = None
    views: dict[int, View] = field(default_factory=dict)
    page: Page | None = None
    checked: bool = False
    counted: bool = True
    ticket: TwinTicket = field(default_factory=TwinTicket)
    cursor: int = 0
    active: int = 0
    error: IoError | None = None

    def __lt__(self, other: _Request | _Wanted) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


@dataclass(eq=False)
class _Wanted:
    """Somebody waits for a page to fill."""

    priority: int
    number: int
    page: Page | None = None
    cancelled: bool = False
    granted: threading.Event = field(default_factory=threading.Event)

    def __lt__(self, other: _Request | _Wanted) -> bool:
        return (-self.priority, self.number) < (-other.priority, other.number)


@dataclass(eq=False)
class _Injection:
    """A failure to come: after `skip` more calls, `times` in a row."""

    skip: int
    times: int
    errno: int | None
    short: int | None


class TwinEngine(Engine):
    """The engine with threads of Python."""

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
        io_uring: Auto = "auto",
    ) -> None:
        check_sizes(page_bytes, pages, copiers, writers, queue)
        if io_uring is True:
            raise GulliverError("io_uring needs the native engine")
        self.page_bytes = page_bytes
        self._queue, self._direct = queue, direct
        self._lock = threading.RLock()
        self._to_copy = threading.Condition(self._lock)
        self._to_move = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._memory: list[mmap.mmap] = []
        self._regions: list[tuple[int, int]] = []
        self._pages: list[Page] = []
        self._free: list[Page] = []
        self._lent: set[int] = set()
        self._waiting: list[_Request | _Wanted] = []  # heap: for a page
        self._copies: list[_Request] = []  # heap: have what they need, to be copied or summed
        self._moves: list[_Request] = []  # heap: for the disk
        self._files: set[TwinFile] = set()
        self._pending = 0
        self._counted = 0
        self._held = False
        self._closing = False
        self._closed = False
        self._moved: dict[str, int] = {"write": 0, "read": 0, "direct": 0}
        self._injections: dict[Call, list[_Injection]] = {}
        self._add_pages(pages)
        super().__init__()
        self._threads = [
            threading.Thread(target=work, name=f"gulliver-io-{name}-{number}", daemon=True)
            for name, count, work in (("copy", copiers, self._copy), ("disk", writers, self._move))
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    # The pool

    @property
    def pages(self) -> int:
        return len(self._pages)

    @property
    def regions(self) -> list[tuple[int, int]]:
        return list(self._regions)

    @property
    def counters(self) -> Counters:
        self._check_process()
        with self._lock:
            return Counters(
                self._moved["write"],
                self._moved["read"],
                self._moved["direct"],
                self._pending,
                len(self._free),
            )

    def grow(self, pages: int) -> None:
        self._check_process()
        if pages < 1:
            raise GulliverError(f"pages {pages}: at least 1")
        with self._lock:
            self._check_open()
            self._add_pages(pages)
            self._grant()

    def _add_pages(self, count: int) -> None:
        try:
            memory = mmap.mmap(-1, count * self.page_bytes)
        except (OSError, OverflowError) as error:
            raise GulliverError(
                f"no memory for {count} pages of {self.page_bytes} bytes: {error}"
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        # Touched now: the first use of fresh memory is several times slower than the next.
        ctypes.memset(start, 0, len(memory))
        self._memory.append(memory)
        self._regions.append((start, len(memory)))
        for number in range(count):
            page = Page(len(self._pages), start + number * self.page_bytes, self.page_bytes)
            self._pages.append(page)
            self._free.append(page)

    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        self._check_process()
        with self._lock:
            self._check_open()
            wanted = _Wanted(priority, next(self._numbers))
            heapq.heappush(self._waiting, wanted)
            self._grant()
        try:
            granted = wanted.granted.wait(timeout)
        except BaseException:
            with self._lock:
                wanted.cancelled = True
                if wanted.page is not None:
                    self.release(wanted.page)
            raise
        if not granted:
            with self._lock:
                if wanted.page is None:
                    wanted.cancelled = True
                    self._grant()
                    raise TimeoutError(f"no page was free within {timeout:g} s")
        if wanted.page is None:
            raise GulliverError("the I/O engine was closed while a page was waited for")
        return wanted.page

    def release(self, page: Page) -> None:
        self._check_process()
        with self._lock:
            self._take_back(page)
            self._free.append(page)
            self._grant()

    def _take_back(self, page: Page) -> None:
        if page.index not in self._lent:
            raise GulliverError(f"page {page.index} is not lent to anybody")
        self._lent.remove(page.index)

    def _grant(self) -> None:
        """Hands free pages to who waits for them, in order; the lock is held."""
        while self._waiting and (self._free or getattr(self._waiting[0], "cancelled", False)):
            first = heapq.heappop(self._waiting)
            if isinstance(first, _Wanted):
                if first.cancelled:
                    continue
                first.page = self._free.pop()
                self._lent.add(first.page.index)
                first.granted.set()
            else:
                first.page = self._free.pop()
                heapq.heappush(self._copies, first)
                self._to_copy.notify()

    # Files

    def create(self, path: str | Path, nbytes: int) -> File:
        self._check_process()
        check_range(0, nbytes)
        self._check_open()
        path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        buffered = self._open(path, flags, "create")
        try:
            self._allocate(path, buffered, nbytes)
            direct = self._open_direct(path, os.O_RDWR)
        except BaseException:
            os.close(buffered)
            path.unlink(missing_ok=True)
            raise
        return self._add_file(TwinFile(self, path, nbytes, buffered, direct))

    def open(self, path: str | Path) -> File:
        self._check_process()
        self._check_open()
        path = Path(path)
        buffered = self._open(path, os.O_RDONLY | os.O_CLOEXEC, "open")
        try:
            status = os.fstat(buffered)
            if stat.S_ISDIR(status.st_mode):
                raise IoError("open", path, None, errno.EISDIR)
            direct = self._open_direct(path, os.O_RDONLY)
        except BaseException:
            os.close(buffered)
            raise
        return self._add_file(TwinFile(self, path, status.st_size, buffered, direct))

    def _open(self, path: Path, flags: int, action: str) -> int:
        def call() -> int:
            self._fail("open")
            return os.open(path, flags, 0o666)

        return _retried(call, action, path)

    def _open_direct(self, path: Path, flags: int) -> int | None:
        """A second descriptor past the page cache, where the file system allows it."""
        if self._direct is False or not hasattr(os, "O_DIRECT"):
            return None
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return None

    def _allocate(self, path: Path, handle: int, nbytes: int) -> None:
        """Reserves the space: a full disk is found before hours of writing, not after."""
        if not nbytes:
            return

        def reserve() -> None:
            self._fail("fallocate")
            _fallocate(handle, nbytes)

        def truncate() -> None:
            self._fail("truncate")
            os.ftruncate(handle, nbytes)

        try:
            _retried(reserve, "reserve space for", path)
        except IoError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _retried(truncate, "set the size of", path)

    def _add_file(self, file: TwinFile) -> TwinFile:
        with self._lock:
            self._files.add(file)
        return file

    def close_file(self, file: File) -> None:
        self._check_process()
        file = self._of(file)
        with self._lock:
            if file.closed:
                return
            file.closed = True
            while file.pending:
                self._quiet.wait()
            self._files.discard(file)
        self._close_handles(file)

    def _close_handles(self, file: TwinFile) -> None:
        late: OSError | None = None
        for handle in (file.direct, file.retired, file.buffered):
            try:
                if handle is not None:
                    os.close(handle)
            except OSError as error:
                late = error
        if late is not None:
            raise IoError("close", file.path, None, late.errno or errno.EIO) from late

    # Submitting

    def stage(
        self,
        file: File,
        offset: int,
        segments: NDArray[np.int64],
        *,
        priority: int = 0,
        views: Mapping[int, View] = NO_VIEWS,
    ) -> Ticket:
        table = check_segments(segments, self.page_bytes)
        check_views(table, views)
        total = int(table[:, 1].sum())
        request = self._request("write", file, offset, 0, total, priority)
        # A copy: the caller may use his table for the next page.
        request.segments, request.views = table.copy(), dict(views)
        return self._submit(request, self._waiting if total else None)

    def write_page(
        self, file: File, offset: int, page: Page, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        if not 0 <= nbytes <= page.nbytes:
            raise GulliverError(f"{nbytes} bytes of a page of {page.nbytes}")
        request = self._request("write", file, offset, page.address, nbytes, priority)
        request.page = page
        # Never waits: those in the queue may wait for this very page.
        request.counted = False
        with self._lock:
            self._check_open(request.file)
            self._take_back(page)
            return self._submit(request, self._copies)

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
        request = self._request("read", file, offset, address, nbytes, priority)
        request.checked = checksum
        return self._submit(request, self._moves if nbytes else None)

    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        request = self._request("write", file, offset, address, nbytes, priority)
        return self._submit(request, self._moves if nbytes else None)

    def prefetch(self, file: File, offset: int, nbytes: int) -> None:
        request = self._request("prefetch", file, offset, 0, nbytes, 0)
        with self._lock:
            self._check_open(request.file)
            request.file.prefetched = True
            # A hint: where there is no room, it is dropped.
            if self._counted < self._queue and nbytes and hasattr(os, "posix_fadvise"):
                self._submit(request, self._moves)

    def sync(self, file: File) -> Ticket:
        return self._submit(self._request("fsync", file, 0, 0, 0, 0), self._moves)

    def _request(
        self, kind: Kind, file: File, offset: int, address: int, nbytes: int, priority: int
    ) -> _Request:
        self._check_process()
        check_range(offset, nbytes)
        return _Request(kind, self._of(file), offset, address, nbytes, priority, -1)

    def _of(self, file: File) -> TwinFile:
        if not isinstance(file, TwinFile) or file.owner is not self:
            raise GulliverError(f"{file} was not opened by this I/O engine")
        return file

    def _submit(self, request: _Request, line: list | None) -> Ticket:
        """Puts a request into a line; None: it moves nothing, and is done."""
        file = request.file
        with self._lock:
            self._check_open(file)
            while request.counted and self._counted >= self._queue:
                self._room.wait()
                self._check_open(file)
            if line is None:
                request.ticket._checksum = 0 if request.segments is not None else None
                if request.checked:
                    request.ticket._checksum = 0
                request.ticket._finish(None)
                return request.ticket
            request.number = next(self._numbers)
            self._pending += 1
            self._counted += request.counted
            file.pending += 1
            if request.kind == "fsync" and file.writes:
                file.syncs.append(request)
                return request.ticket
            if request.kind == "write":
                file.writes[request.number] = None
            heapq.heappush(line, request)
            if line is self._moves:
                self._to_move.notify()
            elif line is self._copies:
                self._to_copy.notify()
            else:
                self._grant()
        return request.ticket

    def _check_open(self, file: TwinFile | None = None) -> None:
        if self._closing:
            raise GulliverError("this I/O engine is closed")
        if file is not None and file.closed:
            raise GulliverError(f"{file.path} is closed")

    # Copiers

    def _copy(self) -> None:
        while True:
            with self._lock:
                while not self._copies:
                    if self._closed:
                        return
                    self._to_copy.wait()
                request = heapq.heappop(self._copies)
            if request.kind == "read":
                request.ticket._checksum = zlib.crc32(_view(request.address, request.nbytes))
                with self._lock:
                    self._finish(request)
                continue
            assert request.page is not None
            if request.segments is not None:
                request.address = target = request.page.address
                for number, (address, nbytes) in enumerate(request.segments.tolist()):
                    if number in request.views:
                        _copy_view(target, request.views[number], address, nbytes)
                    else:
                        ctypes.memmove(target, address, nbytes)
                    target += nbytes
                request.segments = None
            request.ticket._checksum = zlib.crc32(_view(request.address, request.nbytes))
            request.ticket._copied.set()
            with self._lock:
                if request.nbytes:
                    heapq.heappush(self._moves, request)
                    self._to_move.notify()
                else:
                    self._finish(request)

    # Disk

    def _move(self) -> None:
        while True:
            with self._lock:
                while not self._moves or self._held:
                    if self._closed:
                        return
                    self._to_move.wait()
                request = heapq.heappop(self._moves)
                offset = request.cursor
                nbytes = min(SLICE, request.nbytes - offset)
                request.cursor += nbytes
                request.active += 1
                if request.cursor < request.nbytes and request.kind != "prefetch":
                    # The rest of a large one is for the next thread.
                    heapq.heappush(self._moves, request)
                    self._to_move.notify()
            error = self._work(request, offset, nbytes)
            with self._lock:
                request.active -= 1
                if error is not None and request.error is None:
                    request.error = error
                whole = request.cursor >= request.nbytes or request.kind == "prefetch"
                if request.active == 0 and whole:
                    self._moved_all(request)

    def _work(self, request: _Request, offset: int, nbytes: int) -> IoError | None:
        try:
            if request.kind == "prefetch":
                place = (request.offset, request.nbytes, os.POSIX_FADV_WILLNEED)
                os.posix_fadvise(request.file.buffered, *place)
            elif request.kind == "fsync":
                if request.file.error is not None:
                    return request.file.error
                self._fsync(request.file)
            elif request.error is None:
                self._transfer(request, request.offset + offset, request.address + offset, nbytes)
        except IoError as error:
            return error
        except OSError as error:
            if request.kind == "prefetch":
                return None
            number = error.errno or errno.EIO
            return IoError(ACTIONS[request.kind], request.file.path, request.offset, number)
        except Exception:
            # Whatever it is: a thread that ended here would leave everybody waiting.
            logging.getLogger("gulliver").exception("an I/O thread failed")
            return IoError(ACTIONS[request.kind], request.file.path, request.offset, errno.EIO)
        return None

    def _fsync(self, file: TwinFile) -> None:
        def call() -> None:
            self._fail("fsync")
            os.fsync(file.buffered)

        _retried(call, ACTIONS["fsync"], file.path)

    def _transfer(self, request: _Request, offset: int, address: int, nbytes: int) -> None:
        """Moves a slice; what the system leaves out is asked for again."""
        file, kind = request.file, request.kind
        assert kind in ("write", "read")
        while nbytes:
            aligned = offset % BLOCK == 0 and address % BLOCK == 0 and nbytes >= BLOCK
            direct = file.direct if aligned else None
            if kind == "read" and file.prefetched:
                direct = None
            size = nbytes // BLOCK * BLOCK if direct is not None else nbytes
            try:
                short = self._fail(kind)
                if short is not None:
                    direct, size = None, min(size, short)
                handle = file.buffered if direct is None else direct
                view = _view(address, size)
                if kind == "write":
                    moved = os.pwrite(handle, view, offset)
                else:
                    moved = os.preadv(handle, [view], offset)
            except InterruptedError:
                continue
            except OSError as error:
                if direct is not None and error.errno == errno.EINVAL:
                    # This file system wants other alignments: from now on through the page cache.
                    self._give_up_direct(file)
                    continue
                number = error.errno or errno.EIO
                raise IoError(ACTIONS[kind], file.path, offset, number) from error
            if moved == 0:
                number = errno.EIO if kind == "write" else errno.ENODATA
                raise IoError(ACTIONS[kind], file.path, offset, number)
            offset, address, nbytes = offset + moved, address + moved, nbytes - moved
            with self._lock:
                self._moved[kind] += moved
                self._moved["direct"] += moved if direct is not None else 0

    def _give_up_direct(self, file: TwinFile) -> None:
        """From now on through the page cache; others may be using the descriptor: it stays."""
        with self._lock:
            if file.direct is not None:
                file.retired, file.direct = file.direct, None

    def _moved_all(self, request: _Request) -> None:
        """All slices are through; the lock is held."""
        if request.kind == "read" and request.checked and request.error is None:
            heapq.heappush(self._copies, request)
            self._to_copy.notify()
        else:
            self._finish(request)

    def _finish(self, request: _Request) -> None:
        """Ends a request, and starts what waited for it; the lock is held."""
        file = request.file
        if request.kind == "write":
            del file.writes[request.number]
            if request.error is not None and file.error is None:
                file.error = request.error
        if request.page is not None:
            self._free.append(request.page)
            request.page = None
            self._grant()
        oldest = next(iter(file.writes), None)
        while file.syncs and (oldest is None or file.syncs[0].number < oldest):
            heapq.heappush(self._moves, file.syncs.popleft())
            self._to_move.notify()
        request.ticket._finish(request.error)
        self._pending -= 1
        self._counted -= request.counted
        file.pending -= 1
        self._room.notify_all()
        self._quiet.notify_all()

    # The end

    def close(self) -> None:
        self._check_process()
        with self._lock:
            self._closing = True
            self._held = False
            self._to_move.notify_all()
            self._room.notify_all()
            for wanted in self._waiting:
                if isinstance(wanted, _Wanted):
                    wanted.cancelled = True
                    wanted.granted.set()
            while self._pending:
                self._quiet.wait()
            if self._closed:
                return
            self._closed = True
            self._to_copy.notify_all()
            self._to_move.notify_all()
        for thread in self._threads:
            thread.join()
        for file in list(self._files):
            file.closed = True
            self._close_handles(file)
        self._files.clear()
        # The memory goes when the last array on it does: mmap refuses to close under one.
        self._memory.clear()

    # For tests

    def inject(
        self,
        call: Call,
        nth: int = 1,
        errno: int | None = None,
        short: int | None = None,
        *,
        times: int = 1,
    ) -> None:
        check_injection(call, nth, times)
        with self._lock:
            injections = self._injections.setdefault(call, [])
            injections.append(_Injection(nth - 1, times, errno, short))

    def hold(self, held: bool) -> None:
        with self._lock:
            self._held = held
            self._to_move.notify_all()

    def _fail(self, call: Call) -> int | None:
        """Raises an injected error, or returns an injected number of bytes."""
        if not self._injections:
            return None
        with self._lock:
            hit = None
            for injection in self._injections.get(call, ()):
                if injection.skip:
                    injection.skip -= 1
                elif injection.times and hit is None:
                    injection.times -= 1
                    hit = injection
        if hit is None:
            return None
        if hit.errno is not None:
            raise OSError(hit.errno, os.strerror(hit.errno))
        return hit.short


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _copy_view(target: int, view: View, begin: int, nbytes: int) -> None:
    """Copies bytes of a view, from its byte `begin` on."""
    if not nbytes:
        return
    kind = np.dtype((np.void, view.itemsize))
    spans = zip(view.sizes, view.strides, strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in spans)
    memory = np.frombuffer(_view(view.address, reach * view.itemsize), kind)
    steps = [stride * view.itemsize for stride in view.strides]
    elements = np.lib.stride_tricks.as_strided(memory, view.sizes, steps, writeable=False)
    found = elements.flat[begin // view.itemsize : (begin + nbytes) // view.itemsize]
    np.frombuffer(_view(target, nbytes), kind)[:] = found


def _fallocate(handle: int, nbytes: int) -> None:
    """The system call itself: `os.posix_fallocate` would write zeros where it is not supported."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(handle, 0, 0, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _retried(call: Callable[[], Result], action: str, path: Path) -> Result:
    while True:
        try:
            return call()
        except InterruptedError:
            continue
        except OSError as error:
            raise IoError(action, path, None, error.errno or errno.EIO) from error
