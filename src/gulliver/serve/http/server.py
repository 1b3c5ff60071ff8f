"""`Protocol`: connections, how many there may be and how long each may keep us waiting.

uvicorn times out idle connections after an answer. What it leaves open, a client that connects and
says nothing, that never ends its head, or that does not read what is sent to it, is ended here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gulliver.errors import GulliverError
from gulliver.serve.http.answers import names_of
from gulliver.serve.http.app import Routes, ServerContext, make_app
from gulliver.serve.http.options import BODIES, ServerOptions
from gulliver.serve.http.requests import ApiError, Limits
from gulliver.serve.http.worker import EngineThread, Gate, Metrics
from gulliver.serve.llm import LLM

PROBE_S = 15
"""Seconds without a byte after which the kernel asks whether a client is there."""

UNREAD_BYTES = 128 * 1024
"""Bytes that the kernel keeps for a client that has not read them."""


def protocol_of(options: ServerOptions, metrics: Metrics) -> type[asyncio.Protocol]:
    """Makes the protocol of a server, for uvicorn."""
    return type("LimitedProtocol", (Protocol,), {"options": options, "metrics": metrics})


class Protocol(H11Protocol):
    """HTTP/1.1 with limits."""

    options: ServerOptions
    metrics: Metrics

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or refuses it."""
        super().connection_made(transport)
        if len(self.connections) > self.options.connections:
            self.connections.discard(self)
            transport.write(_plain(_too_many(len(self.connections))))
            transport.close()
            self._stall = self.loop.call_later(1, transport.abort)
            return
        self.metrics.connections.set(len(self.connections))
        _probe(transport.get_extra_info("socket"), self.options.stall_seconds)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets a connection."""
        self._head = _stop(self._head)
        self._stall = _stop(self._stall)
        super().connection_lost(exc)
        self.metrics.connections.set(len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Takes bytes."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            # A head that has begun must end.
            if self.timeout_keep_alive_task is None:
                self._wait_for_head()
        else:
            self._head = _stop(self._head)

    def eof_received(self) -> None:
        """Ends a request whose client half-closes, with an error if it still reads."""
        # A client that half-closes and one that has left look the same: both send a FIN. Nothing
        # must be computed for one that has left, so both count as gone; one that still reads gets
        # an error.
        cycle = self.cycle
        if cycle is not None and not (cycle.response_started or self.transport.is_closing()):
            self._refuse(_HALF_CLOSED)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP, once; uvicorn's own fails where an answer has gone out."""
        del msg
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(_NOT_HTTP)
        else:
            self._leave()

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(_plain(error))
        self._leave()

    def _leave(self) -> None:
        """Closes the connection; the task that works for it finds its client gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The task of a request that came with what is refused has not run yet.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def on_response_complete(self) -> None:
        """Continues with the next request; the idle time starts here."""
        self._head = _stop(self._head)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Starts the timer of a client that does not read."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.options.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops that timer."""
        self._stall = _stop(self._stall)
        super().resume_writing()

    def _wait_for_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(self.options.header_seconds, self._too_late)

    def _too_late(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


_NOT_HTTP = ApiError(
    400, "this is not HTTP/1.1: a head, a body or a chunk of it is malformed", code="not_http"
)
_HALF_CLOSED = ApiError(
    400,
    "the client closed its direction of the connection, which counts as leaving: keep it open "
    "until the answer has come",
    code="half_closed",
)


def _too_many(count: int) -> ApiError:
    message = f"{count} connections are open, the most that this server takes: try again later"
    return ApiError(503, message, code="too_many_connections", retry_after=1)


def _plain(error: ApiError) -> bytes:
    """Writes an answer that ends its connection, without h11."""
    body = json.dumps(error.body).encode()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in error.headers.items()),
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n",
    ]
    return "\r\n".join(lines).encode() + body


def _probe(found: socket.socket, seconds: float) -> None:
    """Has the kernel find out that a client is gone."""
    # A client whose machine is gone sends nothing, not even a FIN. The kernel finds out by probes
    # while we send nothing either, and by `TCP_USER_TIMEOUT` where what we sent is not
    # acknowledged; both end the connection as a client that leaves would.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The kernel would keep megabytes for a client that does not read, and for a thousand of them.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
    wanted: list[tuple[str, int]] = [
        ("TCP_KEEPIDLE", PROBE_S),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(seconds * 1000)),
    ]
    for name, value in wanted:
        # Linux has all of them, other systems some.
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# `Server`: a socket, an event loop and an engine, from the first request to the last.


_log = logging.getLogger("gulliver")
SPARE_FILES = 64
"""Files that a process has open besides its connections."""
HEAD_BYTES = 32 * 1024
"""Most bytes of the head of a request."""


class _Uvicorn(uvicorn.Server):
    """uvicorn with signals that start the drain."""

    def __init__(self, config: uvicorn.Config, signalled: Callable[[], None]) -> None:
        super().__init__(config)
        self._signalled = signalled

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        del sig, frame
        self._signalled()


class Server:
    """Serves one model.

    Attributes:
        options: limits of connections and requests.
        url: address that clients are given, with ``/v1``.
        limits: limits of requests.
    """

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions | None = None,
        name: str | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Makes a server; `run` serves until a signal, ``with`` in the background.

        Args:
            llm: model; nobody else may use it while it is served.
            options: limits.
            name: name of the model, where the options give none.
            listener: socket of `ServerOptions.listen`; None takes one by the options.

        Raises:
            GulliverError: the model has no tokenizer, the port is taken, or the process may not
                have so many connections.
        """
        if llm.tokenizer is None:
            raise GulliverError("a server needs a tokenizer: give the model's own")
        self.options = options = options or ServerOptions()
        _allow_files(options.connections)
        engine = llm.engine
        facts, sequences = engine.runner.facts, engine.options.sequences
        most = sequences + options.queue
        self.limits = Limits(
            name=options.name or name or "model",
            facts=facts,
            n=min(options.most_n, sequences),
            answers=most,
            max_tokens=options.max_tokens,
        )
        self._worker = EngineThread(engine, self.drain)
        body_bytes = options.body_limit(facts.longest)
        self._gate = Gate(most, body_bytes * BODIES)
        self._metrics = Metrics(self.counts)
        context = ServerContext(self._worker, self._gate, self._metrics)
        self._routes = Routes(context, options, self.limits, llm.tokenizer, names_of(llm.tokenizer))
        self._socket = listener or options.listen()
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._uvicorn = _Uvicorn(_config(options, self._routes, self._metrics), self._signalled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def counts(self) -> dict[str, int]:
        """The engine's numbers after its last step, and those of the server."""
        own = {"answers": self._gate.inside, "failures": self._worker.failures}
        return {**self._worker.counts, **own}

    @property
    def dead(self) -> str | None:
        """Why the engine could not go on; None where it could."""
        return self._worker.dead

    def run(self) -> int:
        """Serves until a signal, and drains.

        Returns:
            Exit code: 1 where the engine could not go on.
        """
        asyncio.run(self._serve())
        return 1 if self._worker.dead else 0

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker.start(self._loop)
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            # The engine's thread may be telling the loop something.
            await self._loop.run_in_executor(None, self._worker.close)
            self._routes.close()

    def _signalled(self) -> None:
        """Logs what a signal does, and does it."""
        if self._draining is None:
            _log.warning(
                "signal: %d answers run or wait and get %g seconds, new ones are refused; a second "
                "signal ends at once",
                self._gate.inside,
                self.options.drain_seconds,
            )
        else:
            _log.warning("second signal: %d answers end now", self._gate.inside)
        self.drain()

    def drain(self) -> None:
        """Starts draining, from any thread; a second call ends at once."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # New requests are refused with 503 and `/health` says so while the socket still listens, so
        # that a balancer in front sees it before clients do. What runs gets `drain_seconds`; what
        # is left then ends with an error. A second signal ends all at once.
        if self._draining is None:
            self._gate.draining = True
            self._draining = asyncio.ensure_future(self._ended())
        else:
            self._worker.end_all(_ENDING)
            self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _ended(self) -> None:
        """Waits for what runs, and ends what does not end."""
        await self._emptied(self.options.drain_seconds)
        if self._gate.inside:
            self._worker.end_all(_ENDING)
            await self._emptied(2.0)
        self._uvicorn.should_exit = True

    async def _emptied(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._gate.inside and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def __enter__(self) -> Server:
        self._thread = threading.Thread(target=self.run, name="gulliver-server", daemon=True)
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self.drain()
        self._thread.join()


def _config(options: ServerOptions, routes: Routes, metrics: Metrics) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(routes),
        http=protocol_of(options, metrics),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(options.idle_seconds)),
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )


_ENDING = ApiError(503, "the server is shutting down", code="draining", retry_after=5)


def _allow_files(connections: int) -> None:
    """Raises the limit on open files to what the connections may need."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise GulliverError(
                f"connections={connections}: this process may have {hard} files open "
                f"(ulimit -Hn), {SPARE_FILES} of them for itself: give at most {hard - SPARE_FILES}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
