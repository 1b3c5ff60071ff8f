"""Python wrapper of the native engine, and the choice between it and the Python engine.

The extension `gulliver.io._core` is built from ``native/`` if a compiler is available. Its calls
release the GIL and wait at most a tenth of a second, so that signals are handled in between.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError, nearest
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
from gulliver.io.python_engine import PythonEngine, gather_slowly

Result = TypeVar("Result")
INTERFACE = 3
"""Version of the extension's interface; incremented on both sides when its calls change."""
HEARING_S = 0.1
"""Longest wait inside the extension before signals are handled, in seconds."""


def native_problem() -> str | None:
    """Returns why the native engine is unavailable; None if it is available."""
    try:
        built = _extension().INTERFACE
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built != INTERFACE:
        return "its extension was built from another version; rebuild it with pip install -e ."
    return None


def _extension() -> Any:
    # By name: type checking must pass if it has not been built.
    return importlib.import_module("gulliver.io._core")


class NativeTicket(Ticket):
    """Ticket backed by the extension."""

    def __init__(self, core: Any, path: Path, process: int) -> None:
        super().__init__(process)
        self._core = core
        self._path = path

    @property
    def copied(self) -> bool:
        return self._core.copied

    @property
    def done(self) -> bool:
        return self._core.done

    @property
    def checksum(self) -> int | None:
        return self._core.checksum

    def _wait_copied(self, timeout: float | None) -> bool:
        return _within(timeout, self._core.wait_copied)

    def _wait_done(self, timeout: float | None) -> bool:
        return _within(timeout, self._core.wait)

    def _failure(self) -> IoError | None:
        failure = self._core.failure
        return None if failure is None else _named(failure, self._path)


class NativeFile(File):
    """File handle of the extension."""

    def __init__(self, core: Any, path: Path, nbytes: int) -> None:
        self.core = core
        self.path = path
        self.nbytes = nbytes


class NativeEngine(Engine):
    """I/O engine with C++ threads; `nice` lowers the priority of copying threads (Linux)."""

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
        nice: int = 0,
    ) -> None:
        check_sizes(page_bytes, pages=pages, copiers=copiers, writers=writers, queue=queue)
        problem = native_problem()
        if problem:
            raise GulliverError(f"the native I/O engine is not available: {problem}")
        with _refusals():
            self._core = _extension().Engine(
                page_bytes,
                pages,
                copiers,
                writers,
                queue,
                direct is not False,
                io_uring is not False,
                nice,
            )
        self.page_bytes = page_bytes
        self.kind = self._core.kind
        if io_uring is True and self.ring_problem:
            self._core.stop()
            raise GulliverError(f"io_uring is not available: {self.ring_problem}")
        super().__init__()

    @property
    def ring_problem(self) -> str:
        """Why io_uring is not used; empty if it is."""
        number = self._core.ring_errno
        if number == 0:
            return ""
        return "not requested" if number < 0 else os.strerror(number)

    @property
    def pages(self) -> int:
        self._check_process()
        return self._core.pages

    @property
    def regions(self) -> list[tuple[int, int]]:
        self._check_process()
        return self._core.regions

    @property
    def counters(self) -> Counters:
        self._check_process()
        return Counters(*self._core.counters)

    def _grow(self, pages: int) -> None:
        with _refusals():
            self._core.grow(pages)

    # Files

    def _create(self, path: Path, nbytes: int) -> File:
        return self._opened(path, self._core.create, nbytes)

    def _open(self, path: Path) -> File:
        return self._opened(path, self._core.open)

    def _opened(self, path: Path, call: Callable[..., Any], *size: int) -> File:
        with _refusals():
            core, nbytes, failure = call(os.fsencode(path), *size)
        if failure is not None:
            raise _named(failure, path)
        return NativeFile(core, path, nbytes)

    def close_file(self, file: File) -> None:
        core = self._of(file).core
        _within(None, lambda seconds: self._core.quiet(core, seconds))
        number = self._core.close_file(core)
        if number:
            raise IoError("close", file.path, None, number)

    # Submitting

    def acquire(self, timeout: float | None = None, *, priority: int = 0) -> Page:
        self._check_process()
        with _refusals():
            wanted = self._core.want(priority)
            try:
                if not _within(timeout, wanted.wait):
                    index, address = self._core.give_up(wanted)
                    if index < 0:
                        raise TimeoutError(f"no page was free within {timeout:g} s")
                    return Page(index, address, self.page_bytes)
            except KeyboardInterrupt:
                index, _ = self._core.give_up(wanted)
                if index >= 0:
                    self._core.release(index)
                raise
            index, address = wanted.page
        if index < 0:
            raise GulliverError("the I/O engine was closed while waiting for a page")
        return Page(index, address, self.page_bytes)

    def release(self, page: Page) -> None:
        self._check_process()
        with _refusals():
            self._core.release(page.index)

    def _prefetch(self, file: File, offset: int, nbytes: int) -> None:
        core = self._of(file).core
        with _refusals():
            self._core.prefetch(core, offset, nbytes)

    def _submit(self, request: Request) -> Ticket:
        core = self._of(request.file).core
        call = self._call(request, core)
        with _refusals():
            while (ticket := call()) is None:
                self._core.wait_room(HEARING_S)
        return NativeTicket(ticket, request.file.path, self._process)

    def copy_now(self, tickets: Iterable[Ticket]) -> None:
        self._check_process()
        for ticket in tickets:
            if isinstance(ticket, NativeTicket) and not ticket.copied:
                self._core.copy_now(ticket._core)

    def _call(self, request: Request, core: Any) -> Callable[[], Any]:
        """Returns a function that submits the request; it returns None while the queue is full."""
        r, ours = request, self._core
        match r.kind:
            case "stage":
                views = [(number, _view(view)) for number, view in r.views.items()]
                return lambda: ours.stage(core, r.offset, r.table, r.priority, views)
            case "page":
                assert r.page is not None
                index = r.page.index
                return lambda: ours.write_page(core, r.offset, index, r.nbytes, r.priority)
            case "read":
                where = r.offset, r.address, r.nbytes
                return lambda: ours.read(core, *where, r.priority, r.checksum)
            case "write":
                return lambda: ours.write(core, r.offset, r.address, r.nbytes, r.priority)
            case "sync":
                return lambda: ours.sync(core)

    def _of(self, file: File) -> NativeFile:
        self._check_process()
        if not isinstance(file, NativeFile) or not self._core.owns(file.core):
            raise GulliverError(f"{file} was not opened by this I/O engine")
        return file

    # Shutdown and tests

    def close(self) -> None:
        self._check_process()
        self._core.begin_close()
        _within(None, self._core.idle)
        self._core.stop()

    def _inject(
        self, call: Call, nth: int, errno: int | None, short: int | None, times: int
    ) -> None:
        self._core.inject(call, nth, errno or 0, -1 if short is None else short, times)

    def hold(self, held: bool) -> None:
        self._core.hold(held)


def _view(view: StridedView) -> Any:
    strides = [stride * view.itemsize for stride in view.strides]
    return _extension().view(view.address, view.itemsize, list(view.sizes), strides)


def _within(timeout: float | None, wait: Callable[[float], bool]) -> bool:
    """Polls `wait` in short intervals so that Python can handle signals."""
    if timeout is None:
        while not wait(HEARING_S):
            pass
        return True
    end = time.monotonic() + timeout
    while not wait(min(HEARING_S, max(0.0, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


def _named(failure: tuple[str, int, int], path: Path) -> IoError:
    action, offset, number = failure
    return IoError(action, path, None if offset < 0 else offset, number)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (GulliverError, TimeoutError):
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        raise GulliverError(str(error)) from error


def gather(target: int, segments: NDArray[np.int64]) -> None:
    table = np.ascontiguousarray(segments, dtype=np.int64).reshape(-1, 2)
    if os.environ.get("GULLIVER_IO") != "python" and native_problem() is None:
        importlib.import_module("gulliver.io._core").gather(target, table)
    else:
        gather_slowly(target, table, {})


CHOICES = ("native", "threads", "python")
"""Values of ``$GULLIVER_IO``: native (io_uring if allowed), native without io_uring, Python."""
_said: set[str] = set()


def default_engine(**options: Any) -> Engine:
    """Creates the native engine if it was built, otherwise the Python engine (logged once).

    ``$GULLIVER_IO`` selects one: ``native``, ``threads`` (native without io_uring) or ``python``.

    Args:
        options: arguments of `NativeEngine` except `io_uring`.

    Raises:
        GulliverError: ``$GULLIVER_IO`` is unknown, or requires the native engine, which was not
            built.
    """
    choice = os.environ.get("GULLIVER_IO", "")
    if choice and choice not in CHOICES:
        raise GulliverError(f"GULLIVER_IO={choice!r} is unknown: {nearest(choice, CHOICES)}")
    problem = native_problem()
    if problem and choice in ("native", "threads"):
        raise GulliverError(f"GULLIVER_IO={choice} needs the native engine, but {problem}")
    if problem and not choice and problem not in _said:
        # Once per reason and process: every checkpointer and reader creates an engine.
        _said.add(problem)
        logging.getLogger("gulliver").warning(
            "I/O runs in Python threads, which compete for the GIL: %s", problem
        )
    if choice == "python" or problem:
        return PythonEngine(**options)
    return NativeEngine(io_uring=False if choice == "threads" else "auto", **options)
