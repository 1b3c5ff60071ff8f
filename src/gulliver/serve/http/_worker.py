"""`EngineThread`: the engine in a thread of its own, requests in from an event loop, events back.

The engine knows no threads: everything that touches it happens in `_run`, between two steps. What
goes in is a queue of commands, whose length the server's `Gate` bounds; what comes out is handed to
the event loop, and the engine waits where the loop is more than `AHEAD` steps behind, so that
nothing piles up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from gulliver.errors import GulliverError
from gulliver.serve import Engine, Event, SamplingParameters
from gulliver.serve.http._errors import ApiError, wrong

AHEAD = 8
"""Steps whose events the event loop may not have seen yet."""


Inbox = asyncio.Queue["tuple[int, Event | ApiError]"]
"""News of a client's requests, each with the number that the client's side gave to it."""


# [Note: a step that fails] A runner that fails says so with a `GulliverError`, after all that it
# could do to go on; then the engine is at its end, and whoever asks is told why. Anything else that
# a step raises is no answer's fault that could be named, and what it left half done is unknown: all
# running requests end with the error, and the engine begins anew with an empty cache.
@dataclass(eq=False)
class Ticket:
    """A request that the engine has."""

    # Number of the request in the engine.
    number: int
    # Number that its news are marked with.
    place: int
    # Queue that they go to.
    inbox: Inbox

    def put(self, news: Event | ApiError) -> None:
        """Adds an event, or the error that ends the request."""
        self.inbox.put_nowait((self.place, news))


Command = Callable[[], None]


class EngineThread:
    """Runs an engine's steps, and nobody else touches it."""

    def __init__(self, engine: Engine, died: Callable[[], None] = lambda: None) -> None:
        """Makes the thread; `start` starts it."""
        self._engine, self._died = engine, died
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._credits = threading.Semaphore(AHEAD)
        self._closing = threading.Event()
        self._tickets: dict[int, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="gulliver-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dead: str | None = None
        """Why the engine cannot go on; None while it can."""
        self.failures = 0
        """Steps that failed."""
        self.counts = engine.counts()
        """The engine's numbers after its last step."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts; events go to this loop."""
        self._loop = loop
        self._thread.start()

    async def add(
        self, tokens: Sequence[int], sampling: SamplingParameters, place: int, inbox: Inbox
    ) -> Ticket:
        """Takes a request in."""
        assert self._loop is not None
        if self.dead is not None:
            raise ApiError(503, self.dead, code="engine_dead")
        taken: asyncio.Future[Ticket] = self._loop.create_future()

        def add() -> None:
            try:
                number = self._engine.add(tokens, sampling)
            except GulliverError as error:
                self._tell(_refuse, taken, wrong(str(error)))
                return
            ticket = Ticket(number, place, inbox)
            self._tickets[number] = ticket
            self._tell(self._accept, taken, ticket)

        self._commands.put(add)
        try:
            return await taken
        except asyncio.CancelledError:
            # The engine may have taken it in just before the client left.
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self.cancel(taken.result())
            raise

    def _accept(self, taken: asyncio.Future[Ticket], ticket: Ticket) -> None:
        if taken.cancelled():
            # The client left in the meantime.
            self.cancel(ticket)
        else:
            taken.set_result(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, whose further events nobody hears."""

        def cancel() -> None:
            if self._tickets.pop(ticket.number, None) is not None:
                self._engine.cancel(ticket.number)

        self._commands.put(cancel)

    def end_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        self._commands.put(lambda: self._end_all(error))

    def close(self) -> None:
        """Ends the thread after the step that runs; requests are ended."""
        self._closing.set()
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        engine = self._engine
        while not self._closing.is_set():
            self._obey(wait=not engine.busy)
            if self._closing.is_set() or not engine.busy:
                self.counts = engine.counts()
                continue
            try:
                events = engine.step()
            except Exception as error:
                self.failures += 1
                try:
                    self._recover(error)
                except Exception as second:
                    self.dead = f"the engine cannot go on: {_said(second)}"
                    self._end_all(ApiError(503, self.dead, code="engine_dead"))
                    self._tell(self._died)
                    break
                continue
            self.counts = engine.counts()
            self._pass_on(events)
        self._obey(wait=False)
        for number in self._tickets:
            engine.cancel(number)

    def _obey(self, wait: bool) -> None:
        """Carries out the commands that there are."""
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except Empty:
            return

    def _pass_on(self, events: Sequence[Event]) -> None:
        known = [(self._tickets.get(event.request), event) for event in events]
        heard = [(ticket, event) for ticket, event in known if ticket is not None]
        for event in events:
            if event.finish is not None and not self._engine.knows(event.request):
                self._tickets.pop(event.request, None)
        if not heard:
            return
        while not self._credits.acquire(timeout=0.5):
            if self._closing.is_set():
                return
        self._tell(self._deliver, heard)

    def _deliver(self, heard: Sequence[tuple[Ticket, Event]]) -> None:
        self._credits.release()
        for ticket, event in heard:
            ticket.put(event)

    def _recover(self, error: Exception) -> None:
        """Goes on after a step that failed."""
        if isinstance(error, GulliverError):
            raise error
        message = f"the step that computed this answer failed: {_said(error)}"
        self._end_all(ApiError(500, message, code="engine_error"))
        self._engine.replay(self._engine.runner)

    def _end_all(self, error: ApiError) -> None:
        for number, ticket in self._tickets.items():
            self._engine.cancel(number)
            self._tell(ticket.put, error)
        self._tickets.clear()

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function in the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop has ended, and nobody listens any more.
            self._closing.set()


def _refuse(taken: asyncio.Future[Ticket], error: ApiError) -> None:
    if not taken.cancelled():
        taken.set_exception(error)


def _said(error: Exception) -> str:
    """One line of an error; a user's own as it is, another with its kind."""
    line = " ".join(str(error).split())[:500]
    return line if isinstance(error, GulliverError) else f"{type(error).__name__}: {line}"
