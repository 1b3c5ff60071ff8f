"""`DraftCache`: tracks the sequences cached in a draft model's own pages.

A draft model runs ahead of the text; rejected tokens are dropped by reducing a sequence's length.
When blocks run out, the least recently used sequences are evicted and recomputed later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve.batch import Batch, Runner, Span, Wanted
from gulliver.serve.local import LocalRunner
from gulliver.serve.sampling import DrawRow, draw
from gulliver.serve.scheduler import BlockPool
from gulliver.serve.speculative.proposers import Proposal, Proposer


@dataclass
class Cached:
    """Tokens whose keys and values are in blocks."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class DraftCache:
    """Sequences and their blocks."""

    def __init__(self, blocks: int, size: int) -> None:
        self.pool = BlockPool(blocks, size)
        self._kept: OrderedDict[int, Cached] = OrderedDict()

    def valid(self, sequence: int, tokens: Sequence[int], known: int) -> int:
        """Returns the length of the cached prefix of a text; drops everything after it."""
        kept = self._kept.setdefault(sequence, Cached())
        self._kept.move_to_end(sequence)
        end = min(len(kept.tokens), len(tokens) - 1)
        same = min(known, end)
        while same < end and kept.tokens[same] == tokens[same]:
            same += 1
        del kept.tokens[same:]
        return same

    def extend(self, sequence: int, tokens: Sequence[int], others: Collection[int]) -> bool:
        """Allocates blocks for more tokens, evicting others; False if too few can be freed."""
        kept = self._kept[sequence]
        lacking = -(-(len(kept.tokens) + len(tokens)) // self.pool.size) - len(kept.blocks)
        while lacking > self.pool.free:
            victim = next((n for n in self._kept if n != sequence and n not in others), None)
            if victim is None:
                return False
            self.drop(victim)
        kept.blocks += self.pool.take(max(0, lacking)) or []
        kept.tokens += tokens
        return True

    def blocks(self, sequence: int) -> list[int]:
        return self._kept[sequence].blocks

    def drop(self, sequence: int) -> None:
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self.pool.release(kept.blocks)


# `ModelDraft`: base class of draft models, which guess token by token for all sequences.
#
# A subclass runs the model: `_run` takes new tokens of sequences and returns the logits of each
# sequence's last token. Read `propose`: it runs text that the model has not seen, then one token at
# a time.


CHUNK = 512
"""Maximum prompt tokens in one forward of a draft model."""
SHORT = 16
"""Maximum unseen tokens that run in the same forward as a text's last token."""


# [Note: sampled requests] A draft is sampled from the draft model's distribution in the same way as
# the target's token will be, with the same parameters and the same noise per token, so the two
# agree as often as their distributions allow, without changing any sample: see `serve/sampling.py`.
@dataclass
class _Path:
    """An unfinished proposal: its first path, and alternatives to each token of it."""

    one: Wanted
    tokens: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    beside: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def proposal(self) -> Proposal:
        """Returns the first path, followed by the other children of its nodes."""
        parents = list(range(-1, len(self.tokens) - 1))
        tokens, sure = list(self.tokens), list(self.sure)
        for parent, (others, chances) in enumerate(self.beside, -1):
            tokens += others
            sure += chances
            parents += [parent] * len(others)
        return Proposal(tokens, parents, sure)


@dataclass(frozen=True, slots=True)
class New:
    """New tokens of a sequence for a draft model to run."""

    one: Wanted
    # Tokens before them in the draft's cache.
    start: int
    tokens: Sequence[int]
    # Number of guesses among them; 0 if the last one is the text's last token.
    ahead: int


class ModelDraft(Proposer):
    """Drafts with a model that has its own cache."""

    free = False
    name = "model"
    names: Tensor | None = None
    """Tokens of the columns of its logits, if these are only a part of the `vocabulary`."""
    vocabulary = 0

    def __init__(self, cache: DraftCache, context: int | None, beside: int = 0) -> None:
        self._cache, self._context, self.beside = cache, context, beside
        self._known: dict[int, int] = {}

    @abstractmethod
    def _run(self, news: Sequence[New], rows: bool) -> Tensor: ...

    def propose(self, wanted: Sequence[Wanted], depth: int) -> Mapping[int, Proposal]:
        numbers = {one.sequence for one in wanted}
        news = []
        for one in wanted:
            if self._context is not None and len(one.tokens) + depth > self._context:
                continue
            known = self._known.get(one.sequence, 0)
            start = self._cache.valid(one.sequence, one.tokens, known)
            tokens = one.tokens[start:]
            if self._cache.extend(one.sequence, tokens, numbers):
                self._known[one.sequence] = len(one.tokens)
                news.append(New(one, start, tokens, 0))
        paths = {new.one.sequence: _Path(new.one) for new in news}
        news = self._caught_up(news)
        for number in range(depth):
            if not news:
                break
            logits = self._run(news, True)
            more = []
            for new, token in zip(news, self._drawn(logits, news, paths, number), strict=True):
                one, deeper = new.one, number + 1 < min(depth, new.one.most)
                if deeper and self._cache.extend(one.sequence, [token], numbers):
                    more.append(New(one, len(one.tokens) + number, [token], number + 1))
            news = more
        return {number: path.proposal() for number, path in paths.items() if path.tokens}

    def unread(self, one: Wanted) -> int:
        if self._context is not None and len(one.tokens) >= self._context:
            return 0  # never read
        unread = len(one.tokens) - self._known.get(one.sequence, 0)
        return unread if unread > SHORT else 0

    def _caught_up(self, news: Sequence[New]) -> list[New]:
        """Runs long unseen texts in chunks; returns the short remainder."""
        begun, left, chunk, size = perf_counter(), [], [], 0
        for new in news:
            start, tokens = new.start, new.tokens
            while len(tokens) > SHORT:
                part = tokens[: min(CHUNK - size, len(tokens) - 1)]
                chunk.append(New(new.one, start, part, 0))
                start, tokens, size = start + len(part), tokens[len(part) :], size + len(part)
                if size >= CHUNK:
                    self._run(chunk, False)
                    chunk, size = [], 0
            left.append(New(new.one, start, tokens, 0))
        if chunk:
            self._run(chunk, False)
        self.apart = perf_counter() - begun
        return left

    def _drawn(
        self, logits: Tensor, news: Sequence[New], paths: Mapping[int, _Path], number: int
    ) -> list[int]:
        """Samples the next token of each path, and records it with its alternatives."""
        rows = [self._row(new.one, paths, number) for new in news]
        names = self.names
        simple = all(row.sampling.greedy and not row.sampling.penalised for row in rows)
        if names is not None and not simple:
            wide = logits.new_full((len(logits), self.vocabulary), -torch.inf)
            logits, names = wide.index_copy_(1, names, logits), None
        chances = logits.softmax(-1)
        best = chances.topk(min(self.beside + 1, logits.shape[-1]), -1)
        likely = best.indices if names is None else names[best.indices]
        if simple:
            tokens, own = likely[:, 0].tolist(), best.values[:, 0].tolist()
        else:
            drawn = draw(logits, rows)
            tokens = [token.id if token is not None else 0 for token in drawn]
            own = chances[range(len(tokens)), tokens].tolist()
        for new, token, sure, others, values in zip(
            *(news, tokens, own, likely.tolist(), best.values.tolist()), strict=True
        ):
            path = paths[new.one.sequence]
            path.tokens.append(token)
            path.sure.append(sure)
            kept = [(o, v) for o, v in zip(others, values, strict=True) if o != token]
            kept = kept[: self.alternatives(sure)]
            path.beside.append(([other for other, _ in kept], [value for _, value in kept]))
        return tokens

    def alternatives(self, sure: float) -> int:
        """Number of alternatives to a token, by the model's confidence in it."""
        del sure
        return self.beside

    def _row(self, one: Wanted, paths: Mapping[int, _Path], number: int) -> DrawRow:
        place = len(one.tokens) - one.prompt + number
        history: tuple[int, ...] = ()
        if one.sampling.penalised:
            history = (*one.tokens, *paths[one.sequence].tokens)
        return DrawRow(one.sampling, one.seed, one.sample, place, history, one.prompt)

    def dropped(self, sequence: int) -> None:
        self._known.pop(sequence, None)
        self._cache.drop(sequence)


# `SmallModel`: drafts with another, smaller language model of transformers.


class SmallModel(ModelDraft):
    """Drafts with a separate model that has its own pages."""

    name = "small model"

    def __init__(
        self,
        model: Any,
        cache_tokens: int | None = None,
        sequences: int = 64,
        beside: int = 3,
    ) -> None:
        self._runner = LocalRunner(model, cache_tokens=cache_tokens, sequences=sequences)
        facts = self._runner.facts
        super().__init__(DraftCache(facts.blocks, facts.block_size), facts.longest, beside)

    def begin(self, runner: Runner) -> None:
        mine, theirs = self._runner.facts.vocabulary, runner.facts.vocabulary
        if mine != theirs:
            raise GulliverError(
                f"the draft has a vocabulary of {mine} tokens, but the model one of {theirs}: use "
                "a draft with the model's own vocabulary"
            )

    def _run(self, news: Sequence[New], rows: bool) -> Tensor:
        spans = [
            Span(
                *(new.one.sequence, new.start, list(new.tokens)),
                *(list(self._cache.blocks(new.one.sequence)), int(rows)),
            )
            for new in news
        ]
        self._runner.submit(Batch(0, spans))
        logits = self._runner.collect()
        return logits if rows else torch.empty(0)

    def close(self) -> None:
        self._runner.close()


def check_tokenizers(draft: Any | None, target: Any | None) -> None:
    if draft is None or target is None:
        return
    mine, theirs = draft.get_vocab(), target.get_vocab()
    odd = next((token for token in theirs if mine.get(token) != theirs[token]), None)
    odd = odd or next((token for token in mine if token not in theirs), None)
    if odd is not None:
        raise GulliverError(
            f"the draft has another vocabulary: token {odd!r} is number {mine.get(odd)} in it, but "
            f"{theirs.get(odd)} in the model; use a draft that was trained with the model's "
            "tokenizer"
        )
