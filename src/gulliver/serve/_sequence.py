"""`Sequence`: one answer on its way, with its tokens and its blocks."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from gulliver.serve._sampling import SamplingParameters
from gulliver.serve._speculation import Draft
from gulliver.serve._text import AnswerText


class Status(enum.Enum):
    """States of a sequence.

    WAITING -> RUNNING when it is given blocks; RUNNING -> WAITING when they are taken from it;
    both -> ENDED. A sequence in a batch whose logits have not come is RUNNING and `flying`.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One answer of a request.

    Attributes:
        number: number of the sequence, in the order of age.
        request: number of the request.
        sample: number of the answer among the request's.
        prompt: number of tokens of the prompt.
        tokens: prompt and answer.
        sampling: how its tokens are drawn.
        seed: what they are drawn from.
        ends: tokens that end it.
        longest: most tokens that it may have.
        text: text of the answer.
        forks: how many more answers share its prompt and wait for it to be computed.
        cached: keys and values of so many of its first tokens lie in `blocks`.
        blocks: block table, in order.
        digests: digests of its full blocks; the first `published` of them are published.
        moves: slots to move in the next batch that it is part of.
        draft: draft in the batch that it is part of.
        flying: whether it is in a batch whose logits have not come.
        cancelled: whether it was cancelled while it was flying.
        found: tokens of the prompt that were found in the cache.
    """

    number: int
    request: int
    sample: int
    prompt: int
    tokens: list[int]
    sampling: SamplingParameters
    seed: int
    ends: Collection[int]
    longest: int
    text: AnswerText
    forks: int = 0
    status: Status = Status.WAITING
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)
    draft: Draft | None = None
    flying: bool = False
    cancelled: bool = False
    found: int = 0

    @property
    def new(self) -> int:
        """Number of tokens whose keys and values are to be computed; 1 while it is continued."""
        return len(self.tokens) - self.cached

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer."""
        return self.tokens[self.prompt :]
