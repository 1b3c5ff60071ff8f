"""Ulysses: the ranks of a group exchange parts of the sequence for heads, and back.

A rank starts with all heads of its own tokens; `to_heads` gives it some heads of all the group's
tokens. Queries, keys and values share one all-to-all. Source: Jacobs et al., DeepSpeed Ulysses,
2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange
from gulliver.errors import GulliverError, once_differentiable
from gulliver.layout.even import Interval, intervals, split_evenly

Run = tuple[slice, slice]
"""Query heads and their KV heads; each KV head serves equally many query heads."""


# [Note: grouped queries] KV heads are not expanded. If the number of ranks divides them, each rank
# gets its share and the queries that use it. Otherwise queries are distributed as evenly as
# possible, and each rank gets the KV heads that its queries use; a head that several ranks need is
# sent to each, and its gradients from all of them are summed in float32. With KV heads expanded to
# the number of query heads, everything would be divisible, at `group` times the bytes.
@dataclass(frozen=True)
class Heads:
    """The heads that each rank of a Ulysses group computes."""

    queries: tuple[Interval, ...]  # Interval of query heads of each rank
    # Interval of KV heads of each rank; intervals overlap if several ranks need a head.
    keys: tuple[Interval, ...]
    group: int  # Query heads per KV head

    def runs(self, member: int) -> tuple[Run, ...]:
        # Kernels for grouped queries require it, and an uneven distribution may not satisfy it.
        first, last = self.queries[member]
        base = self.keys[member][0]
        served = [
            (head, max(first, head * self.group), min(last, (head + 1) * self.group))
            for head in range(*self.keys[member])
        ]
        runs: list[Run] = []
        for head, start, stop in served:
            if runs:
                heads, kv = runs[-1]
                each = (heads.stop - heads.start) // (kv.stop - kv.start)
                if each == stop - start:
                    runs[-1] = slice(heads.start, stop - first), slice(kv.start, head - base + 1)
                    continue
            runs.append((slice(start - first, stop - first), slice(head - base, head - base + 1)))
        return tuple(runs)


def deal_heads(heads: int, kv_heads: int, ranks: int) -> Heads:
    if kv_heads < 1 or heads % kv_heads:
        raise GulliverError(
            f"{kv_heads} KV heads do not divide {heads} heads evenly: choose a divisor of {heads}"
        )
    if ranks > heads:
        raise GulliverError(
            f"ulysses={ranks} needs at least as many heads, but there are {heads}: use "
            f"ulysses={heads} or less, and a ring for the other ranks"
        )
    group = heads // kv_heads
    if kv_heads % ranks == 0:
        keys = intervals(split_evenly(kv_heads, ranks))
        return Heads(tuple((a * group, b * group) for a, b in keys), keys, group)
    queries = intervals(split_evenly(heads, ranks))
    used = tuple((a // group, -(-b // group)) for a, b in queries)
    return Heads(queries, used, group)


@dataclass(frozen=True)
class Swap:
    """Layouts of tensors before and after an exchange of tokens for heads."""

    rank_group: RankGroup
    heads: tuple[tuple[Interval, ...], ...]  # Interval of heads of each rank, for each tensor
    lengths: tuple[tuple[int, ...], ...]  # Tokens of each rank, for each tensor
    totals: tuple[int, ...]  # Number of heads of each tensor

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        outgoing = [
            [t[:, slice(*of[r])] for t, of in zip(tensors, self.heads, strict=True)] for r in ranks
        ]
        shapes = [
            [
                (t.shape[0], of[me][1] - of[me][0], lengths[r], t.shape[3])
                for t, of, lengths in zip(tensors, self.heads, self.lengths, strict=True)
            ]
            for r in ranks
        ]
        arrived = _exchange(self.rank_group, outgoing, shapes)
        return [torch.cat(parts, 2) for parts in zip(*arrived, strict=True)]

    def to_sequence(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inverts `to_heads`; sums heads that several ranks hold."""
        ranks, me = range(self.rank_group.size), self.rank_group.rank
        cuts = [t.split(lengths, 2) for t, lengths in zip(tensors, self.lengths, strict=True)]
        shapes = [
            [
                (t.shape[0], of[r][1] - of[r][0], lengths[me], t.shape[3])
                for t, of, lengths in zip(tensors, self.heads, self.lengths, strict=True)
            ]
            for r in ranks
        ]
        arrived = _exchange(self.rank_group, [[cut[r] for cut in cuts] for r in ranks], shapes)
        parts = zip(*arrived, strict=True)
        return [
            _placed(list(part), of, total)
            for part, of, total in zip(parts, self.heads, self.totals, strict=True)
        ]


class ToHeads(torch.autograd.Function):
    """Differentiable `Swap.to_heads`."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap = swap
        return tuple(swap.to_heads(tensors))

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='all_to_all'", linear=True)
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore
        return None, *ctx.swap.to_sequence(grads)


class ToSequence(torch.autograd.Function):
    """Differentiable `Swap.to_sequence`, for heads that only one rank holds."""

    @staticmethod
    def forward(ctx: Any, swap: Swap, tensor: Tensor) -> Tensor:
        ctx.swap = swap
        return swap.to_sequence([tensor])[0]

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='all_to_all'", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return None, ctx.swap.to_heads([grad])[0]


def _exchange(
    rank_group: RankGroup, outgoing: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]
) -> list[list[Tensor]]:
    flat = [torch.cat([t.reshape(-1) for t in tensors]) for tensors in outgoing]
    counts = [[torch.Size(shape).numel() for shape in from_rank] for from_rank in shapes]
    arrived = exchange(rank_group, flat, [sum(c) for c in counts], rank_group.wire)
    return [
        [part.view(shape) for part, shape in zip(whole.split(c), from_rank, strict=True)]
        for whole, c, from_rank in zip(arrived, counts, shapes, strict=True)
    ]


def _placed(parts: list[Tensor], heads: tuple[Interval, ...], total: int) -> Tensor:
    if sum(b - a for a, b in heads) == total:
        return torch.cat(parts, 1)
    batch, _, length, size = parts[0].shape
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    whole = parts[0].new_zeros((batch, total, length, size), dtype=wide)
    for part, (start, stop) in zip(parts, heads, strict=True):
        whole[:, start:stop] += part
    return whole.to(parts[0].dtype)
