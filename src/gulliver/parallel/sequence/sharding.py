"""Shards a model's inputs by the layout of a sequence, and gathers its outputs."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gulliver.comm.collectives import all_reduce
from gulliver.comm.messages import exchange, gather_integers
from gulliver.errors import GulliverError, check_known, once_differentiable
from gulliver.parallel.sequence.layout import Layout, SequenceGroups, Tail

ShardGradient = Literal["gather", "own", "mean"]
UnshardGradient = Literal["own", "alike"]


# [Note: gradients] There is one convention: training minimizes the *sum* of the ranks' losses,
# every operation here has the adjoint with respect to that sum, and gradients of parameters are
# summed over the ranks that hold them. The optimizer divides once, by the number of losses.
#
# - `shard` of a replicated tensor: with ``gradient="own"`` each rank keeps its tokens' share, which
#   is right if the ranks' gradients are summed later anyway (a table of position embeddings is a
#   parameter). For an input whose gradient is not reduced later, "gather" gives all ranks the sum
#   of the shares, and "mean" divides it like the optimizer divides the gradients of parameters.
# - `unshard`, and the value of `mean_loss`: all ranks continue with the same computation. With
#   "own" the ranks of a sequence share one loss: a rank's gradient is its tokens' share, and the
#   sum is divided by the number of sequences. With "alike" each rank counts the loss as its own,
#   so N equal gradients are summed (`sum_of_equal`, without messages), and the sum is divided by
#   the number of ranks.
#
# Why "alike", if N is multiplied here and divided in the optimizer? Because code after `unshard`
# may also have parameters, such as a head or a penalty on the weights. Each rank runs it in full,
# so its gradients are summed N times anyway. A single division is right for these and for the
# shares only if both are counted N times. A `Booster`, which does not know what a loss contains,
# therefore uses "alike".
def shard(
    x: Tensor, groups: SequenceGroups, dim: int = 1, gradient: ShardGradient = "gather"
) -> Tensor:
    """Returns this rank's shard of a replicated tensor.

    Args:
        x: full tensor: activations, ids, labels, position ids, rotary tables.
        groups: rank groups of the plan.
        dim: dimension of the sequence.
        gradient: "gather" returns the full gradient on all ranks, "mean" divides it by the number
            of ranks, "own" returns the gradient of local tokens; see [Note: gradients].

    Raises:
        GulliverError: `gradient` is unknown.
    """
    check_known("gradient", gradient, get_args(ShardGradient))
    layout = groups.plan.lay(x.shape[dim])
    return _Shard.apply(x, groups, layout, dim % x.dim(), gradient)


def unshard(
    x: Tensor,
    groups: SequenceGroups,
    dim: int = 1,
    length: int | None = None,
    gradient: UnshardGradient = "own",
) -> Tensor:
    """Gathers a sharded tensor.

    Args:
        x: this rank's shard.
        groups: rank groups of the plan.
        dim: dimension of the sequence.
        length: tokens of the full sequence; None gathers it from the ranks.
        gradient: "own" propagates the gradient of this rank's tokens, "alike" multiplies it by the
            number of ranks; see [Note: gradients].

    Raises:
        GulliverError: the shards do not match the plan's layout, or `gradient` is unknown.
    """
    check_known("gradient", gradient, get_args(UnshardGradient))
    layout = checked_layout(x, groups, dim, length)
    return _Unshard.apply(x, groups, layout, dim % x.dim(), gradient)


def unshard_tail(
    x: Tensor, groups: SequenceGroups, tail: Tail, gradient: UnshardGradient = "own"
) -> Tensor:
    """Gathers the last tokens of a sequence, which may be on any rank."""
    check_known("gradient", gradient, get_args(UnshardGradient))
    return _Unshard.apply(x, groups, tail, 1, gradient)


def shard_labels(labels: Tensor, groups: SequenceGroups, ignore_index: int = -100) -> Tensor:
    """Returns this rank's shard of next-token labels, shifted before sharding.

    The label of a token is the next token's id, which may be on another rank; a model that shifts
    labels locally would lose one at each shard boundary. The result needs no further shift.

    Args:
        labels: unshifted labels of the full sequence, ``[batch, length]``.
        groups: rank groups of the plan.
        ignore_index: label of the last token, which has no successor.
    """
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    return shard(shifted, groups, 1)


def position_ids(groups: SequenceGroups, length: int, documents: Tensor | None = None) -> Tensor:
    """Returns the positions of this rank's tokens, for position embeddings and rotary tables.

    Args:
        groups: rank groups of the plan.
        length: tokens of the full sequence.
        documents: document ids as in `Mask`; positions then restart at each document.

    Returns:
        Positions ``[local length]``, or ``[batch, local length]`` for batched documents; int64, on
        the device of the documents.
    """
    own = groups.plan.lay(length).positions(groups.rank)
    if documents is None:
        return own
    everywhere = torch.arange(length, device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    starts = torch.where(begins, everywhere, 0).cummax(-1).values
    return (everywhere - starts)[..., own.to(documents.device)]


def mean_loss(losses: Tensor, groups: SequenceGroups, counted: Tensor | None = None) -> Tensor:
    """Returns the mean over all tokens of a sharded sequence.

    A mean of the ranks' means would be wrong if they count different numbers of tokens.

    Args:
        losses: losses of this rank's tokens, any shape.
        groups: rank groups of the plan.
        counted: whether each loss counts, bool of the same shape; None for all.

    Returns:
        The same scalar on every rank. Backward on a rank covers only its own tokens, so sum the
        gradients of parameters over the ranks of a sequence.
    """
    kept = losses if counted is None else torch.where(counted, losses, 0.0)
    count = losses.numel() if counted is None else int(counted.sum())
    totals = torch.stack(
        [kept.detach().double().sum(), kept.new_tensor(count, dtype=torch.float64)]
    )
    if groups.plan.degree > 1:
        all_reduce(totals, group=groups.all.process_group)
    share = kept.sum() / totals[1].clamp(min=1).to(losses.dtype)
    return show(share, (totals[0] / totals[1].clamp(min=1)).to(losses.dtype))


def show(share: Tensor, whole: Tensor, alike: int = 1) -> Tensor:
    return _Show.apply(share, whole, alike)


def sum_of_equal(gradient: Tensor, ranks: int) -> Tensor:
    """Sums a gradient that is equal on all ranks, by multiplication."""
    # The only place where a gradient is multiplied by a number of ranks; see [Note: gradients].
    return gradient if ranks == 1 else gradient * ranks


def checked_layout(x: Tensor, groups: SequenceGroups, dim: int, length: int | None) -> Layout:
    held = {groups.rank: x.shape[dim]}
    if length is None:
        gathered = gather_integers(groups.all, [x.shape[dim]], x.device)
        held = {rank: values[0] for rank, values in enumerate(gathered)}
        length = sum(held.values())
    layout = groups.plan.lay(length)
    wanted = layout.sizes()
    for rank, count in held.items():
        if count != wanted[rank]:
            raise GulliverError(
                f"rank {rank} holds {count} of {length} positions in dim {dim}, but the "
                f"{layout.name} layout gives it {wanted[rank]}"
            )
    return layout


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: SequenceGroups, layout: Layout, dim: int, gradient: str
    ) -> Tensor:
        ctx.given = groups, layout, dim, gradient
        return take(x, layout, groups.rank, dim)

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='all_to_all' or 'ring_attn'", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        groups, layout, dim, gradient = ctx.given
        if gradient != "own":
            whole = _gathered(grad, groups, layout, dim)
            return whole / layout.degree if gradient == "mean" else whole, None, None, None, None
        shape = list(grad.shape)
        shape[dim] = layout.length
        index = layout.positions(groups.rank).to(grad.device)
        return grad.new_zeros(shape).index_copy_(dim, index, grad), None, None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: SequenceGroups, layout: Layout, dim: int, gradient: str
    ) -> Tensor:
        ctx.given = groups, layout, dim, gradient
        return _gathered(x, groups, layout, dim)

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='all_to_all' or 'ring_attn'", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        groups, layout, dim, gradient = ctx.given
        own = take(grad, layout, groups.rank, dim)
        counted = layout.degree if gradient == "alike" else 1
        return sum_of_equal(own, counted), None, None, None, None


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, whole: Tensor, alike: int) -> Tensor:
        ctx.alike = alike
        return whole.clone()

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='all_to_all' or 'ring_attn'", linear=True)
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return sum_of_equal(grad, ctx.alike), None, None


def take(x: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    # Always a copy, because gloo reads a view's storage from its beginning.
    pieces = [x.narrow(dim, start, stop - start) for start, stop in layout.of_rank(rank)]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim)


def natural(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    whole = torch.cat(parts, dim)
    order = layout.order()
    if bool((order.diff() == 1).all()):
        return whole
    return whole.index_select(dim, order.argsort().to(whole.device))


def _gathered(x: Tensor, groups: SequenceGroups, layout: Layout, dim: int) -> Tensor:
    if layout.degree == 1:
        return x.clone()
    shapes = [torch.Size([*x.shape[:dim], n, *x.shape[dim + 1 :]]) for n in layout.sizes()]
    flat = x.contiguous().view(-1)
    arrived = exchange(groups.all, [flat] * layout.degree, [shape.numel() for shape in shapes])
    parts = [part.view(shape) for part, shape in zip(arrived, shapes, strict=True)]
    return natural(parts, layout, dim)


# Dynamic sequence parallelism: an all-to-all after which another dim is sharded.
#
# A spatial-temporal model shards the temporal axis while it attends along the spatial one, and vice
# versa (Zhao et al., DSP, 2024, arXiv 2403.10266): each attention has its complete axis, so it
# needs no ring and no special kernel.


def swap_sharded_dim(
    x: Tensor, from_dim: int, to_dim: int, groups: SequenceGroups, from_size: int | None = None
) -> Tensor:
    """Swaps the sharded dim of a tensor for another.

    Each rank sends ``(N - 1) / N`` of its shard, forward and backward.

    Args:
        x: this rank's shard, unsharded along `to_dim`.
        from_dim: sharded dimension; unsharded afterwards, in the order of positions.
        to_dim: dimension that is sharded afterwards; its size need not be divisible.
        groups: rank groups of the plan, whose layout applies to both dims.
        from_size: full size along `from_dim`; None gathers it from the ranks.

    Returns:
        The shard along `to_dim`, unsharded along `from_dim`.

    Raises:
        GulliverError: the dims are equal, or the shard does not match the layout.
    """
    from_dim, to_dim = from_dim % x.dim(), to_dim % x.dim()
    if from_dim == to_dim:
        raise GulliverError(f"dim {from_dim} is already sharded; choose another to_dim")
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
        # An all-to-all only moves elements, so its adjoint moves them back.
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
