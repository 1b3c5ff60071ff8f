"""Dropout by position: an element's mask is a function of its position.

    keep_mask(mix(seed, site), 0.1, [Along.whole(batch), Along(own_positions, length)], device)

Torch's masks depend on how many elements a process draws, so a rank with a shard gets a different
mask than a single process. Here the mask is a hash of the element's index in the full activation,
keyed by seed and site: the finalizer of SplitMix64 (Steele, Lea and Flood, Fast Splittable
Pseudorandom Number Generators, 2014). Each rank computes its part of the mask without
communication, including during recomputation.

`booster.hybrid.dropout` determines how a model's activations are sharded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's increment, and the two factors of its finalizer."""
WORD = 1 << 64


@dataclass(frozen=True)
class Along:
    """Positions along one dim of an activation's shard."""

    # Indices of the shard's positions in the full dim, int64.
    positions: Tensor
    length: int

    @classmethod
    def whole(cls, length: int, start: int = 0) -> Along:
        """Creates an unsharded dim; for the outermost dim, its positions may begin at `start`."""
        return cls(torch.arange(start, start + length), start + length)


def mix(*words: int) -> int:
    state = 0
    for word in words:
        state = (state ^ word) + GAMMA & WORD - 1
        state = (state ^ state >> 30) * FIRST % WORD
        state = (state ^ state >> 27) * SECOND % WORD
        state ^= state >> 31
    return state


def hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keep_mask(key: int, p: float, dims: Sequence[Along], device: torch.device) -> Tensor:
    state = torch.full((), _signed(key), dtype=torch.int64, device=device)
    stride = 1
    # Integers wrap around, so each dim adds its own term to the index, and only the last sum is as
    # large as the shard.
    for dim, along in reversed(list(enumerate(dims))):
        term = along.positions.to(device) * _signed(stride * GAMMA)
        state = state + term.view(-1, *[1] * (len(dims) - 1 - dim))
        stride *= along.length
    return _finalize(state) < _threshold(p)


def _finalize(state: Tensor) -> Tensor:
    state ^= (state >> 30) & ((1 << 34) - 1)
    state *= _signed(FIRST)
    state ^= (state >> 27) & ((1 << 37) - 1)
    state *= _signed(SECOND)
    state ^= (state >> 31) & ((1 << 33) - 1)
    return state


def _threshold(p: float) -> int:
    return min(round((1 - p) * WORD) - WORD // 2, WORD // 2 - 1)


def _signed(word: int) -> int:
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def drop(x: Tensor, p: float, key: int, dims: Sequence[Along], inplace: bool = False) -> Tensor:
    """Applies dropout to a shard; kept elements are scaled by ``1 / (1 - p)``."""
    keep = keep_mask(key, p, dims, x.device)
    found = _Drop.apply(x, keep, 1 / (1 - p) if p < 1 else 0.0)
    return x.copy_(found) if inplace else found


class _Drop(Function):
    # [Note: different recomputation is detected] The mask is saved for backward as bytes, whereas
    # torch's own dropout saves bools or floats. So if `torch.utils.checkpoint` recomputes a
    # function outside of the hooks, and torch's dropout runs instead of this one, the checkpoint
    # finds tensors of another dtype and raises an error.

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(keep.view(torch.uint8))
        return x * keep * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (keep,) = ctx.saved_tensors
        return grads[0] * keep * ctx.scale, None, None


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    drop: Callable[[Tensor, float], Tensor],
) -> Tensor:
    """Computes `scaled_dot_product_attention` with `drop` as the dropout of the weights."""
    # Materializes the weights ``[..., queries, keys]``, which kernels avoid. Takes torch's
    # arguments.
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None or attn_mask.dtype != torch.bool:
        weights = torch.softmax(scores if attn_mask is None else scores + attn_mask, -1)
        return drop(weights, dropout_p) @ value
    # A query without visible keys outputs zeros, as in torch, and not NaN.
    blind = ~attn_mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~(attn_mask | blind), -math.inf)
    return drop(torch.softmax(scores, -1).masked_fill(blind, 0), dropout_p) @ value
