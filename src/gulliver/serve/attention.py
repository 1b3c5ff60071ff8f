"""`Pages`: keys and values of all layers in blocks, and attention over them.

Read `Pages.attend`, which attention layers of transformers' models call: it writes the new keys and
values of all packed tokens, then runs torch's attention on each sequence's gathered blocks. Native
decoders (`gulliver.serve.decoder`) read the blocks in place instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory.stores import HUGE, huge_pages
from gulliver.serve.batch import Batch, Span


@dataclass(frozen=True)
class PagedSpan:
    """A span's blocks and positions, as tensors for the attention layers."""

    # Index of its first token among the packed ones.
    first: int
    count: int
    # Number of its keys that are already cached.
    start: int
    # Block table [blocks], up to its last token.
    blocks: Tensor
    # Mask of a tree [count, count]: the new tokens that each sees; None for a chain.
    mask: Tensor | None
    # Positions of its tokens [count]; not consecutive in a tree.
    positions: Tensor


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer's keys and values, and its kind of attention."""

    heads: int
    dim: int
    scale: float = 1.0
    window: int | None = None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Blocks lie anywhere, so with small pages most reads would also look up an address.
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and nbytes >= HUGE:
        return huge_pages(nbytes).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


class Pages:
    """Keys and values [blocks, heads, block size, dim] of each layer, and the current batch."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        blocks: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size = size
        self.keys, self.values = (
            [_zeros((blocks, s.heads, size, s.dim), dtype, device) for s in layers]
            for _ in range(2)
        )
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self._pieces: list[PagedSpan] = []

    def begin(self, batch: Batch) -> None:
        """Runs a batch's block copies and slot moves, and prepares its attention."""
        self.copy(batch)
        size, device = self.size, self.positions.device
        pieces, first, positions, slots = [], 0, [], []
        for span in batch.spans:
            count, start = len(span.tokens), span.start
            table = span.blocks[: -(-(start + count) // size)]
            depth, mask = tree_of(span)
            places = torch.tensor(depth) + start if mask is not None else None
            where = places if places is not None else torch.arange(start, start + count)
            positions.append(where)
            slots += [table[p // size] * size + p % size for p in range(start, start + count)]
            blocks = torch.tensor(table, dtype=torch.int64, device=device)
            mask = mask if mask is None else mask.to(device)
            pieces.append(PagedSpan(first, count, start, blocks, mask, where.to(device)))
            first += count
        self.positions = torch.cat(positions).to(device)
        self._blocks = torch.tensor([s // size for s in slots], device=device)
        self._offsets = torch.tensor([s % size for s in slots], device=device)
        self._pieces = pieces

    def end(self) -> None:
        """Forgets the batch, so that calls of the model by others are refused."""
        self._pieces = []

    def copy(self, batch: Batch) -> None:
        if batch.copies:
            sources, targets = torch.tensor(batch.copies).T.to(self.positions.device)
            for kept in (*self.keys, *self.values):
                kept[targets] = kept[sources]
        if batch.moves:
            sources, targets = torch.tensor(batch.moves).T.to(self.positions.device)
            for kept in (*self.keys, *self.values):
                moved = kept[sources // self.size, :, sources % self.size]
                kept[targets // self.size, :, targets % self.size] = moved

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Computes attention of the packed tokens to all earlier tokens of their own sequence."""
        if not self._pieces:
            raise GulliverError(
                "this model is being served by an LLM: call close() on that first, or give it a "
                "copy.deepcopy of the model"
            )
        keys, values = self.keys[layer], self.values[layer]
        keys[self._blocks, :, self._offsets] = key.transpose(0, 1).to(keys.dtype)
        values[self._blocks, :, self._offsets] = value.transpose(0, 1).to(values.dtype)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for piece in self._pieces:
            at = slice(piece.first, piece.first + piece.count)
            # A span that starts at the first token attends only to keys that were just computed.
            near = key[:, at], value[:, at]
            if piece.start > 0 or piece.mask is not None:
                near = gather_blocks(keys, piece), gather_blocks(values, piece)
            out[at] = attend_gathered(query[:, at], *near, piece, scale, window, slopes)
        return out


def gather_blocks(kept: Tensor, piece: PagedSpan) -> Tensor:
    """Gathers the keys or values [H', L, D] of a sequence's blocks contiguously."""
    end = piece.start + piece.count
    return kept[piece.blocks].transpose(0, 1).flatten(1, 2)[:, :end]


def attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    piece: PagedSpan,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
) -> Tensor:
    """Computes attention [T, H, D] of a sequence's new tokens [H, T, D] to all keys [H', L, D]."""
    plain = piece.mask is None and slopes is None and (window is None or window >= key.shape[1])
    causal = plain and piece.start == 0
    bias = (
        None
        if plain and (causal or piece.count == 1)
        else attention_bias(query, piece, window, slopes)
    )
    out = F.scaled_dot_product_attention(
        query[None],
        key[None].to(query.dtype),
        value[None].to(query.dtype),
        attn_mask=bias,
        is_causal=causal and piece.count > 1,
        scale=scale,
        enable_gqa=query.shape[0] != key.shape[0],
    )
    return out[0].transpose(0, 1)


def attention_bias(
    query: Tensor, piece: PagedSpan, window: int | None, slopes: Tensor | None
) -> Tensor:
    """Creates the mask [1, 1, T, L], or the bias [1, H, T, L] with ALiBi slopes."""
    mine = piece.positions[:, None]
    theirs = torch.cat([torch.arange(piece.start, device=query.device), piece.positions])[None]
    seen = theirs <= mine
    if piece.mask is not None:
        seen[:, piece.start :] = piece.mask
    if window is not None:
        seen &= mine - theirs < window
    if slopes is None:
        return seen[None, None]
    sloped = slopes[:, None, None].to(query.dtype) * (theirs - mine)
    return sloped.masked_fill(~seen, -torch.inf)[None]


def tree_of(span: Span) -> tuple[list[int], Tensor | None]:
    """Returns the depth of each new token, and the mask of a tree (None for a chain)."""
    if span.parents is None:
        return [], None
    count = len(span.tokens)
    depth, mask = [0] * count, torch.eye(count, dtype=torch.bool)
    for index, parent in enumerate(span.parents):
        if parent >= 0:
            depth[index] = depth[parent] + 1
            mask[index] |= mask[parent]
    return depth, mask


# Attention of transformers' models over `Pages`, without copies of their code.
#
# `attach` registers one function in transformers' attention interface and gives every attention
# layer its pages. Further arguments that an architecture passes to its attention are supported here
# or rejected. BLOOM's attention does not use the interface; its module gets a short forward that
# calls `attend`.


NAME = "gulliver_pages"


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    known: Any = module
    odd = next((name for name in REFUSED if more.get(name) is not None), None)
    if odd is not None:
        raise GulliverError(f"attention with {odd} ({type(module).__name__}) is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = known.gulliver_pages.attend(
        known.layer_idx, query[0], key[0], value[0], scale, sliding_window
    )
    return out[None], None


REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Unsupported arguments of attention that would change its result."""


@contextmanager
def attached(model: Any, pages: Any) -> Iterator[None]:
    detach = attach(model, pages)
    try:
        yield
    finally:
        detach()


def attach(model: Any, pages: Any) -> Callable[[], None]:
    """Makes a model's attention use the paged cache until the returned function is called."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", 0), int)]
    layers = [layer for layer in layers if hasattr(layer, "layer_idx")]
    if any(hasattr(layer, "gulliver_pages") for layer in layers):
        raise GulliverError("this model is already being served: close the other runner first")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for layer in layers:
        layer.gulliver_pages = pages
        if type(layer).__name__ in OWN_FORWARD:
            layer.forward = OWN_FORWARD[type(layer).__name__].__get__(layer)
    for config, _ in before:
        config._attn_implementation = NAME

    def detach() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation
        for layer in layers:
            del layer.gulliver_pages
            layer.__dict__.pop("forward", None)

    return detach


def _bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *args: Any, **more: Any
) -> tuple[Tensor, None]:
    del args, more
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if not hasattr(self, "gulliver_slopes"):
        self.gulliver_slopes = alibi_slopes(self.num_heads, alibi)
    scale, slopes = self.inv_norm_factor, self.gulliver_slopes
    out = self.gulliver_pages.attend(
        self.layer_idx, query[0], key[0], value[0], scale, None, slopes
    )
    return self.dense(out.flatten(1)[None]) + residual, None


def alibi_slopes(heads: int, like: Tensor) -> Tensor:
    """Returns BLOOM's slope of each head, with the type and device of a tensor."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    return build_alibi_tensor(like.new_ones(1, 2), heads, like.dtype)[:, 0, 1]


OWN_FORWARD: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom_attention}
"""Attention layers without transformers' attention interface, and their replacements."""


# Runs a packed batch through a model: prepares inputs, returns logits of the wanted rows.


def inputs_of(batch: Batch, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Returns the packed tokens [T] of a batch, and the rows [R] that need logits."""
    # Parts of a prompt need no logits, but a forward computes at least one row.
    tokens = torch.tensor([t for span in batch.spans for t in span.tokens], device=device)
    rows, end = [], 0
    for span in batch.spans:
        end += len(span.tokens)
        rows += range(end - span.outputs, end)
    return tokens, torch.tensor(rows or [0], device=device)


def arguments_of(model: Any, positions: Tensor, wanted: Tensor) -> dict[str, Any]:
    known: dict[str, Any] = {"use_cache": False, "logits_to_keep": wanted}
    # BLOOM takes no positions, because its attention has slopes.
    return (
        known if model.config.model_type == "bloom" else known | {"position_ids": positions[None]}
    )


def forward(model: Any, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Runs a model on packed tokens [T]; returns float32 logits [R, V] of the wanted rows."""
    return model(tokens[None], **arguments_of(model, positions, wanted)).logits[0].float()


# Measures the shapes of a model's keys and values, and its vocabulary, with one token.


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model's keys, values and logits, measured by a forward of one token."""

    # Shapes of keys and values by layer; 0 heads for layers of other stages.
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    # Columns of the logits; 0 on a stage without them.
    vocabulary: int

    @property
    def token_bytes(self) -> int:
        return sum(2 * s.heads * s.dim for s in self.layers) * self.dtype.itemsize


class Recorder:
    """Pages that store only the shapes of keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Records a layer's shape and returns the value: attention of one token to itself."""
        del slopes
        if key.shape != value.shape:
            raise GulliverError(
                f"layer {layer} has a head dim of {key.shape[-1]} for keys and {value.shape[-1]} "
                "for values; models in which these differ are not supported"
            )
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[2], scale, window)
        self.dtype = key.dtype
        return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


def measure(
    model: Any, run: Callable[[], Tensor], layers: range, logits: bool = True
) -> ModelShape:
    recorder = Recorder()
    with attached(model, recorder):
        out = run()
    if sorted(recorder.shapes) != list(layers):
        raise GulliverError(
            f"{type(model).__name__} cannot be served: only layers {sorted(recorder.shapes)} use "
            f"the paged key-value cache, but layers {layers.start} to {layers.stop - 1} must"
        )
    # A layer keeps its number on every stage.
    none = LayerShape(0, 0)
    shapes = tuple(recorder.shapes.get(number, none) for number in range(layers.stop))
    return ModelShape(shapes, recorder.dtype, out.shape[-1] if logits else 0)
