"""Formats events as JSON of the OpenAI API: responses, stream chunks, log-probabilities.

A token's text is the token decoded alone. Tokens that are not full characters are written as
``token_id:17``, since only the id is lossless.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gulliver.serve.http.requests import RequestBody
from gulliver.serve.sampling import Token

Names = Callable[[int], str]
"""Function that returns the text of a token."""


def names_of(tokenizer: Any) -> Names:
    def name(token: int) -> str:
        text = tokenizer.decode(
            [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return f"token_id:{token}" if "\ufffd" in text else text

    return name


@dataclass
class AnswerChoice:
    """State of one completion."""

    # Index of the completion in the request.
    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Usage:
    """Token counts of a request."""

    prompt: int = 0
    # Prompt tokens that were found in the cache.
    prefix_cached: int = 0
    # Tokens of the completions, including their last ones.
    answer: int = 0

    @property
    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.prefix_cached},
        }


class AnswerFormat(ABC):
    """Formats the response to a request."""

    prefix = ""
    whole_object = ""
    piece_object = ""

    def __init__(self, body: RequestBody, model: str, names: Names) -> None:
        self.body, self._model, self._names = body, model, names
        # Id of the response.
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        made = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**made, "system_fingerprint": None}

    def whole(self, choices: Sequence[AnswerChoice], usage: Usage) -> dict[str, Any]:
        content = [self._written(choice) for choice in choices]
        return {**self._head(self.whole_object), "choices": content, "usage": usage.json}

    def piece(self, choice: dict[str, Any]) -> bytes:
        made = {**self._head(self.piece_object), "choices": [choice]}
        if self.body.tells_usage:
            made["usage"] = None
        return event(made)

    def usage(self, usage: Usage) -> bytes:
        return event({**self._head(self.piece_object), "choices": [], "usage": usage.json})

    @abstractmethod
    def first(self, index: int) -> dict[str, Any] | None:
        """Formats what precedes the first token of a completion, if anything."""

    @abstractmethod
    def next(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        """Formats new tokens of a completion as a choice of a chunk."""

    @abstractmethod
    def _written(self, choice: AnswerChoice) -> dict[str, Any]: ...

    def _ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"token_ids": [t.id for t in tokens]} if self.body.return_token_ids else {}


class CompletionFormat(AnswerFormat):
    """Responses of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: RequestBody, model: str, names: Names, echo: Sequence[str] = ()
    ) -> None:
        super().__init__(body, model, names)
        self._echo = echo

    def _front(self, index: int) -> str:
        return self._echo[index] if self._echo else ""

    def first(self, index: int) -> dict[str, Any] | None:
        return self.next(index, self._front(index), (), None) if self._echo else None

    def next(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        made = {"index": index, "text": text, "finish_reason": finish}
        return {**made, "logprobs": self._logprobs(index, tokens), **self._ids(tokens)}

    def _written(self, choice: AnswerChoice) -> dict[str, Any]:
        text = self._front(choice.index) + choice.text
        return self.next(choice.index, text, choice.tokens, choice.finish)

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.body.likeliest is None:
            return None
        texts = [self._names(token.id) for token in tokens]
        before = len(self._front(index))
        likely = [{self._names(o.token): _finite(o.logprob) for o in t.likely} for t in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": likely if self.body.likeliest else None,
            "text_offset": [before + token.offset for token in tokens],
        }


class ChatFormat(AnswerFormat):
    """Responses of /v1/chat/completions."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def next(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        made = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": finish}
        return {**made, "logprobs": self._logprobs(tokens), **self._ids(tokens)}

    def _written(self, choice: AnswerChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        made = {"index": choice.index, "message": message, "finish_reason": choice.finish}
        return {**made, "logprobs": self._logprobs(choice.tokens), **self._ids(choice.tokens)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.body.likeliest is None:
            return None
        content = [
            {
                **self._likely(token.id, token.logprob),
                "top_logprobs": [self._likely(one.token, one.logprob) for one in token.likely],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _likely(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._names(token)
        known = None if text == f"token_id:{token}" else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float | None) -> float | None:
    """Makes a log-probability valid JSON: -9999 for minus infinity, as in the OpenAI API."""
    return None if logprob is None else max(logprob, -9999.0)


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ALIVE = b": waiting\n\n"
"""A server-sent comment, which clients ignore; sending it detects lost connections."""
