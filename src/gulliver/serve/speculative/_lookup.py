"""Look-up drafts, without training: what followed the same tokens before.

`Followers` counts what followed each context of up to `longest` tokens. `LookUp` reads a sequence's
own tokens into one, and with ``shared=True`` those of all sequences into another, so that answers
which others have had are found as well (suffix decoding: Oliaro and others, arXiv 2411.04975;
n-grams of the prompt: Saxena, prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from gulliver.serve._batch import Runner
from gulliver.serve._speculation import Wanted
from gulliver.serve.speculative._proposal import Proposal, Proposer, chain

LONGEST, SHORTEST = 8, 2
"""Most and fewest tokens of a context that is looked up."""
FEW_TOKENS = 16
"""Most tokens whose reading counts as drafting; that of more is measured apart."""
KEPT = 1 << 18
"""Tokens of all sequences that are kept, in two halves: the older one goes when the newer is full.
A token takes about a kilobyte."""


class Followers:
    """What followed contexts of `shortest` to `longest` tokens, and how often."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """Makes an empty table."""
        self.longest, self.shortest = longest, shortest
        self.size = 0
        self._after: dict[tuple[int, ...], dict[int, int]] = {}

    def read(self, tokens: Sequence[int], begin: int) -> None:
        """Reads tokens from an index on; those before are contexts only."""
        for place in range(max(begin, self.shortest), len(tokens)):
            token = tokens[place]
            front = tuple(tokens[max(0, place - self.longest) : place])
            for cut in range(len(front) - self.shortest + 1):
                counts = self._after.setdefault(front[cut:], {})
                # Taken out and put in again: the newest of equally frequent ones stands last.
                counts[token] = counts.pop(token, 0) + 1
        self.size += len(tokens) - begin

    def next(self, context: tuple[int, ...]) -> tuple[int, float, int] | None:
        """The most frequent token after the longest end of a context that is known."""
        for size in range(min(self.longest, len(context)), self.shortest - 1, -1):
            counts = self._after.get(context[-size:])
            if counts:
                token = max(reversed(counts), key=counts.__getitem__)
                often, of = counts[token], sum(counts.values())
                # One occurrence is weak evidence, and so is a short context.
                return token, often / (of + 0.5) * size / (size + 0.5), size
        return None


class LookUp(Proposer):
    """Proposes what followed the same tokens earlier in the text, or in any text."""

    free = True

    def __init__(self, shared: bool = False, longest: int = LONGEST, kept: int = KEPT) -> None:
        """Makes a proposer that has read nothing."""
        self.name = "suffix" if shared else "ngram"
        self._longest, self._kept, self.apart = longest, kept, 0.0
        self._own: dict[int, tuple[Followers, int]] = {}
        self._all = [Followers(longest), Followers(longest)] if shared else []

    def begin(self, runner: Runner) -> None:
        """Needs nothing of the runner."""

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        """Proposes chains, as long as what follows is known."""
        found = {}
        self.apart = 0.0
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
        """Reads what is new of a sequence."""
        begun, unread = perf_counter(), self.unread(one)
        own, read = self._own.get(one.sequence) or (Followers(self._longest), 0)
        if read < len(one.tokens):
            own.read(one.tokens, read)
            if self._all:
                if self._all[0].size > self._kept // 2:
                    self._all = [Followers(self._longest), self._all[0]]
                self._all[0].read(one.tokens, read)
        self._own[one.sequence] = own, len(one.tokens)
        if unread:
            self.apart += perf_counter() - begun
        return own

    def unread(self, one: Wanted) -> int:
        """Tokens that have not been read, where they are many."""
        known = self._own.get(one.sequence)
        lacking = len(one.tokens) - (known[1] if known else 0)
        return lacking if lacking > FEW_TOKENS else 0

    def dropped(self, sequence: int) -> None:
        """Forgets a sequence's own table."""
        self._own.pop(sequence, None)

    def close(self) -> None:
        """Forgets all texts."""
        self._own.clear()
        self._all = [Followers(self._longest) for _ in self._all]
