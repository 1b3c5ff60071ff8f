"""`GlideDraft`: a `Glide` that guesses for the engine, over its own pages and the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._batch import Batch, Runner, Span
from gulliver.serve._measure import ModelShape, likeness
from gulliver.serve._native import NativeAttention, native_attention
from gulliver.serve._pages import LayerShape, Pages
from gulliver.serve.speculative._cache import DraftCache
from gulliver.serve.speculative._glide import Glide
from gulliver.serve.speculative._model import Beside, ModelDraft, New

ALIKE = 0.9
"""Least likeness of a draft's target: other weights are at 0, those in int4 or tuned above this."""


@dataclass(frozen=True)
class _Look:
    """Tokens of a sequence that look at the target's cache."""

    # Each sees a key more than the one before it, the last all `start + count`. The names are those
    # that the kernel reads.

    first: int
    count: int
    start: int
    blocks: Tensor
    mask: None = None


class Glimpses:
    """Attention over keys and values that the target has cached; nothing is written."""

    def __init__(self, pages: Pages, layers: Sequence[int]) -> None:
        """Keeps the target's pages."""
        self._pages, self._layers = pages, layers
        keys = pages.keys[layers[0]]
        kernel = native_attention() if keys.device.type == "cpu" else None
        fits = kernel is not None and kernel.takes(keys.dtype, keys.shape[-1])
        self._native: NativeAttention | None = kernel if fits else None

    def begin(self, looks: Sequence[_Look], tokens: int) -> None:
        """Takes the tokens that look, among so many packed ones."""
        self._looks = [look for look in looks if look.count > 0]
        self._all = sum(look.count for look in looks) == tokens
        self._prepared = None
        if self._native is not None and self._looks:
            self._prepared = self._native.prepare(
                self._looks, torch.zeros(tokens, dtype=torch.int64)
            )

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Attends: see `Glimpse` of `_glide.py`; tokens that see no key get zeros."""
        query = query[0]
        shape = query.shape[1], query.shape[0], query.shape[2]
        out = query.new_empty(shape) if self._all else query.new_zeros(shape)
        keys, values = (
            kept[self._layers[layer]] for kept in (self._pages.keys, self._pages.values)
        )
        scale = query.shape[-1] ** -0.5
        if self._prepared is not None and self._native is not None:
            self._native.run(self._prepared, query, keys, values, out, scale, None, None)
            return out[None]
        for look in self._looks:
            at, end = slice(look.first, look.first + look.count), look.start + look.count
            key, value = (
                kept[look.blocks].transpose(0, 1).flatten(1, 2)[:, :end].to(query.dtype)
                for kept in (keys, values)
            )
            seen = torch.ones(look.count, end, dtype=torch.bool, device=query.device)
            near = F.scaled_dot_product_attention(
                query[None, :, at],
                key[None],
                value[None],
                attn_mask=seen.tril(look.start),
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )
            out[at] = near[0].transpose(0, 1)
        return out[None]


class GlideDraft(ModelDraft):
    """Guesses by a `Glide`."""

    name = "glide"

    def __init__(self, model: Glide, beside: Beside = 3) -> None:
        """Keeps the model; memory is taken when the target's runner is known."""
        self._model = model.eval().requires_grad_(False)
        super().__init__(DraftCache(0, 1), None, beside)

    def begin(self, runner: Runner) -> None:
        """Takes as many blocks as the target has."""
        facts, config = runner.facts, self._model.config
        if facts.vocabulary != config.vocabulary:
            raise GulliverError(
                f"the draft has a vocabulary of {config.vocabulary} tokens and the model one of "
                f"{facts.vocabulary}: give a draft that was trained for this model"
            )
        measured: ModelShape | None = getattr(runner, "measured", None)
        if measured is not None:
            check_sign(config.target_sign, measured.sign)
        pages: Pages | None = getattr(runner, "pages", None)
        if config.glimpses:
            if pages is None:
                raise GulliverError(
                    "this draft looks at the model's keys and values, which are not in this "
                    "process: serve on one device, or take a small model or a look-up"
                )
            check_pages(config.glimpses, config.target_dim, pages)
            self._glimpses = Glimpses(pages, config.glimpses)
        self._cache = DraftCache(facts.blocks, facts.block_size)
        self._known.clear()
        weight = self._model.embedding.weight
        shape = LayerShape(config.heads, config.dim)
        self._pages = Pages(
            [shape] * config.layers, facts.blocks, facts.block_size, weight.dtype, weight.device
        )

    @torch.inference_mode()
    def _run(self, news: Sequence[New], rows: bool) -> Tensor:
        spans, looks, ends, first = [], [], [], 0
        only_last = self._model.config.layers == 1
        for index, new in enumerate(news):
            count = len(new.tokens)
            blocks = list(self._cache.blocks(new.one.sequence))
            spans.append(Span(new.one.sequence, new.start, list(new.tokens), blocks, 1))
            # The last token sees what lies before it in the target's cache.
            seen = min(new.start + count - 1, new.one.cached)
            looking = min(1 if only_last else count, seen)
            table = torch.tensor(new.one.blocks, dtype=torch.int64)
            at = index if only_last else first + count - looking
            looks.append(_Look(at, looking, seen - looking, table))
            first += count
            ends.append(first - 1)
        pages, device = self._pages, self._model.embedding.weight.device
        pages.begin(Batch(0, spans))
        tokens = torch.tensor([t for span in spans for t in span.tokens], device=device)
        last = torch.tensor(ends, device=device)
        scale = self._model.config.dim**-0.5

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return pages.attend(layer, query[0], key[0], value[0], scale)[None]

        def none(layer: int, query: Tensor) -> Tensor:
            raise AssertionError("a draft without glimpses looks nowhere")

        glimpse: Any = none
        if self._model.config.glimpses:
            self._glimpses.begin(looks, len(looks) if only_last else first)
            glimpse = _last_of(self._glimpses, last, self._model.config.layers, only_last, first)
        x = self._model.hidden(tokens[None], pages.positions[None], attend, glimpse, last)
        return self._model.logits(x[0]).float() if rows else torch.empty(0)

    def close(self) -> None:
        """Lets go of the pages."""
        self._pages.keys.clear()
        self._pages.values.clear()


def _last_of(glimpses: Glimpses, last: Tensor, layers: int, only_last: bool, tokens: int) -> Any:
    """Glimpses of a draft whose last layer has the last tokens of sequences alone."""
    if only_last:
        return glimpses

    def glimpse(layer: int, query: Tensor) -> Tensor:
        if layer < layers - 1:
            return glimpses(layer, query)
        # Put where their keys are counted, and taken out again.
        whole = query.new_zeros(*query.shape[:2], tokens, query.shape[-1])
        whole[:, :, last] = query
        return glimpses(layer, whole)[:, last]

    return glimpse


def check_sign(mine: Sequence[float], theirs: Sequence[float]) -> None:
    """Refuses a model that a draft was not trained for, though its sizes are the target's."""
    if (found := likeness(mine, theirs)) < ALIKE:
        raise GulliverError(
            "the draft was trained for another model: what that one has of a token is unlike what "
            f"this one has ({found:.2f}, at least {ALIKE} of 1 is asked for): give the model's own "
            "draft, gulliver speculate train makes one"
        )


def check_pages(layers: Sequence[int], dim: int, pages: Pages) -> None:
    """Refuses a target that has other keys than the draft was trained with."""
    if max(layers) >= len(pages.keys) or pages.keys[max(layers)].shape[-1] != dim:
        raise GulliverError(
            f"the draft looks at layer {max(layers)}, with heads of {dim}, and this model has "
            f"{len(pages.keys)} layers with heads of {pages.keys[-1].shape[-1]}: give a draft that "
            "was trained for this model"
        )
