"""`Proposal` and `Proposer`: guesses with how sure they are, before any is chosen.

A `Proposer` knows texts or a draft model, and nothing of costs; `Speculator` (`_speculator.py`)
chooses among what it proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gulliver.serve._batch import Runner
from gulliver.serve._speculation import Wanted


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence, a tree that begins with its first path."""

    # Guessed tokens; parents precede their children.
    tokens: Sequence[int]
    # Index of each one's parent, -1 for the sequence's last token.
    parents: Sequence[int]
    # Chance of each to be right where its parent is, as the proposer has it; it is calibrated by
    # what becomes of guesses, so that its order counts more than its size.
    sure: Sequence[float]

    @property
    def depths(self) -> list[int]:
        """Depth of each token, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


def chain(tokens: Sequence[int], sure: Sequence[float]) -> Proposal:
    """Makes a proposal whose tokens follow one another."""
    return Proposal(tokens, list(range(-1, len(tokens) - 1)), sure)


class Proposer(Protocol):
    """Guesses what follows sequences."""

    name: str
    """Name in what is said to the user."""
    free: bool
    """Whether guesses cost next to nothing: they are then made, and learnt from, also while none
    is verified."""
    apart: float
    """Seconds of the last `propose` that are spent once for a sequence, such as on its prompt."""

    def begin(self, runner: Runner) -> None:
        """Learns which runner verifies."""
        ...

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        """Proposals by number of sequence, none deeper than `depth` or its sequence's room."""
        ...

    def unread(self, one: Wanted) -> int:
        """Tokens of a text to read before anything is guessed, apart from the last few."""
        return 0

    def dropped(self, sequence: int) -> None:
        """Learns that a sequence has ended."""
        ...

    def close(self) -> None:
        """Lets go of memory."""
        ...
