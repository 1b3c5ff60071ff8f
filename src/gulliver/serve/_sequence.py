"""`AnswerState`: one answer in progress, with its tokens and its blocks."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from gulliver.serve._sampling import SamplingParameters
from gulliver.serve._speculation import Draft
from gulliver.serve._text import AnswerText


class Status(enum.Enum):
    """States of a sequence."""

    # WAITING -> RUNNING when it is given blocks; RUNNING -> WAITING when they are taken from it;
    # both -> ENDED. A sequence in a batch whose logits have not come is RUNNING and `in_flight`.

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class AnswerState:
    """One answer of a request."""

    # Number of the sequence, in the order of age.
    number: int
    request: int
    # Number of the answer among the request's.
    sample: int
    # Number of tokens of the prompt.
    prompt: int
    tokens: list[int]
    # How its tokens are drawn.
    sampling: SamplingParameters
    # What they are drawn from.
    seed: int
    ends: Collection[int]
    # Most tokens that it may have.
    longest: int
    text: AnswerText
    # How many more answers share its prompt and wait for it to be computed.
    forks: int = 0
    status: Status = Status.WAITING
    # Keys and values of so many of its first tokens lie in `blocks`.
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    # Digests of its full blocks; the first `published` of them are published.
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    # Slots to move in the next batch that it is part of.
    moves: list[tuple[int, int]] = field(default_factory=list)
    # Draft in the batch that it is part of.
    draft: Draft | None = None
    # Whether it is in a batch whose logits have not come.
    in_flight: bool = False
    # Whether it was cancelled while it was in_flight.
    cancelled: bool = False
    # Tokens of the prompt that were found in the cache.
    prefix_cached: int = 0

    @property
    def new(self) -> int:
        """Number of tokens whose keys and values are to be computed; 1 while it is continued."""
        return len(self.tokens) - self.cached

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer."""
        return self.tokens[self.prompt :]
