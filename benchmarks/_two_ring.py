"""Oracles for sequence parallelism: the ring attention of the 2021 paper, and counts of pairs.

Li et al., Sequence Parallelism: Long Sequence Training from System Perspective (arXiv 2105.13120).
A ring of K fills the ``L/N x L`` matrix of logits, a softmax over whole rows follows, and a ring of
V gives the output. The backward sends K and V round again and adds up full-length gradients of both
over all ranks. Read it to see what is computed; it sends `two_ring_bytes` and needs memory for the
square of the length. (The paper's code divides some gradients by the number of ranks and scales by
the hidden size; this does neither.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import all_reduce
from gulliver.errors import GulliverError, once_differentiable
from gulliver.hardware.attention import AttentionBytes, AttentionShape
from gulliver.parallel.sequence.layout import SequenceGroups
from gulliver.parallel.sequence.mask import Mask
from gulliver.parallel.sequence.ring import turn
from gulliver.parallel.sequence.sharding import checked_layout


def two_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes self-attention with equal heads of queries, keys and values.

    Args:
        q: this rank's queries, ``[batch, heads, local length, head dim]``.
        k: this rank's keys, the same shape.
        v: this rank's values, the same shape.
        groups: rank groups of a plan with ``ulysses=1``.
        mask: description of the queries that see a key; None lets all see all.
        scale: factor of the logits; None is ``1 / sqrt(head dim)``.

    Returns:
        Outputs of the same shape.

    Raises:
        GulliverError: shapes differ, or the plan has Ulysses.
    """
    if groups.plan.ulysses > 1 or not q.shape == k.shape == v.shape:
        raise GulliverError(
            "two_ring_attention needs ulysses=1 and q, k and v of one shape: use attention"
        )
    layout = checked_layout(q, groups, 2, None)
    rules = (mask or Mask()).rules(q.shape[0], layout.length, layout.length)
    # Columns stand in the order of the ring ranks, not of the positions.
    allowed = rules.dense(layout.positions(groups.rank), layout.order()).unsqueeze(1)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    return _TwoRings.apply(q, k, v, groups, allowed.to(q.device), scale, layout.place_sizes())


class _TwoRings(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        groups: SequenceGroups,
        allowed: Tensor,
        scale: float,
        sizes: list[int],
    ) -> Tensor:
        logits = q.new_empty((*q.shape[:3], sum(sizes)))
        for columns, block in _round(k, sizes, groups):
            logits[..., columns] = q @ block.mT * scale
        logits.masked_fill_(~allowed, -math.inf)
        weights = logits.softmax(-1).nan_to_num_(0.0)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for columns, block in _round(v, sizes, groups):
            out += weights[..., columns] @ block
        ctx.save_for_backward(q, k, v, weights)
        ctx.given = groups, scale, sizes
        return out

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='ring_attn'")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        q, k, v, weights = ctx.saved_tensors
        groups, scale, sizes = ctx.given
        slope = torch.empty_like(weights)
        for columns, block in _round(v, sizes, groups):
            slope[..., columns] = grad @ block.mT
        slope = weights * (slope - (weights * slope).sum(-1, keepdim=True)) * scale
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for columns, block in _round(k, sizes, groups):
            dq += slope[..., columns] @ block
        own = _columns(sizes)[groups.place]
        dk, dv = (_summed(part, groups)[:, :, own] for part in (slope.mT @ q, weights.mT @ grad))
        return dq, dk, dv, None, None, None, None


def _summed(whole: Tensor, groups: SequenceGroups) -> Tensor:
    flat = whole.contiguous().view(-1)
    if groups.plan.degree > 1:
        all_reduce(flat, group=groups.all.process_group)
    return flat.view(whole.shape)


def _round(own: Tensor, sizes: list[int], groups: SequenceGroups) -> Iterator[tuple[slice, Tensor]]:
    """Yields every ring rank's columns and its block."""
    batch, heads, _, dim = own.shape
    item = own.element_size()
    flat = own.contiguous().view(-1).view(torch.uint8)
    for visit in turn([flat], lambda p, _: batch * heads * sizes[p] * dim * item, groups):
        block = visit.block.view(own.dtype).view(batch, heads, sizes[visit.place], dim)
        yield _columns(sizes)[visit.place], block


def _columns(sizes: list[int]) -> list[slice]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def two_ring_bytes(ranks: int, shape: AttentionShape) -> AttentionBytes:
    """Bytes of ring self-attention: rings of K and of V, again in the backward, and all-reduces."""
    # 8 (N - 1) units of B H (L / N) D elements (section 3.2).
    unit = shape.batch * shape.heads * shape.length / ranks * shape.head_dim * shape.item
    hops = (ranks - 1) * unit
    return AttentionBytes(inner_forward=2 * hops, inner_backward=6 * hops)
