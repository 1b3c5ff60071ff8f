"""`Reply`: the response to one client, from admission to the last byte.

Two tasks run: one computes and sends, the other waits for the client to disconnect; the first to
end cancels the other. The `finally` of `__call__` always cancels the rest of the request and
releases its admission.
"""

from __future__ import annotations

import asyncio
import copy
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gulliver.errors import GulliverError
from gulliver.serve.http.answers import (
    ALIVE,
    DONE,
    AnswerChoice,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Names,
    Usage,
    event,
)
from gulliver.serve.http.options import ServerOptions
from gulliver.serve.http.requests import (
    ApiError,
    ChatBody,
    CompletionBody,
    Kind,
    Limits,
    RequestBody,
    messages_of,
    prompts_of,
    read,
    sampling_of,
    wrong,
)
from gulliver.serve.http.worker import EngineThread, EngineTicket, Gate, Inbox, Metrics
from gulliver.serve.requests import chat_tokens
from gulliver.serve.sampling import Event, SamplingParams, Token

ALIVE_S = 15.0
"""Seconds without tokens after which a stream sends a keep-alive comment."""


@dataclass(frozen=True)
class PromptJob:
    """A prompt and its sampling parameters."""

    tokens: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class ServerContext:
    """State shared by all responses."""

    worker: EngineThread
    # Limits the admitted work.
    gate: Gate
    metrics: Metrics


class Reply(Response):
    """Responds to a client, with a complete response or a stream."""

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
        gate, metrics = self._context.gate, self._context.metrics
        count = len(self._choices)
        try:
            gate.enter(count)
        except ApiError as error:
            await response_of(error)(scope, receive, send)
            return
        work = asyncio.ensure_future(self._work(scope, receive, send))
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

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            for place, job in enumerate(self._jobs):
                taken = self._context.worker.add(job.tokens, job.sampling, place, self._inbox)
                self._tickets.append(await taken)
            if self._format.body.streamed:
                await self._stream(send)
            else:
                await JSONResponse(await self._at_once())(scope, receive, send)
        except ApiError as error:
            if not self._started:
                await response_of(error)(scope, receive, send)
            else:
                # The status has been sent, so the error is part of the stream.
                await _send_part(send, event(error.body), more=False)

    async def _at_once(self) -> dict[str, Any]:
        while any(choice.finish is None for choice in self._choices):
            for _, choice, text, tokens in await self._next_events():
                choice.text += text
                choice.tokens += tokens
        return self._format.whole(self._choices, self._usage)

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
        """Waits for events; merges events of one completion that have arrived together."""
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
    # Otherwise nginx would buffer chunks.
    (b"x-accel-buffering", b"no"),
]


async def _send_part(send: Send, part: bytes, more: bool = True) -> None:
    if part or not more:
        await send({"type": "http.response.body", "body": part, "more_body": more})


def response_of(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


# The routes: what each of them checks, in which order, before a `Reply` begins.


Answer = TypeVar("Answer")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")


class Routes:
    """State shared by the routes: limits, the API key, and the tokenizer's thread."""

    def __init__(
        self,
        context: ServerContext,
        options: ServerOptions,
        limits: Limits,
        tokenizer: Any,
        names: Names,
    ) -> None:
        self.context, self.limits, self.names = context, limits, names
        self._options = options
        self.body_bytes = options.body_limit(limits.facts.longest)
        # A copy, because the engine must not decode with a tokenizer that is encoding.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "gulliver-tokenizer")
        self.began = int(time.time())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def authorise(self, request: Request) -> None:
        key = self._options.key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # The name of a scheme may be in any case (RFC 9110, 11.1).
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
        if scheme.lower() != "bearer" or not right:
            message = "missing or wrong API key: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    async def completion(self, request: Request) -> Response:
        async def jobs(body: CompletionBody) -> tuple[AnswerFormat, list[PromptJob]]:
            prompts = prompts_of(body)
            encoded = [
                await self._in_thread(self._encoded, one) if isinstance(one, str) else one
                for one in prompts
            ]
            many = len(encoded)
            made = [self._job(body, tokens, many) for tokens in encoded]
            echo: list[str] = []
            if body.echo:
                texts = [
                    one if isinstance(one, str) else await self._in_thread(self._decoded, one)
                    for one in prompts
                ]
                echo = [text for text in texts for _ in range(body.n or 1)]
            return CompletionFormat(body, self.limits.name, self.names, echo), made

        return await self._reply(request, CompletionBody, jobs)

    async def chat(self, request: Request) -> Response:
        async def jobs(body: ChatBody) -> tuple[AnswerFormat, list[PromptJob]]:
            messages = messages_of(body)
            try:
                tokens = await self._in_thread(chat_tokens, self._tokenizer, messages)
            except GulliverError as error:
                raise wrong(str(error), "messages") from None
            made = ChatFormat(body, self.limits.name, self.names)
            return made, [self._job(body, tokens)]

        return await self._reply(request, ChatBody, jobs)

    async def _reply(self, request: Request, kind: type[Kind], jobs: Callable[..., Any]) -> Reply:
        began, gate = time.monotonic(), self.context.gate
        self.authorise(request)
        gate.check()
        self._check_head(request)
        body = read(kind, await self._read(request), self.limits)
        answer_format, made = await jobs(body)
        return Reply(self.context, answer_format, made, began)

    def _check_head(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers send JSON to other sites only after asking the server (CORS preflight).
            message = "send the header Content-Type: application/json"
            raise ApiError(415, message, code="not_json")
        size = request.headers.get("content-length", "0")
        if not size.isdigit() or int(size[:20]) > self.body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"the body exceeds {self.body_bytes:,} bytes, the limit of this server"
        return ApiError(413, message, code="body_too_large")

    async def _read(self, request: Request) -> bytes:
        held = bytearray()
        seconds = self._options.body_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    if len(held) + len(part) > self.body_bytes:
                        raise self._too_large()
                    held += part
        except TimeoutError:
            message = f"the body did not arrive within {seconds:g} seconds"
            raise ApiError(408, message, code="too_slow") from None
        except ClientDisconnect:
            # No client reads this error.
            raise ApiError(499, "the client disconnected") from None
        return bytes(held)

    async def _in_thread(self, function: Callable[..., Answer], *args: Any) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _job(self, body: RequestBody, tokens: list[int], many: int = 1) -> PromptJob:
        return PromptJob(tokens, sampling_of(body, tokens, self.limits, many))

    async def models(self, request: Request) -> Response:
        self.authorise(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.authorise(request)
        name = request.path_params["name"]
        if name != self.limits.name:
            message = f"model {name!r} is not served here: use {self.limits.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        made = {"id": self.limits.name, "object": "model", "created": self.began}
        return {**made, "owned_by": "gulliver", "max_model_len": self.limits.facts.longest}

    async def health(self, request: Request) -> Response:
        del request
        worker, gate = self.context.worker, self.context.gate
        state = "dead" if worker.dead else "draining" if gate.draining else "ok"
        answer = {"status": state, "running": worker.counts["running"], "answers": gate.inside}
        return JSONResponse(answer, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        self.authorise(request)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.context.metrics.text(), media_type=kind)


def make_app(routes: Routes) -> ASGIApp:
    # No documentation pages: they load scripts from other sites, and require no key.
    app = FastAPI(title="gulliver serve", openapi_url=None)
    app.add_api_route("/v1/completions", routes.completion, methods=["POST"])
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    app.add_api_route("/v1/models", routes.models)
    app.add_api_route("/v1/models/{name:path}", routes.model)
    app.add_api_route("/health", routes.health)
    app.add_api_route("/metrics", routes.metrics)

    async def known(request: Request, error: Exception) -> Response:
        del request
        assert isinstance(error, ApiError)
        return response_of(error)

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}; there are "
        answer = ApiError(error.status_code, message + ", ".join(PATHS), code="unknown_path")
        return JSONResponse(answer.body, error.status_code, error.headers)

    async def unknown(request: Request, error: Exception) -> Response:
        del request
        message = f"internal error: {type(error).__name__}, see the server's log"
        return JSONResponse(ApiError(500, message, code="internal").body, 500)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, unknown)
    return _counted(app, routes)


def _counted(app: ASGIApp, routes: Routes) -> ASGIApp:
    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                routes.context.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, sending)

    return counting
