"""What an engine reports of its requests: `Event` by step, `Completion` and `Output` at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: an end-of-text token, a stop token or a stop text; `length`: max_tokens, context or cache
are full; `cancelled`: by `Engine.cancel`; `error`: see `Event.error`."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A token and the natural logarithm of its probability under the model."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer.

    Attributes:
        id: number of the token.
        logprob: logarithm of its probability under the model; None where `logprobs` is None.
        likely: the `logprobs` likeliest tokens, the likeliest first.
        offset: characters of the answer before it, where there are probabilities.
    """

    id: int
    logprob: float | None = None
    likely: tuple[Likely, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An update of one answer: tokens of a step, or its end.

    Attributes:
        request: number that `Engine.add` returned.
        sample: number of the answer among the request's `n`, from 0.
        tokens: tokens that were added, more than one where drafts were accepted.
        text: text that is certain now: whole characters, and nothing that could be the beginning
            of a stop text. Texts of all events of an answer joined are the answer.
        finish: why the answer ended; None while it goes on.
        error: message, with `finish="error"`: what is wrong and what would be right.
        prefix_cached: tokens of the prompt whose keys and values were in the cache; set at the end.
    """

    request: int
    sample: int
    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None
    prefix_cached: int = 0


@dataclass
class Completion:
    """An answer.

    Attributes:
        text: text without the stop text; empty without a tokenizer.
        tokens: tokens with the one that ended it.
        finish: why it ended.
        error: message, with `finish="error"`.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None

    @property
    def ids(self) -> list[int]:
        """Numbers of its tokens."""
        return [token.id for token in self.tokens]


@dataclass
class Output:
    """A prompt and its answers.

    Attributes:
        prompt: text of the prompt; None where it was given as tokens.
        prompt_ids: tokens of the prompt.
        prefix_cached: tokens of the prompt whose keys and values were in the cache.
        completions: answers to the prompt.
    """

    prompt: str | None
    prompt_ids: list[int]
    prefix_cached: int
    completions: list[Completion]

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text
