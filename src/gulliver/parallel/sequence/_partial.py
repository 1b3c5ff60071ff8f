"""Partial attention over some of the keys, and how two of them become one.

Each part is an output normalised over its own keys and the log-sum-exp of its logits. The merged
output is the mean weighted with ``exp(lse)``, which here is a sigmoid of the difference: nothing
grows with the logits, and a part without any key (minus infinity) has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.parallel.sequence._heads import Run
from gulliver.parallel.sequence._kernels import Block, asked_of, precise, select
from gulliver.parallel.sequence._layout import Interval
from gulliver.parallel.sequence._mask import Rules
from gulliver.parallel.sequence._tiles import Tile


@dataclass(frozen=True)
class How:
    """What all blocks of a call share.

    Attributes:
        scale: of the logits.
        rules: which pairs are allowed.
        runs: heads of queries and the KV heads that they use.
        kernel: by name; None for the fastest that can.
        deterministic: the same bits every time.
    """

    scale: float
    rules: Rules
    runs: tuple[Run, ...]
    kernel: str | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class Partial:
    """Attention over the keys seen so far.

    Attributes:
        out: ``[batch, heads, queries, value dim]``, in the precise dtype.
        lse: ``[batch, heads, queries]``.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_dim: int) -> Partial:
        """Over no keys."""
        dtype = precise(q.dtype)
        return cls(
            q.new_zeros((*q.shape[:3], value_dim), dtype=dtype),
            q.new_full(q.shape[:3], -math.inf, dtype=dtype),
        )

    def merge(self, out: Tensor, lse: Tensor, heads: slice, rows: Interval) -> None:
        """Takes in what some heads found over other keys, for some rows."""
        own_out = self.out[:, heads, rows[0] : rows[1]]
        own_lse = self.lse[:, heads, rows[0] : rows[1]]
        # Minus infinity from itself is no number: neither part has a key, and neither has weight.
        # What is no number because the inputs are none must stay so.
        weight = torch.sigmoid(lse - own_lse).masked_fill_(lse == -math.inf, 0.0)
        own_out.lerp_(out.to(own_out.dtype), weight.unsqueeze(-1))
        own_lse.copy_(torch.logaddexp(own_lse, lse))


def attend(into: Partial, q: Tensor, k: Tensor, v: Tensor, found: Iterable[Tile], how: How) -> None:
    """Merges the attention of local queries to a block of keys.

    Args:
        into: of the queries.
        q: ``[batch, heads, queries, head dim]``.
        k: ``[batch, KV heads, keys, head dim]``.
        v: ``[batch, KV heads, keys, value dim]``.
        found: what is to be computed.
        how: it is computed.
    """
    for tile in found:
        kernel = select(asked_of(q, v, tile.kind, how.deterministic), how.kernel)
        bias, unseen = _bias(tile, q, how.rules)
        for heads, kv_heads in how.runs:
            block = _block(tile, q, k, v, heads, kv_heads, bias, how)
            out, lse = kernel.forward(block)
            if unseen is not None:
                # What kernels say of rows without a key differs.
                lse = lse.masked_fill(unseen, -math.inf)
                out = out.masked_fill(unseen.unsqueeze(-1), 0.0)
            into.merge(out, lse, heads, tile.q)


@dataclass(frozen=True)
class Rows:
    """Whole rows of queries, as a backward needs them.

    Attributes:
        q: ``[batch, heads, queries, head dim]``.
        grad: of the output.
        out: the output, over all keys.
        lse: of all logits; 0 for rows without a key, so that nothing is minus infinity twice.
    """

    q: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Where gradients are added up, in the precise dtype."""

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
) -> Block:
    (first, last), (k_first, k_last) = tile.q, tile.k
    return Block(
        q[:, heads, first:last],
        k[:, kv_heads, k_first:k_last],
        v[:, kv_heads, k_first:k_last],
        how.scale,
        tile.kind == "causal",
        bias,
        how.deterministic,
    )


def _bias(tile: Tile, q: Tensor, rules: Rules) -> tuple[Tensor | None, Tensor | None]:
    """The dense mask as what is added to logits, and which rows see nothing of this block."""
    if tile.kind != "masked":
        return None, None
    allowed = tile.allowed(rules).to(q.device)
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~allowed, -math.inf)
    return bias.unsqueeze(1), ~allowed.any(-1).unsqueeze(1)
