"""`Reply`: the answer to one client, from the gate to the last byte.

Two tasks run: one computes and sends, the other listens for the client's leave; the first to end
ends the other. Whatever happens, what the engine still has of the request is cancelled and the gate
is left, in the one `finally` of `__call__`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gulliver.serve import Event, SamplingParameters, Token
from gulliver.serve.http._answers import ALIVE, DONE, AnswerChoice, AnswerFormat, Usage, event
from gulliver.serve.http._errors import ApiError
from gulliver.serve.http._gate import Gate
from gulliver.serve.http._metrics import Metrics
from gulliver.serve.http._worker import EngineThread, EngineTicket, Inbox

ALIVE_S = 15.0
"""Seconds without tokens after which a stream says that it is alive."""


@dataclass(frozen=True)
class PromptJob:
    """A prompt and how its answers are drawn.

    Attributes:
        tokens: tokens of the prompt.
        sampling: how its answers are drawn.
    """

    tokens: Sequence[int]
    sampling: SamplingParameters


@dataclass(frozen=True)
class ServerContext:
    """What all replies share."""

    worker: EngineThread
    # How much is taken on.
    gate: Gate
    metrics: Metrics


class Reply(Response):
    """Answers a client, as a whole or as a stream."""

    def __init__(
        self,
        context: ServerContext,
        answer_format: AnswerFormat,
        jobs: Sequence[PromptJob],
        began: float,
    ) -> None:
        super().__init__()
        self._context, self._format, self._jobs, self._began = context, answer_format, jobs, began
        self._samples = jobs[0].sampling.n
        self._choices = [AnswerChoice(index) for index in range(len(jobs) * self._samples)]
        self._usage = Usage(sum(len(job.tokens) for job in jobs))
        self._inbox: Inbox = asyncio.Queue()
        self._tickets: list[EngineTicket] = []
        self._seen: dict[int, float] = {}
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers (an ASGI application)."""
        gate, metrics = self._context.gate, self._context.metrics
        count = len(self._choices)
        try:
            gate.enter(count)
        except ApiError as error:
            await send_error(error, send)
            return
        work = asyncio.ensure_future(self._work(send))
        left = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                metrics.left.inc()
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
            for ticket in self._tickets:
                self._context.worker.cancel(ticket)
            gate.leave(count)
            metrics.whole.observe(time.monotonic() - self._began)
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        try:
            for place, job in enumerate(self._jobs):
                taken = self._context.worker.add(job.tokens, job.sampling, place, self._inbox)
                self._tickets.append(await taken)
            await (self._stream(send) if self._format.body.streamed else self._at_once(send))
        except ApiError as error:
            if not self._started:
                await send_error(error, send)
            else:
                # The status has gone out: clients look for an error in the stream.
                await _send_part(send, event(error.body), more=False)

    async def _at_once(self, send: Send) -> None:
        while any(choice.finish is None for choice in self._choices):
            for _, choice, text, tokens in await self._next_events():
                choice.text += text
                choice.tokens += tokens
        await send_json(200, self._format.whole(self._choices, self._usage), send)

    async def _stream(self, send: Send) -> None:
        answer_format = self._format
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        self._started = True
        opened = [answer_format.first(choice.index) for choice in self._choices]
        await _send_part(
            send, b"".join(answer_format.piece(one) for one in opened if one is not None)
        )
        told = answer_format.body.likeliest is not None or answer_format.body.return_token_ids
        while any(choice.finish is None for choice in self._choices):
            pieces = []
            for index, choice, text, tokens in await self._next_events(send):
                if text or choice.finish is not None or (tokens and told):
                    said = answer_format.next(index, text, tokens, choice.finish)
                    pieces.append(answer_format.piece(said))
            if pieces:
                await _send_part(send, b"".join(pieces))
        last = answer_format.usage(self._usage) if answer_format.body.tells_usage else b""
        await _send_part(send, last + DONE, more=False)

    async def _next_events(
        self, send: Send | None = None
    ) -> list[tuple[int, AnswerChoice, str, list[Token]]]:
        """Waits for events; those of one answer that have come meanwhile are joined."""
        while self._inbox.empty():
            try:
                news = await asyncio.wait_for(self._inbox.get(), ALIVE_S if send else None)
            except TimeoutError:
                assert send is not None
                await _send_part(send, ALIVE)
                continue
            return self._by_answer([news])
        return self._by_answer([])

    def _by_answer(
        self, news: list[tuple[int, Event | ApiError]]
    ) -> list[tuple[int, AnswerChoice, str, list[Token]]]:
        while not self._inbox.empty():
            news.append(self._inbox.get_nowait())
        found: dict[int, tuple[str, list[Token]]] = {}
        for place, one in news:
            if isinstance(one, ApiError):
                raise one
            index = place * self._samples + one.sample
            self._note(self._choices[index], one)
            text, tokens = found.get(index, ("", []))
            found[index] = text + one.text, [*tokens, *one.tokens]
        return [(index, self._choices[index], *pair) for index, pair in found.items()]

    def _note(self, choice: AnswerChoice, one: Event) -> None:
        """Notes times, numbers of tokens and the end."""
        if one.finish == "error":
            message = one.error or "the answer ended in an error"
            raise ApiError(500, message, code="engine_error")
        if one.finish == "cancelled":
            raise ApiError(503, "the request was cancelled", code="cancelled")
        if one.tokens:
            now, metrics = time.monotonic(), self._context.metrics
            before = self._seen.get(choice.index)
            where = metrics.first if before is None else metrics.between
            where.observe(now - (self._began if before is None else before))
            self._seen[choice.index] = now
        self._usage.answer += len(one.tokens)
        if one.finish is not None:
            choice.finish = one.finish
            if one.sample == 0:
                self._usage.prefix_cached += one.prefix_cached


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would keep pieces back.
    (b"x-accel-buffering", b"no"),
]


async def _send_part(send: Send, part: bytes, more: bool = True) -> None:
    if part or not more:
        await send({"type": "http.response.body", "body": part, "more_body": more})


async def send_json(
    status: int, value: object, send: Send, headers: dict[str, str] | None = None
) -> None:
    """Sends a JSON answer."""
    body = json.dumps(value, separators=(",", ":")).encode()
    known = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(k.encode(), v.encode()) for k, v in {**known, **(headers or {})}.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(error: ApiError, send: Send) -> None:
    """Sends an error."""
    await send_json(error.status, error.body, send, error.headers)
