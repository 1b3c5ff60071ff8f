"""Decoding: attention of few new queries, the same on all ranks, to sharded keys and values.

Each rank attends to its own keys, and one exchange of outputs and log-sum-exps merges them:
``batch x heads x queries x (value dim + 1)`` numbers to each other rank, whatever the length. A
ring would send the keys, which are many; here the queries are few.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gulliver.comm import exchange
from gulliver.errors import GulliverError
from gulliver.parallel.sequence._heads import deal_heads
from gulliver.parallel.sequence._kernels import (
    AttentionBlock,
    Kernel,
    asked_of,
    precise,
    readable,
    select,
)
from gulliver.parallel.sequence._mask import Mask
from gulliver.parallel.sequence._partial import Partial
from gulliver.parallel.sequence._plan import SequenceGroups


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: SequenceGroups,
    *,
    mask: Mask | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    length: int | None = None,
    scale: float | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attends to sharded keys; every rank gets the same bits."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise GulliverError("decode has no gradient: call it under torch.no_grad()")
    deal_heads(q.shape[1], k.shape[1], 1)
    allowed = _allowed(q, k, mask, query_positions, key_positions, length)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    kind = "plain" if allowed is None else "masked"
    chosen = select(asked_of(q, v, kind), kernel)
    own = _own(readable(q), readable(k), readable(v), scale, allowed, chosen)
    return _merged(own, q, groups).to(q.dtype)


def _allowed(
    q: Tensor,
    k: Tensor,
    mask: Mask | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    length: int | None,
) -> Tensor | None:
    """Returns the dense mask ``[rows, queries, local keys]``; None allows all."""
    if mask is None:
        return None
    if query_positions is None or key_positions is None or length is None:
        raise GulliverError("a mask needs query_positions, key_positions and length: give all")
    rules = mask.rules(q.shape[0], length, length)
    return rules.dense(query_positions.cpu(), key_positions.cpu()).to(q.device)


def _own(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None, kernel: Kernel
) -> Partial:
    """Attends to this rank's keys, of which there may be none."""
    partial = Partial.empty(q, v.shape[3])
    if not k.shape[2]:
        return partial
    bias, unseen = None, None
    if allowed is not None:
        bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill_(~allowed, -math.inf).unsqueeze(1)
        unseen = ~allowed.any(-1).unsqueeze(1)
    out, lse = kernel.forward(AttentionBlock(q, k, v, scale, bias=bias))
    if unseen is not None:
        lse = lse.masked_fill(unseen, -math.inf)
        out = out.masked_fill(unseen.unsqueeze(-1), 0.0)
    partial.merge(out, lse, slice(None), (0, q.shape[2]))
    return partial


def _merged(own: Partial, q: Tensor, groups: SequenceGroups) -> Tensor:
    if groups.plan.degree == 1:
        return own.out
    flat = torch.cat([own.out.reshape(-1), own.lse.reshape(-1)])
    sizes = [own.out.numel(), own.lse.numel()]
    degree = groups.plan.degree
    merged = Partial.empty(q.to(precise(q.dtype)), own.out.shape[3])
    # In the order of the ranks on all of them, so that all go on with the same bits.
    for part in exchange(groups.all, [flat] * degree, [len(flat)] * degree):
        out, lse = part.split(sizes)
        rows = (0, q.shape[2])
        merged.merge(out.view(own.out.shape), lse.view(own.lse.shape), slice(None), rows)
    return merged.out
