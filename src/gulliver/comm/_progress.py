"""Lets exchanges go on while Python computes: one thread posts messages, one finishes what arrived.

An exchange is a chain of steps. A step posts messages, and when they have arrived does something
with them and may name the next step. Steps are posted in the order in which they are handed in, and
finished in that order too; a step waits for no other exchange than those before it.

Posting copies into sockets and finishing adds up, and both leave the interpreter meanwhile, so
neither takes time from the thread that trains, as long as there is a core for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakSet

from gulliver.comm._ledger import wait_for


class Arriving(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Returns when all have arrived."""


@dataclass(frozen=True)
class Step:
    """A step of an exchange: `post` starts its messages, `finish` uses them and names the next."""

    post: Callable[[], Arriving]
    finish: Callable[[], Step | None]


class Exchange:
    """An exchange under way, or failed."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Returns when the last step has been finished.

        Raises:
            RuntimeError: of the backend, when a step failed.
            GulliverError: ranks do different things.
        """
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
    """The two threads of this process."""

    def __init__(self) -> None:
        self.posts: SimpleQueue[tuple[Step, Exchange]] = SimpleQueue()
        self.arrivals: SimpleQueue[tuple[Arriving, Step, Exchange]] = SimpleQueue()
        for loop in (self._post, self._finish):
            threading.Thread(target=loop, name=f"gulliver-comm{loop.__name__}", daemon=True).start()

    def _post(self) -> None:
        while True:
            step, exchange = self.posts.get()
            _guarded(exchange, lambda s=step, e=exchange: self.arrivals.put((s.post(), s, e)))

    def _finish(self) -> None:
        while True:
            arriving, step, exchange = self.arrivals.get()
            _guarded(exchange, lambda a=arriving, s=step, e=exchange: self._finished(a, s, e))

    def _finished(self, arriving: Arriving, step: Step, exchange: Exchange) -> None:
        arriving.wait()
        following = step.finish()
        if following is None:
            exchange.end()
        else:
            self.posts.put((following, exchange))


_threads: _Threads | None = None
_under_way: WeakSet[Exchange] = WeakSet()


def start(step: Step) -> Exchange:
    """Hands in an exchange."""
    global _threads
    if _threads is None:
        _threads = _Threads()
    exchange = Exchange()
    _under_way.add(exchange)
    _threads.posts.put((step, exchange))
    return exchange


def drain(until: float) -> None:
    """Lets exchanges that are under way end, whether or not anybody waits for them.

    Args:
        until: moment of `time.monotonic` at which no more is waited for.
    """
    for exchange in list(_under_way):
        exchange._done.wait(max(0.0, until - time.monotonic()))


def _guarded(exchange: Exchange, run: Callable[[], Any]) -> None:
    try:
        run()
    except BaseException as error:
        exchange.end(error)
