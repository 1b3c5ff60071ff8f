"""The native engine as Python sees it: arguments checked, failures raised; the rest is C++.

The extension `gulliver.io._core` is built from ``native/`` where there is a compiler. Its calls
release the GIL and wait at most a tenth of a second, so that signals are heard in between.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError
from gulliver.io._engine import (
    NO_VIEWS,
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
INTERFACE = 2
"""Of the extension; both sides count up when their calls change."""
HEARING_S = 0.1
"""Seconds that a call into the extension waits before signals are looked at."""


def native_problem() -> str | None:
    """Why there is no native engine; None where there is one."""
    try:
        built = _extension().INTERFACE
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built != INTERFACE:
        return "its extension is of another version: pip install -e . builds it anew"
    return None


def _extension() -> Any:
    # By name: type checking must pass where it has not been built.
    return importlib.import_module("gulliver.io._core")


class NativeTicket(Ticket):
    """A ticket of the extension."""

    __slots__ = ("_core", "_path", "_process")

    def __init__(self, core: Any, path: Path, process: int) -> None:
        self._core = core
        self._path = path
        self._process = process

    @property
    def copied(self) -> bool:
        return self._core.copied

    @property
    def done(self) -> bool:
        return self._core.done

    @property
    def checksum(self) -> int | None:
        return self._core.checksum

    def wait_copied(self, timeout: float | None = None) -> None:
        check_process(self._process)
        if not _within(timeout, self._core.wait_copied):
            raise TimeoutError(f"not copied within {timeout:g} s")

    def wait(self, timeout: float | None = None) -> None:
        check_process(self._process)
        if not _within(timeout, self._core.wait):
            raise TimeoutError(f"not done within {timeout:g} s")
        failure = self._core.failure
        if failure is not None:
            raise _named(failure, self._path)


class NativeFile(File):
    """A file of the extension."""

    def __init__(self, core: Any, path: Path, nbytes: int) -> None:
        self.core = core
        self.path = path
        self.nbytes = nbytes


class NativeEngine(Engine):
    """The engine with threads of C++.

    Args:
        page_bytes: size of a page, a multiple of 4096.
        pages: in the pool.
        copiers: threads that gather and sum.
        writers: threads that call the system; with io_uring one thread keeps several calls of each
            under way instead.
        queue: requests under way before submitting waits.
        direct: whether to go past the page cache where alignment allows it.
        io_uring: False for threads, True to refuse to do without.

    Raises:
        GulliverError: no memory for the pool, or io_uring demanded and not allowed here.
    """

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
        problem = native_problem()
        if problem:
            raise GulliverError(f"there is no native I/O engine here: {problem}")
        with _refusals():
            self._core = _extension().Engine(
                page_bytes,
                pages,
                copiers,
                writers,
                queue,
                direct is not False,
                io_uring is not False,
            )
        self.page_bytes = page_bytes
        self.kind = self._core.kind
        if io_uring is True and self.ring_problem:
            self._core.stop()
            raise GulliverError(f"io_uring cannot be used here: {self.ring_problem}")
        super().__init__()

    @property
    def ring_problem(self) -> str:
        """Why io_uring is not used; empty where it is."""
        number = self._core.ring_errno
        if number == 0:
            return ""
        return "not asked for" if number < 0 else os.strerror(number)

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

    def grow(self, pages: int) -> None:
        self._check_process()
        if pages < 1:
            raise GulliverError(f"pages {pages}: at least 1")
        with _refusals():
            self._core.grow(pages)

    # Files

    def create(self, path: str | Path, nbytes: int) -> File:
        self._check_process()
        check_range(0, nbytes)
        return self._opened(path, self._core.create, nbytes)

    def open(self, path: str | Path) -> File:
        self._check_process()
        return self._opened(path, self._core.open)

    def _opened(self, path: str | Path, call: Callable[..., Any], *size: int) -> File:
        path = Path(path)
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
        check_range(offset, self.page_bytes)
        check_views(table, views)
        found = [(number, _view(view)) for number, view in views.items()]
        return self._submit(
            file, lambda core: self._core.stage(core, offset, table, priority, found)
        )

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
            raise GulliverError("the I/O engine was closed while a page was waited for")
        return Page(index, address, self.page_bytes)

    def release(self, page: Page) -> None:
        self._check_process()
        with _refusals():
            self._core.release(page.index)

    def write_page(
        self, file: File, offset: int, page: Page, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        check_range(offset, nbytes)
        if not 0 <= nbytes <= page.nbytes:
            raise GulliverError(f"{nbytes} bytes of a page of {page.nbytes}")
        return self._submit(
            file, lambda core: self._core.write_page(core, offset, page.index, nbytes, priority)
        )

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
        check_range(offset, nbytes)
        return self._submit(
            file, lambda core: self._core.read(core, offset, address, nbytes, priority, checksum)
        )

    def write(
        self, file: File, offset: int, address: int, nbytes: int, *, priority: int = 0
    ) -> Ticket:
        check_range(offset, nbytes)
        return self._submit(
            file, lambda core: self._core.write(core, offset, address, nbytes, priority)
        )

    def prefetch(self, file: File, offset: int, nbytes: int) -> None:
        check_range(offset, nbytes)
        core = self._of(file).core
        with _refusals():
            self._core.prefetch(core, offset, nbytes)

    def sync(self, file: File) -> Ticket:
        return self._submit(file, self._core.sync)

    def _submit(self, file: File, call: Callable[[Any], Any]) -> Ticket:
        """Submits, as soon as the queue has room."""
        core = self._of(file).core
        with _refusals():
            while (ticket := call(core)) is None:
                self._core.wait_room(HEARING_S)
        return NativeTicket(ticket, file.path, self._process)

    def _of(self, file: File) -> NativeFile:
        self._check_process()
        if not isinstance(file, NativeFile) or not self._core.owns(file.core):
            raise GulliverError(f"{file} was not opened by this I/O engine")
        return file

    # The end, and tests

    def close(self) -> None:
        self._check_process()
        self._core.begin_close()
        _within(None, self._core.idle)
        self._core.stop()

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
        self._core.inject(call, nth, errno or 0, -1 if short is None else short, times)

    def hold(self, held: bool) -> None:
        self._core.hold(held)


def _view(view: View) -> Any:
    strides = [stride * view.itemsize for stride in view.strides]
    return _extension().view(view.address, view.itemsize, list(view.sizes), strides)


def _within(timeout: float | None, wait: Callable[[float], bool]) -> bool:
    """Waits in short turns: between them Python handles signals."""
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
    """The extension's refusals in our words' type."""
    try:
        yield
    except (GulliverError, TimeoutError):
        raise
    except (RuntimeError, ValueError, MemoryError) as error:
        raise GulliverError(str(error)) from error
