"""Partial attention over some of the keys, and the merge of two of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.layout import Interval
from gulliver.parallel.sequence._heads import Run
from gulliver.parallel.sequence._kernels import AttentionBlock, asked_of, precise, select
from gulliver.parallel.sequence._mask import Rules
from gulliver.parallel.sequence._tiles import Tile


# [Note: log-sum-exp merge] Softmax attention over keys A and B is
#
#     out = (sum_A exp(s) v + sum_B exp(s) v) / (sum_A exp(s) + sum_B exp(s))
#
# With ``out_A`` normalised over A alone and ``lse_A = log sum_A exp(s)``, the first sum is
# ``exp(lse_A) out_A``. So the mean of the two outputs weighted with ``exp(lse)`` is not an
# approximation but the same number, for any division of the keys and in any order; only rounding
# depends on these. The weight of B, ``exp(lse_B) / (exp(lse_A) + exp(lse_B))``, is computed as the
# sigmoid of ``lse_B - lse_A``: nothing grows with the logits, and a part without any key (minus
# infinity) has no weight. Source: Milakov and Gimelshein, 2018 (arXiv 1805.02867).
@dataclass(frozen=True)
class How:
    """The options that all blocks of a call share."""

    scale: float
    rules: Rules  # Rules of the pairs that are allowed
    runs: tuple[Run, ...]  # Query heads and the KV heads that serve them
    kernel: str | None = None  # Name of a kernel; None for the fastest that can
    deterministic: bool = False  # Whether the same bits have to come out every time


@dataclass(frozen=True)
class Partial:
    """Attention over the keys seen so far."""

    out: Tensor  # Output ``[batch, heads, queries, value dim]``, in the precise dtype
    lse: Tensor  # Log-sum-exp of the logits, ``[batch, heads, queries]``

    @classmethod
    def empty(cls, q: Tensor, value_dim: int) -> Partial:
        """Makes the attention over no keys: zeros, and a log-sum-exp of minus infinity."""
        dtype = precise(q.dtype)
        return cls(
            q.new_zeros((*q.shape[:3], value_dim), dtype=dtype),
            q.new_full(q.shape[:3], -math.inf, dtype=dtype),
        )

    def merge(self, out: Tensor, lse: Tensor, heads: slice, rows: Interval) -> None:
        """Merges attention over other keys, for some heads and rows, in place."""
        own_out = self.out[:, heads, rows[0] : rows[1]]
        own_lse = self.lse[:, heads, rows[0] : rows[1]]
        # -inf - -inf is NaN: neither part has a key, so the other gets no weight. By the value of
        # lse, not by isnan: a NaN that comes from the inputs must be seen in the output.
        weight = torch.sigmoid(lse - own_lse).masked_fill_(lse == -math.inf, 0.0)
        own_out.lerp_(out.to(own_out.dtype), weight.unsqueeze(-1))
        own_lse.copy_(torch.logaddexp(own_lse, lse))


def attend(into: Partial, q: Tensor, k: Tensor, v: Tensor, found: Iterable[Tile], how: How) -> None:
    """Merges the attention of local queries to a block of keys."""
    for tile in found:
        kernel = select(asked_of(q, v, tile.kind, how.deterministic), how.kernel)
        bias, unseen = _bias(tile, q, how.rules)
        for heads, kv_heads in how.runs:
            block = _block(tile, q, k, v, heads, kv_heads, bias, how)
            out, lse = kernel.forward(block)
            if unseen is not None:
                # Kernels differ in what they return for rows without a key.
                lse = lse.masked_fill(unseen, -math.inf)
                out = out.masked_fill(unseen.unsqueeze(-1), 0.0)
            into.merge(out, lse, heads, tile.q)


@dataclass(frozen=True)
class Rows:
    """Whole rows of queries, as a backward needs them (see `_kernels.py`)."""

    q: Tensor  # Queries ``[batch, heads, queries, head dim]``
    grad: Tensor
    out: Tensor
    # Log-sum-exp over all keys; 0 for rows without a key, as ``exp(-inf - -inf)`` is NaN where
    # ``exp(-inf - 0)`` is the right 0.
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Sums of the gradients of q, k and v, in the precise dtype."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend_backward(
    into: Gradients, rows: Rows, k: Tensor, v: Tensor, found: Iterable[Tile], how: How
) -> None:
    """Adds the gradients of `attend`."""
    for tile in found:
        kernel = select(asked_of(rows.q, v, tile.kind, how.deterministic), how.kernel)
        bias, _ = _bias(tile, rows.q, how.rules)
        (first, last), (k_first, k_last) = tile.q, tile.k
        for heads, kv_heads in how.runs:
            block = _block(tile, rows.q, k, v, heads, kv_heads, bias, how)
            dq, dk, dv = kernel.backward(
                rows.grad[:, heads, first:last],
                block,
                rows.out[:, heads, first:last],
                rows.lse[:, heads, first:last],
            )
            into.q[:, heads, first:last] += dq
            into.k[:, kv_heads, k_first:k_last] += dk
            into.v[:, kv_heads, k_first:k_last] += dv


def _block(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: slice,
    kv_heads: slice,
    bias: Tensor | None,
    how: How,
) -> AttentionBlock:
    (first, last), (k_first, k_last) = tile.q, tile.k
    return AttentionBlock(
        q[:, heads, first:last],
        k[:, kv_heads, k_first:k_last],
        v[:, kv_heads, k_first:k_last],
        how.scale,
        tile.kind == "causal",
        bias,
        how.deterministic,
    )


def _bias(tile: Tile, q: Tensor, rules: Rules) -> tuple[Tensor | None, Tensor | None]:
    """Returns the dense mask as an additive bias, and the rows that see no key."""
    if tile.kind != "masked":
        return None, None
    allowed = tile.allowed(rules).to(q.device)
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~allowed, -math.inf)
    return bias.unsqueeze(1), ~allowed.any(-1).unsqueeze(1)
