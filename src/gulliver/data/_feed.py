"""Batches for a loop: made by the caller, or ahead of use by a thread.

Read `Feed`, then `_run`, which is its thread. An error is handed over in place of its batch.
What it does not know: which batches these are, and how they are moved.
"""

from __future__ import annotations

import atexit
import queue
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from gulliver.data._transfer import MovedBatch
from gulliver.errors import GulliverError

AT_EXIT_S = 5.0
"""Seconds that an ending interpreter waits for a thread to end its workers."""
NEWER = "this iteration was ended by a newer one, or by another position, of the same loader"
_OPEN: weakref.WeakSet[Feed] = weakref.WeakSet()


class Inline:
    """Batches made when they are asked for, or `ahead` of that, by the caller."""

    def __init__(
        self, batches: Iterator[Any], move: Callable[[Any], MovedBatch], ahead: int
    ) -> None:
        self._entries: Iterator[MovedBatch | BaseException] = _moved(batches, move)
        self._ready: deque[MovedBatch | BaseException] = deque()
        self._ahead, self._closed = ahead, False

    def get(self) -> MovedBatch | BaseException | None:
        """Returns the next batch, or its error; None at the end."""
        if self._closed:
            raise GulliverError(NEWER)
        while len(self._ready) <= self._ahead:
            entry = next(self._entries, None)
            if entry is None:
                break
            self._ready.append(entry)
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Drops what was made ahead, and the iterator that makes it."""
        self._closed = True
        self._ready.clear()
        self._entries = iter(())

    def join(self) -> None:
        """Does nothing: there is no thread."""


class Feed:
    """Batches made by torch's workers and moved by a thread, at most `ahead` of use."""

    # The thread knows its channel only, so that nothing keeps this object from being collected.

    def __init__(
        self, batches: Iterator[Any], move: Callable[[Any], MovedBatch], ahead: int
    ) -> None:
        self._channel = _Channel(ahead)
        self._thread = threading.Thread(
            target=_run, args=([batches], move, self._channel), name="gulliver-loader", daemon=True
        )
        self._thread.start()
        _OPEN.add(self)

    def get(self) -> MovedBatch | BaseException | None:
        """Waits for the next batch, or its error; None at the end."""
        if self._channel.closed.is_set():
            raise GulliverError(NEWER)
        entry = self._channel.entries.get()
        self._channel.permits.release()
        return entry

    def close(self) -> None:
        """Tells the thread to end, which it does after the batch that it waits for."""
        self._channel.close()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until the thread has ended."""
        self._thread.join(timeout_s)


class _Channel:
    """The queue between thread and loop: permits go one way, batches the other."""

    def __init__(self, ahead: int) -> None:
        # A permit is asked for before a batch is moved, so that no more than `ahead` of them hold
        # memory of the arena.
        self.permits = threading.Semaphore(ahead)
        self.entries: queue.SimpleQueue[MovedBatch | BaseException | None] = queue.SimpleQueue()
        self.closed = threading.Event()

    def close(self) -> None:
        """Ends both sides; batches that nobody took are dropped."""
        self.closed.set()
        self.permits.release()
        self.drain()

    def drain(self) -> None:
        """Drops what is in the queue."""
        while True:
            try:
                self.entries.get_nowait()
            except queue.Empty:
                return


def _run(source: list[Iterator[Any]], move: Callable[[Any], MovedBatch], channel: _Channel) -> None:
    """Runs the thread; `source` is a list, so that popping it leaves the only reference here."""
    entries = _moved(source.pop(), move)
    while True:
        # Before the batch is made, not after: a batch without a permit would hold arena memory.
        channel.permits.acquire()
        if channel.closed.is_set():
            break
        entry = next(entries, None)
        if isinstance(entry, BaseException):
            # Keeps the lines, lets go of the variables: torch's iterator is among them, and has to
            # end here, not in a garbage collection, where it waits in vain for its workers.
            traceback.clear_frames(entry.__traceback__)
        channel.entries.put(entry)
        if not isinstance(entry, MovedBatch):
            break
        del entry
    # Puts the workers away, in this thread, which may have to wait for them.
    del entries
    if channel.closed.is_set():
        channel.drain()


def _moved(
    batches: Iterator[Any], move: Callable[[Any], MovedBatch]
) -> Iterator[MovedBatch | BaseException]:
    """Yields moved batches; last, in place of one that could not be made, its error."""
    try:
        while True:
            batch, error = _attempt(next, batches)
            if isinstance(error, StopIteration):
                return
            moved = None
            if error is None:
                moved, error = _attempt(move, batch)
            # Not to be held while the next one is made.
            del batch
            if error is not None:
                yield error
                return
            assert moved is not None
            yield moved
            del moved
    finally:
        # Frames that an error remembers hold this one.
        batches, error = iter(()), None


def _attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, BaseException | None]:
    """Returns what a function returned, and what it raised."""
    try:
        return function(argument), None
    except BaseException as error:
        return None, error


@atexit.register
def _close_all() -> None:
    """Ends all threads: one that the ending interpreter cuts off leaves its workers behind."""
    for feed in list(_OPEN):
        feed.close()
    for feed in list(_OPEN):
        feed.join(AT_EXIT_S)
