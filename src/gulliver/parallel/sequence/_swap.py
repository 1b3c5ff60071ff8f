"""Dynamic sequence parallelism: an all-to-all after which another dim is sharded.

A spatial-temporal model shards the temporal axis while it attends along the spatial one, and the
other way round (Zhao et al., DSP, 2024, arXiv 2403.10266): each attention has its axis whole, so it
needs no ring and no kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.comm import exchange
from gulliver.errors import GulliverError, once_differentiable
from gulliver.parallel.sequence._layout import Layout
from gulliver.parallel.sequence._plan import SequenceGroups
from gulliver.parallel.sequence._shard import checked_layout, natural, take


def swap_sharded_dim(
    x: Tensor, from_dim: int, to_dim: int, groups: SequenceGroups, from_size: int | None = None
) -> Tensor:
    """Swaps the sharded dim of a tensor for another.

    Each rank sends ``(N - 1) / N`` of its shard, forward and backward.

    Args:
        x: this rank's shard, whole along `to_dim`.
        from_dim: dimension that is sharded, and is whole afterwards, in the order of positions.
        to_dim: dimension that is sharded afterwards; sizes need not divide.
        groups: rank groups of the plan, whose layout is that of both dims.
        from_size: size of the whole along `from_dim`; None asks the ranks.

    Returns:
        The shard along `to_dim`, whole along `from_dim`.

    Raises:
        GulliverError: the dims are one, or the shard is not that of the layout.
    """
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    if from_dim == to_dim:
        raise GulliverError(f"dim {from_dim} is sharded already: name another to swap it with")
    before = checked_layout(x, groups, from_dim, from_size)
    after = groups.plan.lay(x.shape[to_dim])
    return _SwapDim.apply(x, (from_dim, before), (to_dim, after), groups)


class _SwapDim(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        before: tuple[int, Layout],
        after: tuple[int, Layout],
        groups: SequenceGroups,
    ) -> Tensor:
        ctx.given = before, after, groups
        return _swapped(x, before, after, groups)

    @staticmethod
    @once_differentiable("swap_dim of sequence parallelism (sp_size)", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        # An all-to-all only moves elements: its adjoint moves them back.
        before, after, groups = ctx.given
        return _swapped(grad, after, before, groups), None, None, None


def _swapped(
    x: Tensor, before: tuple[int, Layout], after: tuple[int, Layout], groups: SequenceGroups
) -> Tensor:
    (from_dim, old), (to_dim, new) = before, after
    outgoing = [take(x, new, rank, to_dim) for rank in range(new.degree)]
    shapes = []
    for size in old.sizes():
        shape = list(outgoing[groups.rank].shape)
        shape[from_dim] = size
        shapes.append(torch.Size(shape))
    flat = [part.view(-1) for part in outgoing]
    counts = [shape.numel() for shape in shapes]
    arrived = exchange(groups.all, flat, counts, groups.all.wire)
    parts = [part.view(shape) for part, shape in zip(arrived, shapes, strict=True)]
    return natural(parts, old, from_dim)
