"""Request bodies of the OpenAI API: parsing, validation and errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gulliver.errors import GulliverError, nearest
from gulliver.serve.batch import Facts
from gulliver.serve.requests import RequestError, check_request
from gulliver.serve.sampling import SamplingParams


class ApiError(Exception):
    """An API error: status, and a body with the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        # Seconds after which a retry may succeed.
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else _WRONG)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        made = {}
        if self.retry_after is not None:
            made["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 408:
            # Otherwise the rest of the body would be parsed as a request. One that is too large is
            # read and dropped for a while, or its client would miss the response.
            made["connection"] = "close"
        if self.status == 401:
            made["www-authenticate"] = "Bearer"
        return made


_WRONG = "invalid_request_error"
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def overloaded(message: str, seconds: float) -> ApiError:
    return ApiError(429, message, code="overloaded", retry_after=seconds)


# Bodies of completion and chat requests, validated field by field.
#
# A field is supported, has no effect on the response (`user`), or is rejected by name. Unknown
# fields are rejected too: most are typos, and a completion sampled with wrong settings would look
# like any other.


STOPS, STOP_LENGTH = 16, 1024
"""Maximum number of stop strings per request, and of characters per stop string."""
COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in the OpenAI API."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False


class RequestBody(BaseModel, ABC):
    """Fields common to completions and chats."""

    # Other fields are rejected by `read`, which knows the permitted ones.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    # Without effect on the response.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def most(self, room: int, limit: int | None) -> int:
        """Maximum tokens of a completion if the request has no limit."""
        return max(1, min(room, limit or room))

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """Number of alternatives with log-probabilities; None for no log-probabilities."""


class CompletionBody(RequestBody):
    """Body of /v1/completions."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def most(self, room: int, limit: int | None) -> int:
        return min(COMPLETION_TOKENS, super().most(room, limit))


class ChatBody(RequestBody):
    """Body of /v1/chat/completions."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
"""Unsupported fields, and the values that are accepted because they have no effect."""
Kind = TypeVar("Kind", CompletionBody, ChatBody)


@dataclass(frozen=True)
class Limits:
    """Limits that requests are validated against."""

    # Name of the model.
    name: str
    # Vocabulary, and maximum tokens of prompt and completion.
    facts: Facts
    # Maximum completions of a prompt.
    n: int
    # Maximum completions of a request, prompts times `n`.
    answers: int
    # Maximum tokens of a completion; None for no separate limit.
    max_tokens: int | None


def read(kind: type[Kind], data: bytes, limits: Limits) -> Kind:
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _first(error) from None
    for name, value in (body.model_extra or {}).items():
        if name not in NEUTRAL:
            raise _unknown(name, kind.model_fields)
        asks = value is not None and not any(
            value == one and type(value) is type(one) for one in NEUTRAL[name]
        )
        if asks:
            raise wrong(f"{name} is not supported: omit it", name, "unsupported_parameter")
    if body.model is not None and body.model != limits.name:
        message = f"model {body.model!r} is not served here: {nearest(body.model, [limits.name])}"
        raise ApiError(404, message, "model", "model_not_found")
    if body.stream_options is not None and not body.streamed:
        raise wrong("stream_options needs stream=true", "stream_options")
    if isinstance(body, ChatBody):
        _check_chat(body)
    else:
        _check_completion(body)
    return body


def _check_chat(body: ChatBody) -> None:
    if body.max_completion_tokens is not None and body.max_tokens is not None:
        raise wrong("set max_completion_tokens or max_tokens, not both", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs needs logprobs=true", "top_logprobs")


def _check_completion(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise wrong("best_of is not supported: omit it", "best_of", "unsupported_parameter")
    if body.echo and body.logprobs is not None:
        message = "echo with logprobs is not supported: prompt tokens have no log-probabilities"
        raise wrong(message, "echo", "unsupported_parameter")


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Returns the prompts of a completion request: texts, or lists of tokens."""
    prompt = body.prompt
    several: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if several and all(_is_token(one) for one in several):
        several = [several]
    if not several or not all(isinstance(one, str) or _are_tokens(one) for one in several):
        raise wrong("prompt must be a string, a list of tokens, or a list of either", "prompt")
    return several


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_token, value))


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """Returns the messages of a chat; the parts of each are joined into one text."""
    if not isinstance(body.messages, list) or not body.messages:
        raise wrong("messages must be a list of at least one message", "messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(body.messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(f"{where} must have a role and a content", where)
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, [], {}):
            raise wrong(f"{where}.{name} is not supported: omit it", f"{where}.{name}")
    made = {"role": message["role"], "content": _content(message.get("content"), where)}
    return {**made, "name": message["name"]} if message.get("name") is not None else made


def _content(content: Any, where: str) -> str:
    where = f"{where}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(f"{where} must be a string or a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise wrong(f"{where} has a part of type {kind!r}: only text is supported", where)
        texts.append(part["text"])
    return "".join(texts)


def sampling_of(
    body: RequestBody, tokens: Sequence[int], limits: Limits, many: int = 1
) -> SamplingParams:
    """Returns the sampling parameters for one of `many` prompts; rejects values out of range."""
    prompt = "prompt" if isinstance(body, CompletionBody) else "messages"
    sampling, name = _sampling(body, max(1, limits.facts.longest - len(tokens)), limits)
    # Use the names that clients know.
    known = {"prompt": prompt, "max_tokens": name}
    wanted = sampling.max_tokens or 0
    if limits.max_tokens is not None and wanted > limits.max_tokens:
        raise wrong(f"{name}={wanted}: this server allows at most {limits.max_tokens}", name)
    try:
        check_request(tokens, sampling, limits.facts)
    except RequestError as error:
        message = str(error).replace("max_tokens=", f"{name}=", 1)
        raise wrong(message, known.get(error.field, error.field), error.code) from None
    if sampling.n > limits.n:
        raise wrong(f"n={sampling.n}: this server allows at most {limits.n}", "n")
    if sampling.n * many > limits.answers:
        raise wrong(
            f"{many} prompts with n={sampling.n} request {sampling.n * many} completions, but "
            f"this server allows at most {limits.answers} per request",
            prompt,
        )
    return sampling


def _sampling(body: RequestBody, room: int, limits: Limits) -> tuple[SamplingParams, str]:
    """Returns the sampling parameters, and the name of the request's token limit."""
    name, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", body.max_completion_tokens
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise wrong("seed must be a 64-bit integer", "seed")
    stop = _stops(body.stop)
    given = {key: value for key in _DRAWN if (value := getattr(body, key)) is not None}
    try:
        made = SamplingParams(
            max_tokens=body.most(room, limits.max_tokens) if wanted is None else wanted,
            logprobs=body.likeliest,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            **given,
        )
    except GulliverError as error:
        field, rest = str(error).split(" ", 1)
        logprobs = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        field = {"max_tokens": name, "logprobs": logprobs}.get(field, field)
        raise wrong(f"{field} {rest}", field) from None
    return made, name


_DRAWN = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n"),
)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > STOPS:
        raise wrong(f"stop has {len(stops)} strings: use at most {STOPS}", "stop")
    if not all(0 < len(stop) <= STOP_LENGTH for stop in stops):
        raise wrong(f"stop: strings must have 1 to {STOP_LENGTH} characters", "stop")
    return stops


def _unknown(name: str, known: Collection[str]) -> ApiError:
    message = f"unknown field {name[:100]!r}: {nearest(name.rpartition('.')[2][:100], known)}"
    return wrong(message, name[:100], "unknown_parameter")


def _first(error: ValidationError) -> ApiError:
    """Converts the first validation error of a body to an API error, in the client's terms."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if found["type"] in ("json_invalid", "json_type") or not found["loc"]:
        return wrong(f"the body is not a JSON object: {found['msg']}", code="invalid_json")
    places = [str(part) for part in found["loc"]]
    if found["type"] == "extra_forbidden":
        return _unknown(".".join(places), StreamOptions.model_fields)
    # The rest of the location names branches of a union, which mean nothing to clients.
    message = found["msg"][0].lower() + found["msg"][1:]
    return wrong(f"{places[0]}: {message}", places[0])
