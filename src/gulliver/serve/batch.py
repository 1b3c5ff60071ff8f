"""`Batch`: everything a forward needs, as plain numbers.

A batch is the command that the engine sends to a runner. It holds no tensors and no model, so it
can be pickled to other processes. It tells every stage and rank which blocks to copy, which tokens
to run, and where to write their keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve.sampling import SamplingParams

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence.

    Attributes:
        sequence: sequence number.
        start: number of tokens whose keys and values are already cached.
        tokens: new tokens: one when decoding, more for a prompt or drafts.
        blocks: the sequence's blocks in order, with room for `start + len(tokens)` tokens.
        outputs: number of trailing tokens that need logits; 0 for a prompt chunk.
        parents: index of each new token's parent, -1 for the last token in the cache; None for a
            chain. Tokens of a tree attend to the cache and their own path; their position is
            `start` plus their depth. Keys and values are stored in the order of `tokens`, whatever
            their depth.
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
        ticket: command number, counted from 0 without gaps.
        spans: sequences and their new tokens, packed one after another without padding.
        copies: pairs of blocks, source and target, copied in every layer before the forward: a
            shared block is copied before one of its sequences writes to it.
        moves: pairs of slots (block x block size + offset), source and target, moved after the
            copies and before the forward, for accepted paths within their tree.
    """

    ticket: int
    spans: Sequence[Span]
    copies: Sequence[Pair] = ()
    moves: Sequence[Pair] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens to run."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def outputs(self) -> int:
        """Number of rows of logits."""
        return sum(span.outputs for span in self.spans)


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes of the model and its cache, as needed by the engine."""

    vocabulary: int
    # Maximum tokens of a sequence; None if unlimited.
    context: int | None
    # Number of blocks of the cache.
    blocks: int
    block_size: int

    @property
    def longest(self) -> int:
        room = self.blocks * self.block_size
        return room if self.context is None else min(room, self.context)

    @property
    def what(self) -> Literal["context", "cache"]:
        return "context" if self.longest == self.context else "cache"


class RunnerLost(GulliverError):
    """The runner failed or timed out; the engine can continue after a restart."""


class Runner(Protocol):
    """Runs batches of one model, with the keys and values of all sequences.

    `LocalRunner` runs them in this process. Runners with several ranks send each batch to them, and
    may have several in flight; results return in the order of submission.
    """

    @property
    def facts(self) -> Facts:
        """Sizes of the model and of its cache."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Number of batches to keep in flight; the engine submits no more."""
        ...

    def submit(self, batch: Batch) -> None:
        """Starts a batch; it may return before the batch is done."""
        ...

    def collect(self) -> Tensor:
        """Waits for the oldest batch in flight.

        Returns:
            Logits [batch.outputs, vocabulary] in float32, rows in the order of the spans.

        Raises:
            GulliverError: a process failed; the engine can `replay` on another runner.
        """
        ...

    def close(self) -> None:
        """Frees memory and ends processes; batches in flight are dropped."""
        ...


# Interface of speculation: drafts, drafters, and how drafts are verified exactly.


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence: a chain, or a tree.

    Attributes:
        tokens: draft tokens; parents precede their children.
        parents: index of each token's parent in `tokens`, -1 for the sequence's last token; None
            for a chain.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that may get a draft in the next batch."""

    sequence: int
    tokens: Sequence[int]
    # Number of leading tokens whose keys and values are in the cache, in order.
    cached: int
    blocks: Sequence[int]
    # Maximum number of draft tokens that context, cache and `max_tokens` allow.
    most: int
    sampling: SamplingParams
    seed: int = 0
    # Index of the completion in the request.
    sample: int = 0
    # Number of prompt tokens.
    prompt: int = 0


class Drafter(Protocol):
    """Proposes draft tokens, which the model then verifies in one forward.

    Subclasses may omit the methods that only observe.
    """

    def begin(self, runner: Runner) -> None:
        """Receives the target's runner, at the start and after each replay on another one."""
        ...

    def rests(self, sequences: int) -> bool:
        """Whether drafting is off for this many sequences, so that `draft` need not be called."""
        return False

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        """Drafts for sequences of the next batch.

        Args:
            wanted: sequences, oldest first.
            budget: maximum total draft tokens in the batch.

        Returns:
            Drafts by sequence number; a sequence without one advances by one token.
        """
        ...

    def ran(self, batch: Batch, seconds: float) -> None:
        """Observes the duration of a batch.

        Args:
            batch: batch, with or without drafts.
            seconds: time from its submission, or from the end of the previous batch, to its last
                token.
        """
        ...

    def verified(self, sequence: int, draft: Draft, path: Sequence[int], tokens: int) -> None:
        """Observes the outcome of a draft.

        Args:
            sequence: sequence number.
            draft: verified draft.
            path: accepted indices in `draft.tokens`, from the root.
            tokens: number of new tokens, `len(path) + 1` unless the text ended.
        """
        ...

    def dropped(self, sequence: int) -> None:
        """Frees the state of a sequence that has ended."""
        ...

    def close(self) -> None:
        """Frees memory."""
        ...


def children(draft: Draft) -> dict[tuple[int, int], int]:
    """Maps each parent and token to the index of the child, the first one of equal children."""
    parents = draft.parents if draft.parents is not None else range(-1, len(draft.tokens) - 1)
    found: dict[tuple[int, int], int] = {}
    for index, (parent, token) in enumerate(zip(parents, draft.tokens, strict=True)):
        found.setdefault((parent, token), index)
    return found


def walk(draft: Draft | None, drawn: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """Walks a draft along the sampled tokens; returns these tokens and the accepted path."""
    # `drawn` takes a row of the span's logits (0: the last token before the draft, i + 1: the
    # draft's token i) and the depth.
    # At each node the next token is sampled from the model's own distribution, as without drafts.
    # If it is a child of the node, the model has already run that child, and the walk continues
    # with its logits. A sample is a function of logits, seed and position, so the tokens equal
    # those of a run without drafts, for any drafts. This includes drafts sampled with the same
    # noise, which at high temperatures are accepted more often than the likeliest tokens.
    tokens, path = [drawn(0, 0)], []
    known = children(draft) if draft else {}
    node = -1
    while (node, tokens[-1]) in known:
        node = known[node, tokens[-1]]
        path.append(node)
        tokens.append(drawn(node + 1, len(path)))
    return tokens, path
