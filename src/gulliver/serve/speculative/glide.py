"""`Glide`: a draft model of one or a few layers that attends to the target's cached keys.

GliDe with a CaPE (Du and others, ICML 2024, arXiv 2402.02082): each layer has self-attention,
attention to the cached keys and values of a layer of the target, and a feed-forward part. Unlike in
the paper, the second attention has a normalization before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.checkpoint.files import read_json, write_json, write_tensors
from gulliver.errors import GulliverError
from gulliver.options import Options
from gulliver.serve.attention import LayerShape, PagedSpan, Pages, attend_gathered, gather_blocks
from gulliver.serve.batch import Batch, Runner, Span
from gulliver.serve.speculative.small_model import DraftCache, ModelDraft, New

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: layer number, query [B, H, S, D], key and value; returns [B, S, H, D]."""
Glimpse = Callable[[int, Tensor], Tensor]
"""Attention to the target: layer number, query [B, H', S, D']; returns [B, S, H', D']."""


# [Note: scales] The target's values have a root mean square of 2 to 3, and embeddings, initialized
# at 0.02, are a hundred times smaller. An optimizer that moves all weights equally would then
# change the attention to the target far more than the embeddings, and the draft would learn worse
# than without the target. So each head's attention output is normalized, with a learned gain, and
# embeddings are multiplied by the square root of the width.
#
# [Note: block mask] During drafting the target's cache ends at the last verified token: the first
# guess sees all tokens before it, the d-th all but d - 1. In training, positions are divided into
# blocks of `block` with a random offset, and a token sees the target's keys of earlier blocks, so
# each depth up to `block` is trained as it is used. ``block=1`` is training without the mask.
#
# [Note: distillation] A guess is right if it equals the target's token, not the text's. So a draft
# learns the target's distribution of each next token, which is also more informative than a single
# token.
#
# [Note: drafted tokens] With one layer, most of a draft's time is its head, which reads a row for
# each token of the vocabulary. So the head only has rows of the most frequent tokens (FR-Spec: Zhao
# and others, arXiv 2502.14856); the others are never drafted.
#
# The layers have no cache; the attention functions are passed to them.
@dataclass(frozen=True)
class GlideConfig(Options):
    """Sizes of a draft model, and facts about its target."""

    vocabulary: int
    hidden: int
    # Number of heads of its self-attention.
    heads: int
    feed_forward: int
    layers: int
    # Target layers that the draft's layers attend to, one each; empty for a plain draft.
    glimpses: tuple[int, ...]
    # Heads of queries, and size of a head of the target.
    target_heads: int
    target_dim: int
    # Block size of the mask with which it was trained.
    block: int = 5
    # Number of tokens that it can draft, the most frequent ones of its training data; 0 for all.
    drafted: int = 0

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


class GlideLayer(nn.Module):
    """Self-attention, attention to the target's tokens, and a feed-forward part."""

    def __init__(self, config: GlideConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        width, wide = config.hidden, config.feed_forward
        self.own_norm, self.wide_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.own_out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)
        if config.glimpses:
            theirs = config.target_heads * config.target_dim
            self.glimpse_norm = nn.RMSNorm(width, eps=1e-6)
            self.glimpse_query = nn.Linear(width, theirs, bias=False)
            self.glimpse_gain = nn.RMSNorm(config.target_dim, eps=1e-6)
            self.glimpse_out = nn.Linear(theirs, width, bias=False)

    def attend(self, x: Tensor, positions: Tensor, own: Tensor, attend: Attend) -> Tensor:
        """Adds the self-attention to x [B, S, C]."""
        config = self.config
        shape = (*x.shape[:2], 3, config.heads, config.dim)
        query, key, value = self.qkv(self.own_norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        query, key = rotate(query, positions, own), rotate(key, positions, own)
        return x + self.own_out(attend(self.number, query, key, value).flatten(2))

    def look(self, x: Tensor, positions: Tensor, theirs: Tensor | None, glimpse: Glimpse) -> Tensor:
        """Adds the attention to the target's tokens, and the feed-forward part."""
        if self.config.glimpses:
            shape = (*x.shape[:2], self.config.target_heads, self.config.target_dim)
            query = self.glimpse_query(self.glimpse_norm(x)).view(shape).transpose(1, 2)
            if theirs is not None:
                query = rotate(query, positions, theirs)
            seen = self.glimpse_gain(glimpse(self.number, query))
            x = x + self.glimpse_out(seen.flatten(2))
        gate, up = self.gate(self.wide_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Glide(nn.Module):
    """A draft model: embedding, layers and a head."""

    frequencies: Tensor
    target_frequencies: Tensor
    drafted: Tensor
    """Token of each row of the head; empty if the head has all tokens."""

    def __init__(self, config: GlideConfig, target_frequencies: Sequence[float] = ()) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(GlideLayer(config, n) for n in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        steps = torch.arange(0, config.dim, 2) / config.dim
        self.register_buffer("frequencies", 10_000.0**-steps)
        self.register_buffer("target_frequencies", torch.tensor(list(target_frequencies)))
        self.register_buffer("drafted", torch.arange(config.drafted))
        self.head = nn.Linear(config.hidden, config.drafted or config.vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            if name.endswith("glimpse_out.weight"):
                nn.init.zeros_(weight)  # begins as a draft that sees nothing

    @torch.no_grad()
    def start_from(self, embedding: Tensor, head: Tensor, drafted: Tensor) -> None:
        """Sets the drafted tokens, and derives embedding and head from the target's [V, C].

        A narrower draft takes the directions in which the target's vectors are longest.
        """
        self.drafted.copy_(drafted)
        head = _narrowed(head[self.drafted] if self.config.drafted else head, self.config.hidden)
        self.head.weight[:, : head.shape[1]].copy_(head)
        # Turned at random: targets with tied weights would start drafts that repeat each token.
        kept = _narrowed(embedding, self.config.hidden)
        kept = kept @ torch.linalg.qr(torch.randn_like(kept[: kept.shape[1]]))[0]
        self.embedding.weight[:, : kept.shape[1]].copy_(kept * (0.02 / kept.std()))

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        glimpse: Glimpse,
        last: Tensor | None = None,
    ) -> Tensor:
        theirs = self.target_frequencies if len(self.target_frequencies) else None
        x = self.embedding(tokens) * self.config.hidden**0.5
        for layer in self.layers:
            assert isinstance(layer, GlideLayer)
            x = layer.attend(x, positions, self.frequencies, attend)
            if last is not None:
                # For a single layer: keys and values exist, and no one needs later outputs.
                x, positions = x[:, last], positions[:, last]
            x = layer.look(x, positions, theirs, glimpse)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        seen: Tensor,
        keys: Sequence[Tensor] = (),
        values: Sequence[Tensor] = (),
        teacher: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy against the next tokens, or the target's distributions.

        The latter are over the drafted tokens, as is the cross-entropy.
        """

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            del number
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return out.transpose(1, 2)

        mask = torch.arange(tokens.shape[1], device=tokens.device)[None] < seen[:, None]
        # A row without keys would be NaN: it attends to the first, and its result is dropped.
        some = (seen > 0)[:, None, None]
        mask[:, 0] |= seen == 0

        def glimpse(number: int, query: Tensor) -> Tensor:
            key, value = keys[number].to(query.dtype), values[number].to(query.dtype)
            grouped = query.shape[1] != key.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=grouped
            )
            return out.transpose(1, 2) * some

        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        labels = labels[:, 1:]
        if self.config.drafted and teacher is None:
            rows = labels.new_full((self.config.vocabulary,), -100)
            rows[self.drafted] = torch.arange(self.config.drafted, device=rows.device)
            labels = torch.where(labels < 0, labels, rows[labels.clamp(min=0)])
        learnt = labels != -100
        x = self.hidden(tokens, positions, attend, glimpse)[:, :-1][learnt]
        found = self.head(x).float()
        if teacher is None:
            wanted = labels[learnt]
        else:
            wanted = teacher[:, :-1][learnt].to(found.dtype).softmax(-1)
        # Summed, because a rank without labels has no mean.
        return F.cross_entropy(found, wanted, reduction="sum") / learnt.sum().clamp(min=1)


def _narrowed(vectors: Tensor, width: int) -> Tensor:
    """Vectors [V, C] in the `width` directions in which they are longest."""
    vectors = vectors.double()
    directions = torch.linalg.eigh(vectors.T @ vectors).eigenvectors
    return vectors @ directions.flip(1)[:, :width]


def seen_keys(length: int, block: int, offset: int) -> Tensor:
    """Number of the target's keys that each position attends to: those of earlier blocks."""
    places = torch.arange(length)
    return ((places + offset) // block * block - offset).clamp(min=0)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotates halves of x [B, H, S, D] by positions [B, S] (RoPE, as in Llama)."""
    angles = positions[:, None, :, None] * frequencies.to(x.device, torch.float32)
    cos, sin = (part.to(x.dtype) for part in (angles.cos(), angles.sin()))
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


# A draft's folder: ``config.json`` and ``model.safetensors``.


KIND = "gulliver_glide"


def is_draft(folder: Path) -> bool:
    """Whether a folder has a draft model written by `save_draft`."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == KIND


def save_draft(
    folder: Path, config: GlideConfig, weights: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", weights)
    # Written last: a folder with a configuration is complete.
    known = {"model_type": KIND, **asdict(config), "training": facts}
    write_json(folder / "config.json", known)


def load_draft(folder: Path) -> Glide:
    if not is_draft(folder):
        raise GulliverError(f"{folder} has no draft: create one with gulliver speculate train")
    values = read_json(folder / "config.json")
    names = [field.name for field in fields(GlideConfig)]
    lacking = [name for name in names if name not in values]
    if lacking:
        raise GulliverError(f"{folder}/config.json lacks {lacking[0]}: train the draft again")
    known = {name: values[name] for name in names}
    known["glimpses"] = tuple(known["glimpses"])
    weights = load_file(folder / "model.safetensors")
    frequencies = weights.get("target_frequencies")
    model = Glide(GlideConfig(**known), [] if frequencies is None else frequencies.tolist())
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise GulliverError(f"{folder}: {' '.join(str(error).split())[:200]}") from None
    return model.eval()


# `GlideDraft`: a `Glide` that drafts for the engine, with its own pages and the target's.


class Glimpses:
    """Read-only attention to keys and values that the target has cached."""

    def __init__(self, pages: Pages, layers: Sequence[int]) -> None:
        self._pages, self._layers = pages, layers
        self._gathered: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def begin(self, looks: Sequence[tuple[int, PagedSpan]], first: bool) -> None:
        """Takes sequences and their spans; later tokens of a round see the keys of its `first`."""
        self._looks = [look for look in looks if look[1].count > 0]
        if first:
            self._gathered.clear()

    def __call__(self, layer: int, query: Tensor) -> Tensor:
        """Computes attention to the target (`Glimpse`); tokens without visible keys get zeros."""
        query = query[0]
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        keys, values = (
            kept[self._layers[layer]] for kept in (self._pages.keys, self._pages.values)
        )
        scale = query.shape[-1] ** -0.5
        for sequence, look in self._looks:
            at, end = slice(look.first, look.first + look.count), look.start + look.count
            place = layer, sequence, end
            if place not in self._gathered:
                key, value = (gather_blocks(kept, look).to(query.dtype) for kept in (keys, values))
                self._gathered[place] = key, value
            out[at] = attend_gathered(query[:, at], *self._gathered[place], look, scale, None, None)
        return out[None]


class GlideDraft(ModelDraft):
    """Drafts with a `Glide`."""

    name = "glide"

    def __init__(self, model: Glide, beside: int = 3) -> None:
        self._model = model.eval().requires_grad_(False)
        super().__init__(DraftCache(0, 1), None, beside)
        if model.config.drafted:
            self.names, self.vocabulary = model.drafted, model.config.vocabulary

    def begin(self, runner: Runner) -> None:
        """Allocates as many blocks as the target has."""
        facts, config = runner.facts, self._model.config
        if facts.vocabulary != config.vocabulary:
            raise GulliverError(
                f"the draft has a vocabulary of {config.vocabulary} tokens and the model one of "
                f"{facts.vocabulary}: use a draft that was trained for this model"
            )
        pages: Pages | None = getattr(runner, "pages", None)
        if config.glimpses:
            if pages is None:
                raise GulliverError(
                    "this draft attends to the model's keys and values, which are not in this "
                    "process: serve on one device, or use a small model or a lookup method"
                )
            check_pages(config.glimpses, config.target_dim, pages)
            self._glimpses = Glimpses(pages, config.glimpses)
        self._cache = DraftCache(facts.blocks, facts.block_size)
        self._known.clear()
        weight = self._model.norm.weight
        shape = LayerShape(config.heads, config.dim)
        self._pages = Pages(
            [shape] * config.layers, facts.blocks, facts.block_size, weight.dtype, weight.device
        )

    @torch.inference_mode()
    def _run(self, news: Sequence[New], rows: bool) -> Tensor:
        spans, looks, ends, first = [], [], [], 0
        # The only layer's outputs are needed for the last token only.
        only_last = self._model.config.layers == 1
        for index, new in enumerate(news):
            count = len(new.tokens)
            blocks = list(self._cache.blocks(new.one.sequence))
            spans.append(Span(new.one.sequence, new.start, list(new.tokens), blocks, 1))
            # The last token attends to the tokens before it in the target's cache.
            seen = min(new.start + count - 1, new.one.cached)
            looking = min(1 if only_last else count, seen)
            table = torch.tensor(new.one.blocks, dtype=torch.int64)
            at = index if only_last else first + count - looking
            # Each attends to one key more than the one before it.
            sees = torch.arange(seen - looking, seen)
            look = PagedSpan(at, looking, seen - looking, table, None, sees)
            looks.append((new.one.sequence, look))
            first += count
            ends.append(first - 1)
        pages, device = self._pages, self._model.norm.weight.device
        pages.begin(Batch(0, spans))
        tokens = torch.tensor([t for span in spans for t in span.tokens], device=device)
        last = torch.tensor(ends, device=device)
        scale = self._model.config.dim**-0.5

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return pages.attend(layer, query[0], key[0], value[0], scale)[None]

        def none(layer: int, query: Tensor) -> Tensor:
            raise AssertionError("a draft without glimpses does not attend to the target")

        glimpse: Any = none
        if self._model.config.glimpses:
            self._glimpses.begin(looks, any(new.ahead == 0 for new in news))
            glimpse = self._glimpses
        wanted = last if only_last else None
        x = self._model.hidden(tokens[None], pages.positions[None], attend, glimpse, wanted)[0]
        x = x if only_last else x[last]
        return self._model.head(x).float() if rows else torch.empty(0)

    def close(self) -> None:
        self._pages.keys.clear()
        self._pages.values.clear()


def check_pages(layers: Sequence[int], dim: int, pages: Pages) -> None:
    """Rejects a target without the layers or the head size that the draft was trained for."""
    if max(layers) >= len(pages.keys) or pages.keys[max(layers)].shape[-1] != dim:
        raise GulliverError(
            f"the draft attends to layer {max(layers)}, with heads of {dim}, and this model has "
            f"{len(pages.keys)} layers with heads of {pages.keys[-1].shape[-1]}: use a draft that "
            "was trained for this model"
        )
