"""Compares the batches of ranks that share one model, and refuses unknown tokens and labels.

All ranks compare first, so they find the same and none waits for one that stopped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import RankGroup
from gulliver.errors import GulliverError
from gulliver.families import is_hugging_face, own_loss
from gulliver.parallel.pipeline import agree

TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class Vocabulary:
    """The ranges of a model's tokens and labels."""

    # Rows of its embedding; 0: not known.
    tokens: int = 0
    # Outputs of its head, where its loss compares them; 0: not known.
    labels: int = 0
    # The first label of a sample is not looked at.
    shifted: bool = False

    @classmethod
    def of(cls, model: Any) -> Vocabulary:
        """The vocabulary of a model that is whole yet."""
        if not is_hugging_face(model):
            return cls()
        try:
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            return cls()
        own = own_loss(model)
        compared = own is not None and isinstance(head, nn.Linear)
        tokens = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else 0
        labels = head.out_features if compared else 0
        return cls(tokens, labels, own is not None and own.shifted)

    def check(self, batch: Any) -> None:
        """Refuses tokens and labels out of the vocabulary, as one process does."""
        if not isinstance(batch, Mapping):
            return
        for name in TOKENS:
            ids = batch.get(name)
            if self.tokens and isinstance(ids, Tensor):
                self._check(name, "token", ids, (ids < 0) | (ids >= self.tokens), self.tokens)
        labels, ignored = batch.get("labels"), batch.get("ignore_index", -100)
        if not self.labels or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        labels = labels[..., 1:] if self.shifted else labels
        wrong = ((labels < 0) | (labels >= self.labels)) & (labels != ignored)
        self._check("labels", "label", labels, wrong, self.labels)

    def _check(self, name: str, what: str, values: Tensor, wrong: Tensor, count: int) -> None:
        if bool(wrong.any()):
            raise GulliverError(
                f"{name} has {what} {int(values[wrong][0])}, and the model's vocabulary has "
                f"{count} (0 to {count - 1})"
            )


def watch_batches(
    model: nn.Module, readers: Callable[[], Sequence[RankGroup]], vocabulary: Vocabulary
) -> None:
    """Compares what a model is called with over the ranks that share it, at every call."""

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = given[0].device if given else torch.device("cpu")
        agree({"args": args, **kwargs}, "", readers(), device, check=True)
        names = inspect.signature(module.forward).parameters
        vocabulary.check({**dict(zip(names, args, strict=False)), **kwargs})

    # Before others change what is given.
    model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)
