"""The engine that makes progress on collectives over gloo while Python computes.

A collective is a generator: it posts messages, yields them, and is resumed when they have arrived;
then it uses them, and may post the next ones. Posting copies into sockets and what follows adds up,
and both leave the interpreter meanwhile, so neither takes time from the thread that trains, as long
as there is a core for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakSet

from gulliver.comm._flight_recorder import wait_for

THREADS = 8
"""Collectives that go apart at once; more wait for their turn."""


# [Note: two lanes] A collective waits only for its own messages, and collectives are begun in the
# order in which they are handed in, which is the same on all ranks of a group. Those of at most two
# exchanges go *in turn*: one thread begins them, whatever else is under way, another waits for what
# arrives, in that order, and resumes them. So the link serves first who came first, and sums do not
# run in parallel. It cannot block: each exchange is posted as soon as the one before it has
# arrived, and the first ones unconditionally. Of three exchanges it could: a rank that waits for an
# old collective before it begins a new one blocks those that wait for the new one, and have the
# third exchange of the old one still to post. So collectives along several axes go *apart*, in a
# thread each: the oldest unfinished one has a thread on every rank, and always goes on.
class Arriving(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Returns when all have arrived."""


Steps = Generator[Arriving, None, None]
"""A collective: it yields messages to wait for."""


class PendingCollective:
    """A collective in flight, done or failed."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Returns when the last step has been finished."""
        wait_for(self._done)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """Called by the thread that finishes."""
        self._error = error
        _under_way.discard(self)
        self._done.set()


class _Threads:
    """The threads of this process."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[tuple[Steps, PendingCollective]] = SimpleQueue()
        self.apart: SimpleQueue[tuple[Steps, PendingCollective]] = SimpleQueue()
        self._arriving: SimpleQueue[tuple[Steps, PendingCollective, Arriving]] = SimpleQueue()
        self._lock, self._drivers, self._driven = threading.Lock(), 0, 0
        _serve("post", self.begun, self._resume)
        _serve("finish", self._arriving, self._finish)

    def drive(self, steps: Steps, exchange: PendingCollective) -> None:
        """Hands in a collective with a thread of its own; threads are started on demand."""
        with self._lock:
            self._driven += 1
            more = self._drivers < min(THREADS, self._driven)
            self._drivers += more
            self.apart.put((steps, exchange))
        if more:
            _serve(f"apart-{self._drivers}", self.apart, self._drive)

    def _resume(self, steps: Steps, exchange: PendingCollective) -> None:
        with _errors_of(exchange):
            messages = next(steps, None)
            if messages is None:
                exchange.end()
            else:
                self._arriving.put((steps, exchange, messages))

    def _finish(self, steps: Steps, exchange: PendingCollective, messages: Arriving) -> None:
        with _errors_of(exchange):
            messages.wait()
            self._resume(steps, exchange)

    def _drive(self, steps: Steps, exchange: PendingCollective) -> None:
        with _errors_of(exchange):
            drive(steps)
            exchange.end()
        with self._lock:
            self._driven -= 1


_threads: _Threads | None = None
_under_way: WeakSet[PendingCollective] = WeakSet()


def start(steps: Steps, apart: bool = False) -> PendingCollective:
    """Starts a collective."""
    global _threads
    if _threads is None:
        _threads = _Threads()
    exchange = PendingCollective()
    _under_way.add(exchange)
    if apart:
        _threads.drive(steps, exchange)
    else:
        _threads.begun.put((steps, exchange))
    return exchange


def drive(steps: Steps) -> None:
    """Runs a collective to its end in this thread."""
    for messages in steps:
        messages.wait()


def drain(until: float) -> bool:
    """Waits for all collectives in flight; returns whether they ended before the deadline."""
    every = [e._done.wait(max(0.0, until - time.monotonic())) for e in list(_under_way)]
    return all(every)


@contextmanager
def _errors_of(exchange: PendingCollective) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        exchange.end(error)


def _serve(name: str, queue: SimpleQueue[Any], work: Callable[..., None]) -> None:
    def loop() -> None:
        while True:
            # What it was handed is let go at once: the next may be long in coming.
            work(*queue.get())

    # A daemon: at exit the interpreter must not wait for a thread that waits for a lost rank. What
    # is still in flight is drained before (`_world._leave`), since a thread that is ended inside of
    # gloo takes the process down with it. A forked child has the queues but not the threads, so
    # processes that communicate are spawned, as all of ours are; workers of data loaders never
    # communicate.
    threading.Thread(target=loop, name=f"gulliver-comm-{name}", daemon=True).start()
