"""`Batch`: all that a forward must know, as plain numbers.

A batch is the command that the engine sends to whatever runs the model. It has no tensors and knows
no model, so that it can be pickled to other processes, and every stage and rank finds in it what it
must do: which blocks to copy, which tokens to run, where their keys and values go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve.sampling import SamplingParameters

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


# The seam of speculation: what a drafter gives, and how drafts are verified exactly.


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence: a chain, or a tree.

    Attributes:
        tokens: guessed tokens; a parent stands before its children.
        parents: index of each one's parent in `tokens`, -1 for the sequence's last token; None for
            a chain.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that could be continued by drafts in the next batch.

    Attributes:
        sequence: number of the sequence, the same as in `Span`.
        tokens: prompt and answer so far.
        cached: keys and values of so many of its first tokens lie in the cache, in their places.
        blocks: block table.
        most: most drafted tokens that context, cache and `max_tokens` leave room for.
        sampling: how its tokens are drawn.
        seed: what they are drawn from.
        sample: number of the answer among the request's.
        prompt: number of tokens of the prompt.
    """

    sequence: int
    tokens: Sequence[int]
    cached: int
    blocks: Sequence[int]
    most: int
    sampling: SamplingParameters
    seed: int = 0
    sample: int = 0
    prompt: int = 0


class Drafter(Protocol):
    """Guesses tokens, which the model then verifies in one forward.

    A class that derives from it need not write the methods by which it only learns.
    """

    def begin(self, runner: Runner) -> None:
        """Learns which runner verifies, at the start and after each replay on another one."""
        ...

    def rests(self, sequences: int) -> bool:
        """Whether nothing will be drafted for so many sequences, so that none need be gathered."""
        return False

    def draft(self, wanted: Sequence[Wanted], budget: int) -> Mapping[int, Draft]:
        """Drafts for sequences of the next batch.

        Args:
            wanted: sequences, the oldest first.
            budget: most tokens of all drafts together; the batch has room for no more.

        Returns:
            Drafts by number of sequence; a sequence without one goes on by one token.
        """
        ...

    def ran(self, batch: Batch, seconds: float) -> None:
        """Learns what a batch took.

        Args:
            batch: batch, with drafts or without.
            seconds: time from its submission, or from the end of the batch before it, to its last
                token.
        """
        ...

    def verified(self, sequence: int, draft: Draft, path: Sequence[int], tokens: int) -> None:
        """Learns what became of a draft.

        Args:
            sequence: number of the sequence.
            draft: draft that was verified.
            path: indices in `draft.tokens` that were accepted, from the root on.
            tokens: number of tokens that the round gave, `len(path) + 1` unless the text ended.
        """
        ...

    def dropped(self, sequence: int) -> None:
        """Learns that a sequence has ended: what is kept of it can go."""
        ...

    def close(self) -> None:
        """Frees memory."""
        ...


def children(draft: Draft) -> dict[tuple[int, int], int]:
    """Index of a child by its parent and token, the first of equal ones."""
    parents = draft.parents if draft.parents is not None else range(-1, len(draft.tokens) - 1)
    found: dict[tuple[int, int], int] = {}
    for index, (parent, token) in enumerate(zip(parents, draft.tokens, strict=True)):
        found.setdefault((parent, token), index)
    return found


def walk(draft: Draft | None, drawn: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """Walks down a draft with the tokens that the model draws; returns them and the path.

    `drawn` is given a row of the span's logits (0 is the last token before the draft, `i + 1` the
    draft's token i) and the depth.
    """
    # At each node the next token is drawn from the model's own distribution, as if nothing had been
    # drafted. If it is a child of the node, the model has run that child already and the walk
    # continues with its logits. So the tokens are those of a run without drafts, draw for draw, for
    # any drafts: a draw is a function of logits, seed and place. Also for drafts that are drawn
    # with the same noise, which are right more often than the likeliest tokens at high
    # temperatures.
    tokens, path = [drawn(0, 0)], []
    known = children(draft) if draft else {}
    node = -1
    while (node, tokens[-1]) in known:
        node = known[node, tokens[-1]]
        path.append(node)
        tokens.append(drawn(node + 1, len(path)))
    return tokens, path
