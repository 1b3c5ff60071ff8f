"""Halo exchange, gather and reduction of activations sharded over ranks, with their adjoints.

Everything uses one primitive: `fetch` sends each rank the interval of positions that it requests,
and its adjoint `sum_on_owners` sums gradients on the ranks that own the positions. A halo exchange
fetches a few more positions, a gather fetches all of them, and a reduce-scatter is the adjoint of a
gather. Intervals follow from sizes that all ranks know, so no sizes are exchanged. Uneven extents,
halos longer than the neighbor's shard and empty ranks need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange
from gulliver.errors import once_differentiable
from gulliver.layout.even import Interval, intervals, split_evenly
from gulliver.parallel.convolution.chunked import IDENTITY, SlidingWindow, overlap
from gulliver.parallel.convolution.functions import merged
from gulliver.parallel.convolution.sharded import (
    Key,
    PartLayout,
    Rows,
    Sharded,
    ShardedDim,
    Sizes,
    Statistics,
    is_plain,
    like,
    opened,
    reject,
)


# [Note: one order on all ranks] Messages are matched by their order, also in backward. Autograd
# runs the nodes of a graph in the reverse order of their creation, regardless of timing, so the
# order is the same on all ranks if each creates the same nodes. So a rank without work computes one
# window of zeros and keeps an empty slice of it (`Rows.all`), which is part of the graph, unlike a
# new empty tensor.
class Ranks(PartLayout):
    """Shards of an activation on the ranks of a group."""

    where = "ranks"

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self.rank, self.size = rank_group.rank, rank_group.size
        self.graded = torch.is_grad_enabled()

    def exchange(self, outgoing: list[Tensor], counts: list[int]) -> list[Tensor]:
        return exchange(self.rank_group, [part.contiguous() for part in outgoing], counts)

    def shard(self, whole: Tensor, dim: int) -> Sharded:
        cut = ShardedDim(dim % whole.dim(), self.layout(whole.shape[dim]))
        start, stop = intervals(cut.sizes)[self.rank]
        return Sharded(whole.narrow(dim, start, stop - start), cut, self)

    def layout(self, extent: int) -> Sizes:
        return split_evenly(extent, self.size)

    def at_ends(self, x: Sharded, before: int, after: int, mode: str) -> tuple[int, int]:
        return before, after

    def rows(self, x: Sharded, window: SlidingWindow, after: int, key: Key) -> tuple[Rows, Sizes]:
        sizes = self.layout(window.count(x.cut.extent, after))
        return self.rows_for(x, window, sizes), sizes

    def rows_for(self, x: Sharded, window: SlidingWindow, sizes: Sizes) -> Rows:
        """Fetches the inputs needed for this rank's outputs, given output shard sizes."""
        extent, outputs = x.cut.extent, intervals(sizes)
        needs = [window.needs(*o) if o[0] < o[1] else (0, 0) for o in outputs]
        wants = [overlap(need, (0, extent)) for need in needs]
        parts = self.fetch(x.local, x.cut.dim, intervals(x.cut.sizes), wants)
        start = wants[self.rank][0]
        return Rows(parts, start, x.cut.dim, needs[self.rank], outputs[self.rank])

    def fetch(
        self, local: Tensor, dim: int, have: Sequence[Interval], wants: Sequence[Interval]
    ) -> list[Tensor]:
        """Returns the interval that this rank requests, as one tensor if gradients are needed."""
        if all(overlap(h, w) == w or w[0] == w[1] for h, w in zip(have, wants, strict=True)):
            (start, _), (low, high) = have[self.rank], wants[self.rank]
            return [local.narrow(dim, low - start if low < high else 0, high - low)]
        if torch.is_grad_enabled():
            return [_Fetch.apply(local, dim, have, wants, self)]
        return self.parts(local, dim, have, wants)

    def parts(
        self, local: Tensor, dim: int, have: Sequence[Interval], wants: Sequence[Interval]
    ) -> list[Tensor]:
        """Returns the interval that this rank requests, rank by rank; the local part is a view."""
        mine, outgoing, shapes = have[self.rank], [], []
        for peer, (theirs, want) in enumerate(zip(have, wants, strict=True)):
            low, high = overlap(mine, want) if peer != self.rank else (0, 0)
            part = local.narrow(dim, low - mine[0] if low < high else 0, high - low)
            outgoing.append(part.reshape(-1))
            low, high = overlap(theirs, wants[self.rank])
            shapes.append(_resized(local, dim, high - low))
        own = overlap(mine, wants[self.rank])
        counts = [0 if p == self.rank else shape.numel() for p, shape in enumerate(shapes)]
        arrived = self.exchange(outgoing, counts)
        found = [part.view(s) for p, (part, s) in enumerate(zip(arrived, shapes, strict=True))
                 if p != self.rank]  # fmt: skip
        first = own[0] - mine[0] if own[0] < own[1] else 0
        found.insert(self.rank, local.narrow(dim, first, own[1] - own[0]))
        return found

    def sum_on_owners(
        self, grad: Tensor, dim: int, have: Sequence[Interval], wants: Sequence[Interval]
    ) -> Tensor:
        """Sums the gradients of fetched positions on their owners: the adjoint of `parts`."""
        held, outgoing, places = wants[self.rank], [], []
        for theirs, want in zip(have, wants, strict=True):
            low, high = overlap(theirs, held)
            part = grad.narrow(dim, low - held[0] if low < high else 0, high - low)
            outgoing.append(part.reshape(-1))
            places.append(overlap(have[self.rank], want))
        counts = [_resized(grad, dim, high - low).numel() for low, high in places]
        start, stop = have[self.rank]
        total = grad.new_zeros(_resized(grad, dim, stop - start))
        arrived = self.exchange(outgoing, counts)
        for part, (low, high) in zip(arrived, places, strict=True):
            if low < high:
                region = total.narrow(dim, low - start, high - low)
                region += part.view(region.shape)
        return total

    def whole(self, x: Sharded, key: Key) -> Tensor:
        everything = [(0, x.cut.extent)] * self.size
        part, dim = opened(x.local, x.cut, x.cut.sizes[self.rank]), x.cut.dim
        parts = self.fetch(part, dim + 1, intervals(x.cut.sizes), everything)
        return torch.cat(parts, dim + 1).flatten(dim, dim + 2)

    def summed(self, own: Tensor) -> Tensor:
        flat = own.contiguous().view(-1)
        arrived = self.exchange([flat] * self.size, [flat.numel()] * self.size)
        return torch.stack([part.view(own.shape) for part in arrived]).sum(0)

    def statistics(self, x: Sharded, own: Statistics, key: Key) -> Statistics:
        _, mean, squares = own
        flat = torch.cat([mean.reshape(-1), squares.reshape(-1)])
        arrived = self.exchange([flat] * self.size, [flat.numel()] * self.size)
        # Shards have elements in proportion to their positions; a rank without any sends zeros.
        each = math.prod(x.shape) / mean.numel() / x.cut.extent
        parts = []
        for size, part in zip(x.cut.sizes, arrived, strict=True):
            of_mean, of_squares = (t.view(mean.shape) for t in part.chunk(2))
            parts.append((size * each, of_mean, of_squares))
        return merged(parts)

    def resplit(self, x: Sharded, sizes: Sizes) -> Sharded:
        if x.cut.sizes == sizes:
            return x
        if not is_plain(x):
            reject("a new layout", x)
        rows = self.rows_for(x, IDENTITY, sizes)
        start, stop = rows.outputs
        local = rows.take(start, stop) if start < stop else torch.cat(rows.parts, rows.dim)
        return like(x, local, x.cut.resized(sizes))

    def align(self, parts: Sequence[Sharded], key: Key) -> list[Sharded]:
        """Reshards activations to equal shard sizes; replicates sharded dims of size one."""
        if len({part.cut.sizes for part in parts}) == 1:
            return list(parts)
        longest = max(part.cut.extent for part in parts)
        sizes = self.layout(longest)
        return [
            self.resplit(p, sizes) if p.cut.extent == longest else self._spread(p) for p in parts
        ]

    def _spread(self, x: Sharded) -> Sharded:
        if x.cut.extent != 1:
            reject("an operation on different extents", x)
        # All ranks have the only position, which is broadcast like any dim of size one.
        ones = ShardedDim(x.cut.dim, (1,) * self.size)
        return like(x, self.whole(x, ("align", 0)), ones)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, have: Any, wants: Any, ranks: Ranks) -> Tensor:
        ctx.how = dim, have, wants, ranks
        return torch.cat(ranks.parts(local, dim, have, wants), dim)

    @staticmethod
    @once_differentiable("a convolution that is shared by ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        dim, have, wants, ranks = ctx.how
        return ranks.sum_on_owners(grad, dim, have, wants), None, None, None, None


def _resized(x: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size([*x.shape[:dim], size, *x.shape[dim + 1 :]])
