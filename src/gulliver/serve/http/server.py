"""`Server`: a socket, an event loop and an engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gulliver.errors import GulliverError
from gulliver.serve.http.answers import names_of
from gulliver.serve.http.app import Routes, ServerContext, make_app
from gulliver.serve.http.options import ServerOptions
from gulliver.serve.http.requests import ApiError, Limits
from gulliver.serve.http.worker import EngineThread, Gate, Metrics
from gulliver.serve.llm import LLM

_log = logging.getLogger("gulliver")
HEAD_BYTES = 32 * 1024


def _protocol(header_seconds: float) -> type[H11Protocol]:
    """Returns uvicorn's HTTP/1.1 protocol with a timeout for a connection's first request."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(header_seconds, self._check_head)

        def _check_head(self) -> None:
            if self.cycle is None:
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            cycle = self.cycle
            # If a response was already sent, uvicorn's own would fail.
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()
            if cycle is not None and not cycle.response_complete:
                # The task of a request that came with the malformed bytes finds its client gone.
                cycle.disconnected = True
                cycle.message_event.set()

    return Protocol


class _Uvicorn(uvicorn.Server):
    """Uvicorn server that starts draining on a signal."""

    def __init__(self, config: uvicorn.Config, signalled: Callable[[], None]) -> None:
        super().__init__(config)
        self._signalled = signalled

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del sig, frame
        self._signalled()


class Server:
    """Serves one model.

    Attributes:
        options: limits of connections and requests.
        url: address for clients, with ``/v1``.
        limits: limits of requests.
    """

    def __init__(
        self,
        llm: LLM,
        options: ServerOptions | None = None,
        name: str | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Creates a server; `run` serves until a signal, ``with`` serves in the background.

        Args:
            llm: model; it must not be used otherwise while it is served.
            options: limits.
            name: name of the model, if the options have none.
            listener: socket of `ServerOptions.listen`; None opens one.

        Raises:
            GulliverError: the model has no tokenizer, or the port is in use.
        """
        if llm.tokenizer is None:
            raise GulliverError("a server needs a tokenizer: pass the model's own")
        self.options = options = options or ServerOptions()
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
        self._gate = Gate(most)
        self._metrics = Metrics(self.counts)
        context = ServerContext(self._worker, self._gate, self._metrics)
        self._routes = Routes(context, options, self.limits, llm.tokenizer, names_of(llm.tokenizer))
        self._socket = listener or options.listen()
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._uvicorn = _Uvicorn(_config(options, self._routes), self._signalled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def counts(self) -> dict[str, int]:
        """Counts of the engine after its last step, and of the server."""
        own = {"answers": self._gate.inside, "failures": self._worker.failures}
        own["connections"] = len(self._uvicorn.server_state.connections)
        return {**self._worker.counts, **own}

    @property
    def dead(self) -> str | None:
        """Why the engine stopped; None while it runs."""
        return self._worker.dead

    def run(self) -> int:
        """Serves until a signal, then drains.

        Returns:
            Exit code: 1 if the engine stopped after an error.
        """
        asyncio.run(self._serve())
        return 1 if self._worker.dead else 0

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker.start(self._loop)
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            # The engine's thread may still be passing events to the loop.
            await self._loop.run_in_executor(None, self._worker.close)
            self._routes.close()

    def _signalled(self) -> None:
        if self._draining is None:
            _log.warning(
                "signal: %d completions are active and have %g seconds; new requests are "
                "rejected; a second signal ends immediately",
                self._gate.inside,
                self.options.drain_seconds,
            )
        else:
            _log.warning("second signal: ending %d completions", self._gate.inside)
        self.drain()

    def drain(self) -> None:
        """Starts draining, from any thread; a second call ends all requests immediately."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # New requests and `/health` return 503 while the socket still listens, so that a load
        # balancer notices it before clients do. Running requests get `drain_seconds`; those left
        # then end with an error. A second signal ends everything immediately.
        if self._draining is None:
            self._gate.draining = True
            self._draining = asyncio.ensure_future(self._ended())
        else:
            self._worker.end_all(_ENDING)
            self._uvicorn.should_exit = self._uvicorn.force_exit = True

    async def _ended(self) -> None:
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


def _config(options: ServerOptions, routes: Routes) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(routes),
        http=_protocol(options.header_seconds),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(options.idle_seconds)),
        timeout_graceful_shutdown=5,
        limit_concurrency=options.connections + 1,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )


_ENDING = ApiError(503, "the server is shutting down", code="draining", retry_after=5)
