"""Admission, metrics, and the thread that runs the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gulliver.errors import GulliverError
from gulliver.serve.engine import Engine
from gulliver.serve.http.requests import ApiError, overloaded, wrong
from gulliver.serve.sampling import Event, SamplingParams


class Gate:
    """Counts admitted completions and limits their number."""

    def __init__(self, most: int) -> None:
        self.most, self.inside = most, 0
        self.draining = False

    def check(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)

    def enter(self, answers: int) -> None:
        self.check()
        if self.inside + answers > self.most:
            raise overloaded(
                f"{self.inside} completions are active (limit {self.most}): retry later", 1
            )
        self.inside += answers

    def leave(self, answers: int) -> None:
        self.inside -= answers


# `Metrics`: the counts of a server, for Prometheus.


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

GAUGES = {
    "running": "Answers that run",
    "waiting": "Completions that wait for blocks",
    "blocks": "Blocks of the cache",
    "free_blocks": "Free blocks of the cache",
    "kept_blocks": "Free blocks whose keys and values can still be reused",
    "answers": "Completions admitted and not ended",
    "connections": "Open connections",
}
COUNTERS = {
    "steps": "Batches run",
    "tokens": "Tokens generated",
    "prompt_tokens": "Prompt tokens of ended requests",
    "prefix_cached_tokens": "Prompt tokens found in the prefix cache",
    "drafted_tokens": "Draft tokens",
    "accepted_tokens": "Accepted draft tokens",
    "preemptions": "Preempted completions",
    "finished": "Answers that ended",
    "restarts": "Runner restarts",
    "failures": "Steps that failed",
}
"""Descriptions of the exported `Engine.counts`; counts that an engine lacks are omitted."""


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, counts: Callable[[], dict[str, int]]) -> None:
        self._registry = CollectorRegistry()
        self._counts = counts
        made = {"registry": self._registry, "namespace": "gulliver"}
        self.requests = Counter("requests", "Requests, by their end", ["path", "status"], **made)
        self.left = Counter("clients_left", "Requests whose client disconnected", **made)
        self.first = Histogram(
            "first_token_seconds", "Seconds from request to first token", buckets=SECONDS, **made
        )
        self.between = Histogram(
            "between_tokens_seconds",
            "Seconds between tokens of a completion",
            buckets=SECONDS,
            **made,
        )
        self.whole = Histogram(
            "request_seconds", "Seconds from request to end", buckets=SECONDS, **made
        )
        self._registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterable[Metric]:
        counts = self._counts()
        for name, what in GAUGES.items():
            if name in counts:
                yield GaugeMetricFamily(f"gulliver_{name}", what, counts[name])
        for name, what in COUNTERS.items():
            if name in counts:
                yield CounterMetricFamily(f"gulliver_{name}", what, counts[name])

    def describe(self) -> Iterable[Metric]:
        """Yields nothing, because the engine's counts are only known at collection."""
        return ()

    def text(self) -> bytes:
        return generate_latest(self._registry)


# `EngineThread`: runs the engine in its own thread; an event loop sends requests, gets events.
#
# All access to the engine happens in `_run`, between two steps: commands arrive through a queue,
# and events are passed to the loop, at most `AHEAD` steps before it has processed them.


AHEAD = 8
"""Maximum number of steps whose events the event loop has not processed."""


Inbox = asyncio.Queue["tuple[int, Event | ApiError]"]
"""Queue of a client's events, each with the index of its prompt."""


@dataclass(eq=False)
class EngineTicket:
    """Handle of a request in the engine."""

    # Number of the request in the engine.
    number: int
    # Index of the prompt; marks the events of the request.
    place: int
    inbox: Inbox

    def put(self, event: Event | ApiError) -> None:
        self.inbox.put_nowait((self.place, event))


Command = Callable[[], None]


class EngineThread:
    """Owns an engine and runs its steps."""

    def __init__(self, engine: Engine, died: Callable[[], None] = lambda: None) -> None:
        self._engine, self._died = engine, died
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._credits = threading.Semaphore(AHEAD)
        self._closing = threading.Event()
        self._tickets: dict[int, EngineTicket] = {}
        self._thread = threading.Thread(target=self._run, name="gulliver-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.dead: str | None = None
        """Why the engine cannot continue; None while it can."""
        self.failures = 0
        self.counts = engine.counts()
        """The engine's counts after its last step."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    async def add(
        self, tokens: Sequence[int], sampling: SamplingParams, place: int, inbox: Inbox
    ) -> EngineTicket:
        assert self._loop is not None
        if self.dead is not None:
            raise ApiError(503, self.dead, code="engine_dead")
        taken: asyncio.Future[EngineTicket] = self._loop.create_future()

        def add() -> None:
            try:
                number = self._engine.add(tokens, sampling)
            except GulliverError as error:
                self._call_in_loop(_refuse, taken, wrong(str(error)))
                return
            ticket = EngineTicket(number, place, inbox)
            self._tickets[number] = ticket
            self._call_in_loop(self._accept, taken, ticket)

        self._commands.put(add)
        try:
            return await taken
        except asyncio.CancelledError:
            # The engine may have accepted the request just before the client left.
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                self.cancel(taken.result())
            raise

    def _accept(self, taken: asyncio.Future[EngineTicket], ticket: EngineTicket) -> None:
        if taken.cancelled():
            # The client left in the meantime.
            self.cancel(ticket)
        else:
            taken.set_result(ticket)

    def cancel(self, ticket: EngineTicket) -> None:
        def cancel() -> None:
            if self._tickets.pop(ticket.number, None) is not None:
                self._engine.cancel(ticket.number)

        self._commands.put(cancel)

    def end_all(self, error: ApiError) -> None:
        self._commands.put(lambda: self._end_all(error))

    def close(self) -> None:
        """Ends the thread after the current step; requests are cancelled."""
        self._closing.set()
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        engine = self._engine
        while not self._closing.is_set():
            self._run_commands(wait=not engine.busy)
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
                    self.dead = f"the engine stopped: {_one_line(second)}"
                    self._end_all(ApiError(503, self.dead, code="engine_dead"))
                    self._call_in_loop(self._died)
                    break
                continue
            self.counts = engine.counts()
            self._hand_over(events)
        self._run_commands(wait=False)
        for number in self._tickets:
            engine.cancel(number)

    def _run_commands(self, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except Empty:
            return

    def _hand_over(self, events: Sequence[Event]) -> None:
        known = [(self._tickets.get(event.request), event) for event in events]
        wanted = [(ticket, event) for ticket, event in known if ticket is not None]
        for event in events:
            if event.finish is not None and not self._engine.knows(event.request):
                self._tickets.pop(event.request, None)
        if not wanted:
            return
        # One credit per step with events bounds the events that the loop has not processed yet, so
        # a loop that is held up (by a large body, say) pauses the engine instead of accumulating
        # events. The timeout is needed because at shutdown the loop waits for this thread, and may
        # never release a credit.
        while not self._credits.acquire(timeout=0.5):
            if self._closing.is_set():
                return
        self._call_in_loop(self._deliver, wanted)

    def _deliver(self, wanted: Sequence[tuple[EngineTicket, Event]]) -> None:
        # Released before delivery: only the loop's backlog is bounded, which this step has just
        # left. Each client's inbox is bounded by the tokens of its completions.
        self._credits.release()
        for ticket, event in wanted:
            ticket.put(event)

    def _recover(self, error: Exception) -> None:
        """Restarts the engine after a failed step; raises the error if it cannot continue."""
        # A runner raises a `GulliverError` only if it cannot recover: the engine stops. Any other
        # error may have left the engine in an inconsistent state, and cannot be attributed to one
        # request: all running requests end with the error, and the engine restarts with an empty
        # cache.
        if isinstance(error, GulliverError):
            raise error
        message = f"the step of this completion failed: {_one_line(error)}"
        self._end_all(ApiError(500, message, code="engine_error"))
        self._engine.replay(self._engine.runner)

    def _end_all(self, error: ApiError) -> None:
        for number, ticket in self._tickets.items():
            self._engine.cancel(number)
            self._call_in_loop(ticket.put, error)
        self._tickets.clear()

    def _call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop has ended, so there are no clients.
            self._closing.set()


def _refuse(taken: asyncio.Future[EngineTicket], error: ApiError) -> None:
    if not taken.cancelled():
        taken.set_exception(error)


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split())[:500]
    return line if isinstance(error, GulliverError) else f"{type(error).__name__}: {line}"
