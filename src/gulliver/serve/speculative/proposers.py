"""`Proposal` and `Proposer`: candidate draft tokens with their confidence.

A `Proposer` uses texts or a draft model and ignores costs; `Speculator` (`speculator.py`) chooses
among its proposals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gulliver.serve.batch import Runner, Wanted


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate draft tokens: a tree whose first path comes first."""

    # Draft tokens; parents precede their children.
    tokens: Sequence[int]
    # Index of each token's parent, -1 for the sequence's last token.
    parents: Sequence[int]
    # The proposer's estimate of the probability that each token is right if its parent is. It is
    # calibrated by the outcomes, so its ranking matters more than its values.
    sure: Sequence[float]

    @property
    def depths(self) -> list[int]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


def chain(tokens: Sequence[int], sure: Sequence[float]) -> Proposal:
    return Proposal(tokens, list(range(-1, len(tokens) - 1)), sure)


class Proposer(ABC):
    """Proposes continuations; subclasses implement `propose`, and other methods if needed."""

    name: str
    """Name in messages."""
    free: bool
    """Whether proposing is nearly free; then proposals are always made and evaluated, even if none
    is verified."""
    apart: float = 0.0
    """Seconds of the last `propose` for work done once per sequence, such as its prompt."""

    def begin(self, runner: Runner) -> None:  # noqa: B027 - optional
        ...

    @abstractmethod
    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        """Returns proposals by sequence number, none deeper than `depth` or its sequence's room."""

    def unread(self, one: Wanted) -> int:
        """Number of a sequence's tokens that the next `propose` reads in the seconds of `apart`."""
        del one
        return 0

    def dropped(self, sequence: int) -> None:  # noqa: B027 - optional
        ...

    def close(self) -> None:  # noqa: B027 - optional
        ...


# Look-up drafts, without training: the tokens that followed the same context before.
#
# `Followers` counts what followed each context of up to `longest` tokens. `LookUp` counts a
# sequence's own tokens, and with ``shared=True`` also those of all sequences, so that completions
# of other requests are found as well (suffix decoding: Oliaro and others, arXiv 2411.04975; n-grams
# of the prompt: Saxena, prompt-lookup-decoding).


LONGEST, SHORTEST = 8, 2
"""Maximum and minimum length of the context to look up."""
KEPT = 1 << 18
"""Tokens kept over all sequences, in two halves: a full newer half replaces the older one. A token
takes about a kilobyte."""


class Followers:
    """Counts the tokens that followed contexts of `shortest` to `longest` tokens."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.longest, self.shortest = longest, shortest
        self.size = 0
        self._after: dict[tuple[int, ...], dict[int, int]] = {}

    def read(self, tokens: Sequence[int], begin: int) -> None:
        """Counts tokens from index `begin` on; earlier ones serve only as context."""
        for place in range(max(begin, self.shortest), len(tokens)):
            token = tokens[place]
            front = tuple(tokens[max(0, place - self.longest) : place])
            for cut in range(len(front) - self.shortest + 1):
                counts = self._after.setdefault(front[cut:], {})
                # Removed and inserted again, so that the newest of equally frequent tokens is last.
                counts[token] = counts.pop(token, 0) + 1
        self.size += len(tokens) - begin

    def next(self, context: tuple[int, ...]) -> tuple[int, float, int] | None:
        """Returns the most frequent token after the longest known suffix of the context."""
        for size in range(min(self.longest, len(context)), self.shortest - 1, -1):
            counts = self._after.get(context[-size:])
            if counts:
                token = max(reversed(counts), key=counts.__getitem__)
                often, of = counts[token], sum(counts.values())
                # One occurrence is weak evidence, and so is a short context.
                return token, often / (of + 0.5) * size / (size + 0.5), size
        return None


class LookUp(Proposer):
    """Proposes the tokens that followed the same context earlier in the text, or in any text."""

    free = True

    def __init__(self, shared: bool = False, longest: int = LONGEST, kept: int = KEPT) -> None:
        self.name = "suffix" if shared else "ngram"
        self._longest, self._kept = longest, kept
        self._own: dict[int, tuple[Followers, int]] = {}
        self._all = [Followers(longest), Followers(longest)] if shared else []

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        """Proposes chains that end where the continuation is unknown."""
        found = {}
        for one in wanted:
            tables = [self._read(one), *self._all]
            tokens: list[int] = []
            sure: list[float] = []
            context = tuple(one.tokens[-self._longest :])
            while len(tokens) < min(depth, one.most):
                known = [hit for table in tables if (hit := table.next(context)) is not None]
                if not known:
                    break
                token, chance, _ = max(known, key=lambda hit: (hit[2], hit[1]))
                tokens.append(token)
                sure.append(chance)
                context = (*context, token)[-self._longest :]
            if tokens:
                found[one.sequence] = chain(tokens, sure)
        return found

    def _read(self, one: Wanted) -> Followers:
        own, read = self._own.get(one.sequence) or (Followers(self._longest), 0)
        if read < len(one.tokens):
            own.read(one.tokens, read)
            if self._all:
                if self._all[0].size > self._kept // 2:
                    self._all = [Followers(self._longest), self._all[0]]
                self._all[0].read(one.tokens, read)
        self._own[one.sequence] = own, len(one.tokens)
        return own

    def dropped(self, sequence: int) -> None:
        self._own.pop(sequence, None)

    def close(self) -> None:
        self._own.clear()
        self._all = [Followers(self._longest) for _ in self._all]
