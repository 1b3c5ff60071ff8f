"""The routes: what each of them checks, in which order, before a `Reply` begins."""

from __future__ import annotations

import asyncio
import copy
import hmac
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gulliver.errors import GulliverError
from gulliver.serve import chat_tokens
from gulliver.serve.http._answers import AnswerFormat, ChatFormat, CompletionFormat, Names
from gulliver.serve.http._errors import ApiError, wrong
from gulliver.serve.http._limits import ServerOptions
from gulliver.serve.http._reply import PromptJob, Reply, ServerContext
from gulliver.serve.http._requests import (
    ChatBody,
    CompletionBody,
    Kind,
    Limits,
    RequestBody,
    messages_of,
    prompts_of,
    read,
    sampling_of,
)

Answer = TypeVar("Answer")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")


class Routes:
    """What the routes share: limits, the key, and the tokenizer's thread."""

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
        # A tokenizer that encodes may not be asked to decode by the engine meanwhile.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "gulliver-tokenizer")
        self.began = int(time.time())

    def close(self) -> None:
        """Ends the tokenizer's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def authorise(self, request: Request) -> None:
        """Refuses a client without the key."""
        key = self._options.key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # The name of a scheme may be in any case (RFC 9110, 11.1).
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
        if scheme.lower() != "bearer" or not right:
            message = "no or a wrong API key: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    async def completion(self, request: Request) -> Response:
        """Answers /v1/completions."""

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
        """Answers /v1/chat/completions."""

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
        held = bytearray()
        try:
            await self._read(request, held)
            answer_format, made = await jobs(read(kind, bytes(held), self.limits))
        finally:
            gate.release(len(held))
        return Reply(self.context, answer_format, made, began)

    def _check_head(self, request: Request) -> None:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            # A page of another site may send what no browser asks about first: that is not JSON.
            message = "send the header Content-Type: application/json"
            raise ApiError(415, message, code="not_json")
        size = request.headers.get("content-length", "0")
        if not size.isdigit() or int(size[:20]) > self.body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"the body exceeds {self.body_bytes:,} bytes, the most that this server reads"
        return ApiError(413, message, code="body_too_large")

    async def _read(self, request: Request, held: bytearray) -> None:
        """Reads the body into `held`, whose bytes the gate counts."""
        seconds = self._options.body_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    if len(held) + len(part) > self.body_bytes:
                        raise self._too_large()
                    self.context.gate.hold(len(part))
                    held += part
        except TimeoutError:
            message = f"the body did not come within {seconds:g} seconds"
            raise ApiError(408, message, code="too_slow") from None
        except ClientDisconnect:
            # Nobody reads it.
            raise ApiError(499, "the client left") from None

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
        """Answers /v1/models."""
        self.authorise(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Answers /v1/models/NAME."""
        self.authorise(request)
        name = request.path_params["name"]
        if name != self.limits.name:
            message = f"model {name!r} is not served here: there is {self.limits.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        made = {"id": self.limits.name, "object": "model", "created": self.began}
        return {**made, "owned_by": "gulliver", "max_model_len": self.limits.facts.longest}

    async def health(self, request: Request) -> Response:
        """Answers /health: 200 while requests are taken."""
        del request
        worker, gate = self.context.worker, self.context.gate
        state = "dead" if worker.dead else "draining" if gate.draining else "ok"
        answer = {"status": state, "running": worker.counts["running"], "answers": gate.inside}
        return JSONResponse(answer, 200 if state == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """Answers /metrics."""
        self.authorise(request)
        self.context.metrics.inside.set(self.context.gate.inside)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.context.metrics.text(), media_type=kind)


def make_app(routes: Routes) -> ASGIApp:
    """Makes the application: routes, errors as clients expect them, and a count of requests."""
    # Without pages of documentation: they load scripts from elsewhere, and ask for no key.
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
        return JSONResponse(error.body, error.status, error.headers)

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}; there are "
        answer = ApiError(error.status_code, message + ", ".join(PATHS), code="unknown_path")
        return JSONResponse(answer.body, error.status_code, error.headers)

    async def unknown(request: Request, error: Exception) -> Response:
        del request
        message = f"this should not happen: {type(error).__name__}, see the server's log"
        return JSONResponse(ApiError(500, message, code="internal").body, 500)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, unknown)
    return _counted(app, routes)


def _counted(app: ASGIApp, routes: Routes) -> ASGIApp:
    """Counts requests by path and status."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                routes.context.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, sending)

    return counting
