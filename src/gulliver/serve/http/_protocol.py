"""`Protocol`: connections, how many there may be and how long each may keep us waiting.

uvicorn times out idle connections after an answer. What it leaves open, a client that connects and
says nothing, that never ends its head, or that does not read what is sent to it, is ended here.
"""

from __future__ import annotations

import asyncio
import json
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gulliver.serve.http._errors import ApiError
from gulliver.serve.http._limits import ServerOptions
from gulliver.serve.http._metrics import Metrics

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
