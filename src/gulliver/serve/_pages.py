"""`Pages`: keys and values of all layers in blocks, and attention over them.

Read `Pages.attend`, which every attention layer calls: it writes the new keys and values of all
packed tokens, then runs attention sequence by sequence kind: the native kernel reads the blocks in
place for sequences with few new tokens; longer ones are computed by torch's attention on their
blocks gathered. `_attend_gathered` does all of it without the kernel, and is what the kernel is
held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.serve._batch import Batch, Span
from gulliver.serve._native import PagedSpan, native_attention

FEW = 16
"""Most new tokens of a sequence for which the native kernel is taken: from there on torch's blocked
products win over reading the blocks in place."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer's keys and values."""

    heads: int
    dim: int


class Pages:
    """Keys and values [blocks, heads, block size, dim] of each layer, and the batch that runs."""

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
            [torch.zeros(blocks, s.heads, size, s.dim, dtype=dtype, device=device) for s in layers]
            for _ in range(2)
        )
        kernel = native_attention() if device.type == "cpu" else None
        fits = kernel is not None and all(kernel.takes(dtype, shape.dim) for shape in layers)
        self._native = kernel if fits else None
        self.positions = torch.empty(0, dtype=torch.int64, device=device)

    def begin(self, batch: Batch) -> None:
        """Runs a batch's copies and moves, and prepares its attention."""
        self._copy(batch)
        size, device = self.size, self.positions.device
        pieces, first, positions, slots = [], 0, [], []
        for span in batch.spans:
            count, start = len(span.tokens), span.start
            table = span.blocks[: -(-(start + count) // size)]
            depth, mask = _tree(span)
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
        few = [p for p in pieces if self._native is not None and p.count <= FEW]
        self._many = [p for p in pieces if self._native is None or p.count > FEW]
        prepare = self._native.prepare if self._native is not None and few else None
        self._few = prepare(few, self.positions) if prepare is not None else None

    def _copy(self, batch: Batch) -> None:
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
        """Attention of the packed tokens to all that is before them, each in its own sequence."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self._blocks, :, self._offsets] = key.transpose(0, 1).to(keys.dtype)
        values[self._blocks, :, self._offsets] = value.transpose(0, 1).to(values.dtype)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        # No batch has been begun where the model's sizes are measured.
        if self._few is not None and self._native is not None:
            self._native.run(self._few, query, keys, values, out, scale, window, slopes)
        for piece in self._many:
            at = slice(piece.first, piece.first + piece.count)
            # From the first token on, what is attended to is what has just been computed.
            whole = piece.start == 0 and piece.mask is None
            near = (key[:, at], value[:, at]) if whole else self._gathered(piece, keys, values)
            out[at] = _attend_gathered(query[:, at], *near, piece, scale, window, slopes)
        return out

    def _gathered(self, piece: PagedSpan, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H', L, D] of a sequence, one after another."""
        end = piece.start + piece.count
        key, value = (
            kept[piece.blocks].transpose(0, 1).flatten(1, 2)[:, :end] for kept in (keys, values)
        )
        return key, value


def _attend_gathered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    piece: PagedSpan,
    scale: float,
    window: int | None,
    slopes: Tensor | None,
) -> Tensor:
    """Attention of one sequence's new tokens [H, T, D] to all of its keys [H', L, D]; [T, H, D]."""
    plain = piece.mask is None and slopes is None and (window is None or window >= key.shape[1])
    causal = plain and piece.start == 0
    bias = None if plain and (causal or piece.count == 1) else _bias(query, piece, window, slopes)
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


def _bias(query: Tensor, piece: PagedSpan, window: int | None, slopes: Tensor | None) -> Tensor:
    """Mask [1, 1, T, L], or bias [1, H, T, L] with slopes."""
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


def _tree(span: Span) -> tuple[list[int], Tensor | None]:
    """Depth of each new token, and which of them each sees; None for a chain."""
    if span.parents is None:
        return [], None
    count = len(span.tokens)
    depth, mask = [0] * count, torch.eye(count, dtype=torch.bool)
    for index, parent in enumerate(span.parents):
        if parent >= 0:
            depth[index] = depth[parent] + 1
            mask[index] |= mask[parent]
    return depth, mask
