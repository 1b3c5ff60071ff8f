"""`AnswerText`: incremental detokenization, and validation of requests.

A token may be part of a character, and a stop string may span several tokens. So text is only
released when later tokens cannot change it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve.batch import Facts
from gulliver.serve.sampling import SamplingParams

MESSAGE = ("role", "content")
UNFINISHED = "\ufffd"
"""Character that tokenizers write for an incomplete character."""


class AnswerText:
    """Text of one completion."""

    # [Note: text of a token] Tokenizers write a token differently after others (a space in front,
    # one character of several tokens), so texts of single tokens cannot be concatenated. The text
    # of new tokens is that of a few earlier tokens and the new ones, without the text of the
    # earlier ones alone.

    def __init__(self, tokenizer: Any | None, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-6:])
        self._before, self._read = 0, len(self._tokens)
        self._held = ""
        self.count = 0
        """Number of characters so far, including those held back."""

    def forked(self) -> AnswerText:
        """Returns the initial state for another completion of the same prompt."""
        return AnswerText(self._tokenizer, self._stop, self._tokens[: self._read])

    def add(self, token: int) -> tuple[str, bool]:
        """Adds a token; returns the released text, and whether a stop string was found."""
        if self._tokenizer is None:
            return "", False
        self._tokens.append(token)
        before = self._decode(self._tokens[self._before : self._read])
        whole = self._decode(self._tokens[self._before :])
        if len(whole) <= len(before) or whole.endswith(UNFINISHED):
            return "", False
        self._before, self._read = self._read, len(self._tokens)
        return self._released(whole[len(before) :])

    def end(self) -> str:
        """Ends the completion; returns text held back because a stop string might have begun."""
        if self._tokenizer is None:
            return ""
        before = self._decode(self._tokens[self._before : self._read])
        rest = self._decode(self._tokens[self._before :])[len(before) :]
        text, _ = self._released(rest) if rest else ("", False)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _released(self, text: str) -> tuple[str, bool]:
        """Releases text, except a possible beginning of a stop string."""
        self.count += len(text)
        if not self._stop:
            return text, False
        self._held += text
        found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return text, True
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return text, False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


# Converts prompts (texts, tokens or conversations) to tokens, or rejects them.


Prompt = str | Sequence[int]
_SHORT = 40


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes):
        return [prompts]
    several = list(prompts)
    return [several] if several and _is_number(several[0]) else several  # type: ignore


def tokens_of(prompt: Prompt, tokenizer: Any | None) -> list[int]:
    """Encodes a prompt with the tokenizer; tokens are returned as they are."""
    if not isinstance(prompt, str):
        return _numbers(prompt)
    if tokenizer is None:
        raise GulliverError("a text prompt needs a tokenizer: pass one, or pass tokens")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise GulliverError(
            f"character {error.start} of the prompt is half of a surrogate pair, which is not "
            "valid text"
        ) from None
    return list(tokenizer(prompt)["input_ids"])


def _is_number(one: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return one.ndim == 0
    return not isinstance(one, str | Sequence)


def _numbers(prompt: Any) -> list[int]:
    try:
        if not isinstance(prompt, bytes):  # whose bytes would pass for tokens
            return [operator.index(token) for token in prompt]
    except TypeError:
        pass
    said = repr(prompt)[:_SHORT]
    raise GulliverError(f"{said} is not a prompt: pass a string, or a list of tokens (integers)")


class RequestError(GulliverError):
    """An invalid request: `field` is wrong, and `code` identifies the error for programs."""

    def __init__(self, message: str, field: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def check_request(tokens: Sequence[int], sampling: SamplingParams, facts: Facts) -> None:
    """Rejects tokens and lengths that exceed vocabulary, context or cache."""
    count, longest, wanted = len(tokens), facts.longest, sampling.max_tokens
    if not tokens:
        raise RequestError("the prompt is empty: pass at least one token", "prompt")
    for field, given in (("prompt", tokens), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = next((token for token in given if not 0 <= token < facts.vocabulary), None)
        if wrong is not None:
            place = "" if field == "prompt" else f"{field}: "
            raise RequestError(
                f"{place}token {wrong} is not in the vocabulary of {facts.vocabulary} tokens", field
            )
    if count >= longest:
        raise RequestError(
            f"the prompt has {count} tokens, but the {facts.what} has {longest}: use at most "
            f"{longest - 1}, to leave room for a completion",
            *("prompt", "context_length_exceeded"),
        )
    if wanted is not None and count + wanted > longest:
        raise RequestError(
            f"max_tokens={wanted} after a prompt of {count} tokens exceeds the {facts.what} of "
            f"{longest}: use at most {longest - count}",
            *("max_tokens", "context_length_exceeded"),
        )


def chat_tokens(tokenizer: Any | None, messages: Sequence[dict[str, str]]) -> list[int]:
    """Returns the tokens of a conversation, up to the start of the reply."""
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise GulliverError(
            "the tokenizer has no chat template: pass text, or use an instruct model's tokenizer"
        )
    # Templates render missing values as nothing, and the model would reply to that.
    known = isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in messages)
    if not known or not all(isinstance(m.get(k), str) for m in messages for k in MESSAGE):
        raise GulliverError(
            "a conversation must be a list of dictionaries with strings for role and content"
        )
    from jinja2 import TemplateError

    try:
        found = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, ValueError, KeyError, TypeError) as error:
        raise GulliverError(f"the chat template rejects the conversation: {error}") from None
    except Exception as error:
        # A template is an arbitrary program, and may fail in any way.
        said = f"{type(error).__name__}: {error}"
        raise GulliverError(f"the chat template fails on this conversation: {said}") from None
    return list(found["input_ids"])
