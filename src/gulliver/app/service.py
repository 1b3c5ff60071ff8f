"""Serves users in turn with one sampling process, and restarts it if it ends.

A user's clips are generated in the order of requests, and users take turns, so that many requests
of one user do not block the others. Events of a process are sent only to the ticket it is working
on.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from gulliver.app.worker import (
    ClipJob,
    ClipMade,
    ClipQueued,
    ClipStopped,
    End,
    Event,
    Failed,
    Source,
    Stop,
    work,
)

Work = Callable[[Connection, Source], None]
TRIES = 3
"""After this many processes in a row end before their first clip, none is started in advance."""


# [Note: turns] A ticket's round is one more than that of the same user's previous ticket, and at
# least one more than that of the last ticket served. The lowest round is served first, ties in
# order of arrival. So each user gets one clip per round, a new user joins the next round, and no
# ticket waits forever (start-time fair queueing, with equal costs).
@dataclass(eq=False)
class ClipTicket:
    """A queued job of a user."""

    # User id from the page.
    user: str
    job: ClipJob
    # Order of arrival.
    number: int
    # Round in which it is served; see [Note: turns].
    round: int
    _events: SimpleQueue[Event] = field(default_factory=SimpleQueue)

    def post(self, event: Event) -> None:
        self._events.put(event)

    def follow(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, End):
                return


class Worker:
    """The sampling process, and the pipe to it."""

    def __init__(self, work: Work, source: Source, ended: Callable[[], None]) -> None:
        # Forked from a server process that has imported torch without running it: it has no threads
        # of the page, and a killed process is replaced quickly.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, source), daemon=True)
        self.process.start()
        other.close()

        def watch() -> None:
            # Waits for the end; the thread that owns the process reads its exit code.
            wait([self.process.sentinel])
            ended()

        threading.Thread(target=watch, daemon=True).start()

    def alive(self) -> bool:
        return self.process.is_alive()

    def wait_outcome(self) -> str:
        """Waits for the end of the process, and describes how it ended."""
        self.process.join()
        self.connection.close()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        memory = ": out of memory?" if -code == signal.SIGKILL else ""
        return f"was killed ({name}{memory})"


class Service:
    """Generates clips for users, one clip at a time."""

    def __init__(self, source: Source, work: Work = work) -> None:
        self._source, self._work = source, work
        self._changed = threading.Condition()
        self._waiting: list[ClipTicket] = []
        self._current: ClipTicket | None = None
        self._number, self._round = 0, 0
        self._rounds: dict[str, int] = {}
        self._closing = False
        self._deaths = 0
        self._notice = ""
        self._worker = self._start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def notice(self) -> str:
        return self._notice

    @property
    def pid(self) -> int | None:
        return self._worker.process.pid

    def submit(self, user: str, job: ClipJob) -> ClipTicket:
        with self._changed:
            # Completed rounds do not count.
            self._rounds = {u: r for u, r in self._rounds.items() if r > self._round}
            number = 1 + max(self._round, self._rounds.get(user, 0))
            self._rounds[user] = number
            self._number += 1
            ticket = ClipTicket(user, job, self._number, number)
            self._waiting.append(ticket)
            self._report_positions()
            self._changed.notify_all()
            return ticket

    def stop(self, user: str) -> None:
        with self._changed:
            for ticket in [t for t in self._waiting if t.user == user]:
                self._waiting.remove(ticket)
                ticket.post(ClipStopped())
            self._report_positions()
            if self._current is not None and self._current.user == user:
                # The process has just ended; the serving thread will report it.
                with suppress(OSError):
                    self._worker.connection.send(Stop())

    def close(self) -> None:
        with self._changed:
            self._closing = True
            for ticket in self._waiting:
                ticket.post(ClipStopped())
            self._waiting.clear()
            self._changed.notify_all()
        self._worker.process.kill()
        self._thread.join()

    def _start(self) -> Worker:
        return Worker(self._work, self._source, self._notify)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (ticket := self._next()) is not None:
            end = self._served(ticket)
            with self._changed:
                self._current = None
            ticket.post(end)

    def _next(self) -> ClipTicket | None:
        """Waits for a ticket while keeping a process ready; None when closed."""
        with self._changed:
            while not self._closing:
                if self._deaths < TRIES and not self._worker.alive():
                    self._replace()
                if self._waiting:
                    ticket = min(self._waiting, key=_order)
                    self._waiting.remove(ticket)
                    self._round, self._current = ticket.round, ticket
                    self._report_positions()
                    return ticket
                self._changed.wait()
        return None

    def _served(self, ticket: ClipTicket) -> End:
        """Runs a job; posts all events except the last to its ticket, and returns the last."""
        try:
            with self._changed:
                if not self._worker.alive():
                    self._replace()
                connection = self._worker.connection
                connection.send(ticket.job)
            while not isinstance(event := connection.recv(), End):
                ticket.post(event)
        except (EOFError, OSError):
            if self._closing:
                return ClipStopped()
            with self._changed:
                outcome = self._replace()
            return Failed(f"the sampling process {outcome}; a new one is running, try again")
        if isinstance(event, ClipMade):
            self._deaths = 0
        return event

    def _replace(self) -> str:
        """Replaces a process that has ended; describes how it ended."""
        outcome = self._worker.wait_outcome()
        self._deaths += 1
        self._notice = (
            f"{time.strftime('%H:%M:%S')}: the sampling process {outcome}; a new one is running"
        )
        self._worker = self._start()
        return outcome

    def _report_positions(self) -> None:
        making = self._current is not None
        for place, ticket in enumerate(sorted(self._waiting, key=_order)):
            ticket.post(ClipQueued(place + making))


def _order(ticket: ClipTicket) -> tuple[int, int]:
    return ticket.round, ticket.number
