"""`Batch`: all that a forward must know, as plain numbers.

A batch is the command that the engine sends to whatever runs the model. It has no tensors and knows
no model, so that it can be pickled to other processes, and every stage and rank finds in it what it
must do: which blocks to copy, which tokens to run, where their keys and values go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from gulliver.errors import GulliverError

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence.

    Attributes:
        sequence: number of the sequence.
        start: keys and values of so many tokens lie in the cache already.
        tokens: new tokens, one while a text is continued, more of a prompt or of drafts.
        blocks: the sequence's blocks in order, with room for `start + len(tokens)` tokens.
        outputs: logits are wanted of so many of the last tokens; 0 for a part of a prompt.
        parents: index, for each new token, of the one before it in its path, -1 for the last
            token in the cache; None where each follows the one before. Tokens of a tree see the
            cache and their own path; their position is `start` plus their depth. Keys and values
            lie in the order of `tokens`, whatever their depth.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    outputs: int
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A command: one forward.

    Attributes:
        ticket: number of the command, counted from 0 without gaps.
        spans: sequences and their new tokens, packed one after another without padding.
        copies: pairs of blocks, from and to, copied before the forward in every layer: a block that
            two sequences share is copied before one of them writes to it.
        moves: pairs of slots (block x block size + place), from and to, moved before the forward
            and after the copies: an accepted path of a tree that did not lie at its front.
    """

    ticket: int
    spans: Sequence[Span]
    copies: Sequence[Pair] = ()
    moves: Sequence[Pair] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that are run."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def outputs(self) -> int:
        """Number of rows of logits."""
        return sum(span.outputs for span in self.spans)


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes of the model and its cache that the engine needs.

    Attributes:
        vocabulary: number of rows of logits' last axis.
        context: most tokens of a sequence; None where positions have no end.
        blocks: number of blocks of the cache.
        block_size: tokens of a block.
    """

    vocabulary: int
    context: int | None
    blocks: int
    block_size: int

    @property
    def longest(self) -> int:
        """Most tokens that one sequence may have: as many as context and cache take."""
        room = self.blocks * self.block_size
        return room if self.context is None else min(room, self.context)

    @property
    def what(self) -> Literal["context", "cache"]:
        """What decides `longest`."""
        return "context" if self.longest == self.context else "cache"


class RunnerLost(GulliverError):
    """The runner has failed or is late; the engine continues when it has been restarted."""


class Runner(Protocol):
    """Runs batches of one model, with the keys and values of all sequences.

    `LocalRunner` runs them in this process. One that runs ranks or stages sends each batch on and
    has several in flight; results come back in the order of submission.
    """

    @property
    def facts(self) -> Facts:
        """Sizes of the model and of its cache."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Number of batches that should be in flight; the engine submits no more."""
        ...

    def submit(self, batch: Batch) -> None:
        """Starts a batch; it may return before it is done."""
        ...

    def collect(self) -> Tensor:
        """Waits for the oldest batch that is in flight.

        Returns:
            Logits [batch.outputs, vocabulary] in float32, rows in the order of the spans.

        Raises:
            GulliverError: what ran it has failed; the engine can `replay` on another runner.
        """
        ...

    def close(self) -> None:
        """Frees memory and ends processes; batches in flight are dropped."""
        ...
