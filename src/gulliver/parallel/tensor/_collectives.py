"""Differentiable collectives, each with its adjoint in the backward pass.

| forward | backward | where |
|---|---|---|
| `copy`: nothing | all-reduce | a whole tensor goes into columns |
| `copy_region`: nothing | all-reduce over copies | several ranks hold the same columns |
| `reduce`: all-reduce | nothing | partial sums become a whole tensor |
| `gather`: all-gather | keep the own piece | columns, or a sequence, become whole for all |
| `split`: keep the own piece | all-gather | a whole tensor is cut, its rest not needed here |
| `gather_partial`: all-gather | reduce-scatter | a piece is used by all, each in its own way |
| `reduce_split`: reduce-scatter | all-gather | partial sums become pieces |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from gulliver.comm import IDENTITY, RankGroup, WireFormat, all_reduce
from gulliver.layout import intervals
from gulliver.memory import Region
from gulliver.parallel.tensor._pieces import start_gather, start_reduce

F = TypeVar("F", bound=Callable[..., Any])


# [Note: replicated or partial] A collective alone does not say what its backward is; how the ranks
# use the result does. The first four keep to one rule: what is whole is the same on all ranks,
# computed by all alike, and so is its gradient. So the backward of an all-gather (`gather`) takes
# this rank's piece and sends nothing: summing would count one loss once for each rank. Likewise the
# gradient of a replicated sum (`reduce`) is replicated already. `gather_partial` is for ranks that
# each do something else with the whole: their gradients are partial, and have to be summed.
#
# Each backward is itself one of them, so all can be differentiated twice.
#
# In a group of one rank all of them return their input. Compilers leave them as they are: what is
# sent cannot be traced. Source: f and g of Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053);
# g-bar of Korthikanti et al., 2022 (arXiv 2205.05198).
def uncompiled(function: F) -> F:
    """Disables compilation of a function that communicates."""
    found: Any = torch.compiler.disable(function)  # pyright: ignore
    return found


@uncompiled
def copy(x: Tensor, rank_group: RankGroup) -> Tensor:
    """Returns the same tensor; its gradient is summed over the ranks."""
    return x if rank_group.size == 1 else _CopyIn.apply(x, rank_group)


@uncompiled
def copy_region(x: Tensor, rank_group: RankGroup, region: Region) -> Tensor:
    """Returns the same tensor; its gradient is summed over the ranks that hold the same region."""
    return _CopyRegion.apply(x, rank_group, region)


@uncompiled
def reduce(x: Tensor, rank_group: RankGroup) -> Tensor:
    """Returns the sum over the ranks; its gradient goes to each as it is."""
    return x if rank_group.size == 1 else _Reduce.apply(x, rank_group)


@uncompiled
def gather(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Gathers the whole of which each rank has a piece; of the gradient each keeps its piece.

    Args:
        x: this rank's piece.
        dim: dimension that is sharded.
        lengths: length of each rank's piece along `dim`.
        rank_group: rank group to gather over.
    """
    return _along("gather", x, dim, lengths, rank_group)


@uncompiled
def split(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Returns this rank's piece of a whole that all have; the gradient is gathered."""
    return _along("split", x, dim, lengths, rank_group)


@uncompiled
def gather_partial(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Gathers the whole of which each rank has a piece; gradients are reduce-scattered."""
    return _along("gather_partial", x, dim, lengths, rank_group)


@uncompiled
def reduce_split(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Returns this rank's piece of the sum over the ranks; the gradient is gathered."""
    return _along("reduce_split", x, dim, lengths, rank_group)


def _along(move: str, x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    if rank_group.size == 1:
        return x
    return _Along.apply(x, move, dim % x.dim(), tuple(lengths), rank_group)


def summed(x: Tensor, rank_group: RankGroup, wire: WireFormat = IDENTITY) -> Tensor:
    """Returns the sum over the ranks in a new tensor; not differentiable."""
    total = x.detach().clone().contiguous()
    all_reduce(total, group=rank_group.process_group, any_order=True, wire=wire)
    return total


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_group: RankGroup) -> Tensor:
        ctx.rank_group = rank_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce(grads[0], ctx.rank_group), None


class _CopyRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_group: RankGroup, region: Region) -> Tensor:
        ctx.how = rank_group, region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rank_group, region = ctx.how
        ((start, stop),) = region.runs
        # All regions at once: it is small, and needs no groups of the ranks that share one.
        whole = grads[0].new_zeros(region.shape)
        whole.narrow(region.dim, start, stop - start).copy_(grads[0])
        total = reduce(whole, rank_group.packed(IDENTITY))
        return total.narrow(region.dim, start, stop - start).contiguous(), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank_group: RankGroup) -> Tensor:
        ctx.rank_group = rank_group
        return summed(x, rank_group, rank_group.wire)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Each rank uses it in its own way: what is differentiated again is summed over them.
        return copy(grads[0], ctx.rank_group), None


class _Along(Function):
    """A collective along a dim, whose adjoint is another one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, move: str, dim: int, lengths: tuple[int, ...], rank_group: RankGroup
    ) -> Tensor:
        ctx.how = move, dim, lengths, rank_group
        if move == "split":
            return _own(x, dim, lengths, rank_group)
        start = start_reduce if move == "reduce_split" else start_gather
        return start(x, dim, lengths, rank_group)()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        move, dim, lengths, rank_group = ctx.how
        # The public function, not the raw collective: a backward may be differentiated again.
        adjoint = ADJOINTS[move](grads[0], dim, lengths, rank_group)
        return adjoint, None, None, None, None


ADJOINTS: dict[str, Callable[..., Tensor]] = {
    "gather": split,
    "split": gather,
    "gather_partial": reduce_split,
    "reduce_split": gather_partial,
}


def _own(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    start, stop = intervals(lengths)[rank_group.rank]
    # A copy: a view would keep the whole alive.
    return x.narrow(dim, start, stop - start).clone()
