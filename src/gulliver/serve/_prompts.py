"""Prompts as users give them: texts, tokens or conversations, turned into tokens or refused."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._batch import Facts
from gulliver.serve._sampling import SamplingParameters

Prompt = str | Sequence[int]
_SHORT = 40


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Lists prompts; one alone is a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(
        prompts, Sequence | np.ndarray | Tensor
    ):
        raise _no_prompt(prompts)
    several = list(prompts)
    return [several] if several and _is_number(several[0]) else several  # type: ignore


def tokens_of(prompt: Prompt, tokenizer: Any | None) -> list[int]:
    """Tokens of a prompt, as the tokenizer encodes a text."""
    if not isinstance(prompt, str):
        return _numbers(prompt)
    if tokenizer is None:
        raise GulliverError("a prompt that is text needs a tokenizer: give one, or give tokens")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise GulliverError(
            f"character {error.start} of the prompt is half of a surrogate pair, which is no text"
        ) from None
    return list(tokenizer(prompt)["input_ids"])


def _is_number(one: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return one.ndim == 0
    return not isinstance(one, str | Sequence)


def _numbers(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | bytearray):
        raise _no_prompt(prompt)
    try:
        tokens = list(prompt)
        if any(isinstance(token, bool | np.bool_ | str) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise _no_prompt(prompt) from None


def _no_prompt(given: Any) -> GulliverError:
    said = repr(given)
    said = said if len(said) <= _SHORT else said[:_SHORT] + "..."
    return GulliverError(f"{said} is no prompt: give a text, or a list of tokens (whole numbers)")


class RequestError(GulliverError):
    """A request that cannot be answered; `field` is wrong, and `code` names it for programs."""

    def __init__(self, message: str, field: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def check_request(tokens: Sequence[int], sampling: SamplingParameters, facts: Facts) -> None:
    """Refuses what the vocabulary, the context or the cache cannot take."""
    count, longest, wanted = len(tokens), facts.longest, sampling.max_tokens
    if not tokens:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    for field, given in (("prompt", tokens), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = next((token for token in given if not 0 <= token < facts.vocabulary), None)
        if wrong is not None:
            place = "" if field == "prompt" else f"{field}: "
            raise RequestError(
                f"{place}token {wrong} is not in the vocabulary of {facts.vocabulary}", field
            )
    if count >= longest:
        raise RequestError(
            f"the prompt has {count} tokens and the {facts.what} {longest}: give at most "
            f"{longest - 1}, so that there is room for an answer",
            *("prompt", "context_length_exceeded"),
        )
    if wanted is not None and count + wanted > longest:
        raise RequestError(
            f"max_tokens={wanted} after a prompt of {count} tokens exceeds the {facts.what} of "
            f"{longest}: give at most {longest - count}",
            *("max_tokens", "context_length_exceeded"),
        )


def chat_tokens(tokenizer: Any | None, messages: Sequence[dict[str, str]]) -> list[int]:
    """Tokens of a conversation up to where the answer begins."""
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise GulliverError(
            "the tokenizer has no chat template to write a conversation: give text, or a tokenizer "
            "of an instruct model"
        )
    for place, message in enumerate(_messages(messages)):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise GulliverError(
                    f"message {place} has no {key}: give dictionaries of role and content, both "
                    "texts"
                )
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, ValueError, KeyError, TypeError) as error:
        raise GulliverError(f"the chat template refuses the conversation: {error}") from None
    except Exception as error:
        # A template is an arbitrary program, and may fail in any way.
        said = f"{type(error).__name__}: {error}"
        raise GulliverError(f"the chat template fails with this conversation: {said}") from None
    return list(found["input_ids"])


def _messages(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise GulliverError(
            f"a conversation is a list of messages, not {type(messages).__name__}: give "
            '[{"role": "user", "content": ...}]'
        )
    return messages
