"""`SmallModel`: a draft by another, smaller language model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._batch import Batch, Runner, Span
from gulliver.serve._local import LocalRunner
from gulliver.serve.speculative._cache import DraftCache
from gulliver.serve.speculative._model import Beside, ModelDraft, New


class SmallModel(ModelDraft):
    """Guesses by a model of its own, with its own pages."""

    name = "small model"

    def __init__(
        self,
        model: Any,
        cache_tokens: int | None = None,
        sequences: int = 64,
        beside: Beside = 3,
    ) -> None:
        """Takes memory for the model's cache."""
        self._runner = LocalRunner(model, cache_tokens=cache_tokens, sequences=sequences)
        facts = self._runner.facts
        super().__init__(DraftCache(facts.blocks, facts.block_size), facts.longest, beside)

    def begin(self, runner: Runner) -> None:
        """Compares the vocabularies."""
        mine, theirs = self._runner.facts.vocabulary, runner.facts.vocabulary
        if mine != theirs:
            raise GulliverError(
                f"the draft has a vocabulary of {mine} tokens and the model one of {theirs}: give "
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
        """Gives the model back, and the memory of its cache."""
        self._runner.close()


def check_tokenizers(draft: Any | None, target: Any | None) -> None:
    """Refuses a draft that writes texts with other tokens."""
    if draft is None or target is None:
        return
    mine, theirs = draft.get_vocab(), target.get_vocab()
    odd = next((token for token in theirs if mine.get(token) != theirs[token]), None)
    odd = odd or next((token for token in mine if token not in theirs), None)
    if odd is not None:
        raise GulliverError(
            f"the draft is of another vocabulary: token {odd!r} is number {mine.get(odd)} in it "
            f"and {theirs.get(odd)} in the model; give a draft that was trained with the model's "
            "tokenizer"
        )
