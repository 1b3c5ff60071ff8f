"""Collectives over tensor-parallel ranks, and the uneven sharding of features over them.

Units are distributed as evenly as possible, the first ranks getting one more. A unit may have
several features: an attention head is never split, and with grouped heads, a key-value head and its
query heads form one unit. Features are not padded: padding would change norms, parameter counts and
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gulliver._compat import uncompiled
from gulliver.comm.collectives import all_gather, all_reduce, reduce_scatter
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import Messages, post
from gulliver.layout.even import Interval, intervals, split_evenly
from gulliver.memory.parts import Region
from gulliver.precision.wire.formats import IDENTITY, WireFormat


def share(total: int, units: int, size: int, place: int, blocks: int = 1) -> tuple[Interval, ...]:
    """Returns one rank's intervals of features that consist of blocks of equal units."""
    # A fused projection ``[q; k; v]`` consists of three blocks. Sharded as one, a rank would get
    # queries without their keys, so each block is distributed separately.
    width, block = total // (units * blocks), total // blocks
    start, stop = intervals(split_evenly(units, size))[place]
    return tuple((b * block + start * width, b * block + stop * width) for b in range(blocks))


# All-gather and reduce-scatter of uneven pieces along one dim, in one call or piece by piece.
#
# A full tensor is split along `dim` into one piece per rank. The lengths of an even split differ by
# at most one, so a collective of padded pieces wastes almost nothing.
#
# *In one call*: `start_gather` and `start_reduce` start a collective and return a function that
# waits for it. *Piece by piece*: `ring_gather` yields each piece when it arrives, so that a product
# with it overlaps with the next hop; `Reduction` sends each piece to its owner as soon as it is
# computed, and the owner adds the terms in rank order, in float32 or wider, because in order of
# arrival results would vary from run to run.
#
# All ranks call the same functions in the same order. Nothing here is differentiable.


RING_TAG, PIECE_TAG, SIZE_TAG = 500, 600, 700
"""Base message tags: of ring pieces, of pieces sent to their owner, and of sizes."""

Wait = Callable[[], Tensor]


def start_gather(own: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Wait:
    """Starts an all-gather of pieces of any lengths along a dim."""
    longest, size, slots = max(lengths), rank_group.size, _slots(rank_group)
    padded = _padded(own, dim, longest)
    flat = padded.new_empty(size * padded.numel())
    handle = all_gather(
        flat,
        padded.view(-1),
        group=rank_group.process_group,
        async_op=True,
        wire=rank_group.wire,
    )
    buffer = flat.view(size, *padded.shape)

    def wait() -> Tensor:
        handle.wait()
        if min(lengths) == longest and slots == list(range(size)):
            # A view if no larger dim precedes, else one copy.
            return buffer.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        pieces = [buffer[slots[p]].narrow(dim, 0, lengths[p]) for p in range(size)]
        return torch.cat(pieces, dim)

    return wait


def start_reduce(whole: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Wait:
    """Starts a reduce-scatter into pieces of any lengths; arguments as for `start_gather`."""
    longest = max(lengths)
    parts = whole.detach().split(list(lengths), dim)
    stacked = torch.stack(
        [_padded(parts[place], dim, longest) for place in rank_group.group_order()]
    )
    shape = stacked.shape[1:]
    own = stacked.new_empty(stacked[0].numel())
    handle = reduce_scatter(
        own,
        stacked.view(-1),
        group=rank_group.process_group,
        async_op=True,
        wire=rank_group.wire,
    )
    # The collective reads it until it has completed.
    kept = [stacked]

    def wait() -> Tensor:
        handle.wait()
        kept.clear()
        return own.view(shape).narrow(dim, 0, lengths[rank_group.rank]).contiguous()

    return wait


def ring_gather(
    own: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup
) -> Iterator[tuple[int, Tensor]]:
    """Yields each rank with its piece, this rank's first; one transfer at a time is in flight."""
    # Every piece is forwarded to the next rank, so each link carries one piece at a time.
    place, piece = rank_group.rank, own.detach().contiguous()
    after, before = (rank_group.ranks[(place + step) % rank_group.size] for step in (1, -1))
    for step in range(rank_group.size):
        messages, coming = None, piece
        if step < rank_group.size - 1:
            shape = list(own.shape)
            shape[dim] = lengths[(place - 1) % rank_group.size]
            coming = own.new_empty(shape)
            # Packing a packed tensor again changes at most its last bit.
            messages = post(
                [(before, coming)],
                [(after, piece)],
                rank_group.process_group,
                RING_TAG + step,
                rank_group.wire,
            )
        yield place, piece
        if messages is not None:
            messages.wait()
        place, piece = (place - 1) % rank_group.size, coming


class Reduction:
    """A reduce-scatter of a tensor whose pieces are computed one at a time."""

    # Call `send` for every rank of `order`, then `finish` with this rank's piece.

    def __init__(
        self,
        shape: Sequence[int],
        dim: int,
        lengths: Sequence[int],
        rank_group: RankGroup,
        like: Tensor,
    ) -> None:
        self._rank_group = rank_group
        self._messages: list[Messages] = []
        self._shape = tuple(shape)
        self._arrived = {
            place: like.new_empty(self._shape)
            for place in range(rank_group.size)
            if place != rank_group.rank
        }

    @property
    def order(self) -> list[int]:
        place, size = self._rank_group.rank, self._rank_group.size
        return [(place + step) % size for step in range(1, size)]

    def send(self, place: int, piece: Tensor) -> None:
        """Sends another rank's piece, and starts receiving a term of this rank's piece."""
        rank_group, piece = self._rank_group, piece.detach().contiguous()
        step = (place - rank_group.rank) % rank_group.size
        source = (rank_group.rank - step) % rank_group.size
        incoming = [(rank_group.ranks[source], self._arrived[source])]
        sent = [(rank_group.ranks[place], piece)]
        self._messages.append(
            post(incoming, sent, rank_group.process_group, PIECE_TAG + step, rank_group.wire)
        )

    def finish(self, own: Tensor) -> Tensor:
        """Adds the terms of all ranks to this rank's piece, in rank order."""
        while self._messages:
            self._messages.pop(0).wait()
        wide = own.dtype if own.dtype.itemsize > 2 else torch.float32
        total: Tensor | None = None
        for place in range(self._rank_group.size):
            term = own if place == self._rank_group.rank else self._arrived.pop(place)
            total = term.to(wide, copy=True) if total is None else total.add_(term)
        assert total is not None
        return total.to(own.dtype)


def gather_sizes(size: int, rank_group: RankGroup, device: torch.device) -> tuple[int, ...]:
    own = torch.tensor([size], device=device)
    sizes = own.new_empty(rank_group.size)
    all_gather(sizes, own, group=rank_group.process_group)
    found: list[int] = sizes.tolist()
    return tuple(found[slot] for slot in _slots(rank_group))


def _slots(rank_group: RankGroup) -> list[int]:
    order = rank_group.group_order()
    return [order.index(place) for place in range(rank_group.size)]


def _padded(piece: Tensor, dim: int, length: int) -> Tensor:
    # Detached, because a collective's copies run on another thread, with autograd enabled.
    piece = piece.detach()
    if piece.shape[dim] == length:
        return piece.contiguous()
    shape = list(piece.shape)
    shape[dim] = length
    padded = piece.new_zeros(shape)
    padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return padded


# Differentiable collectives, each with its adjoint in the backward pass.
#
# | forward | backward | use |
# |---|---|---|
# | `copy`: nothing | all-reduce | a full tensor is the input of columns |
# | `copy_region`: nothing | all-reduce over copies | several ranks hold the same columns |
# | `reduce`: all-reduce | nothing | partial sums become a full tensor |
# | `gather`: all-gather | keep this rank's piece | all ranks need all columns, or the sequence |
# | `split`: keep this rank's piece | all-gather | a full tensor is sharded |
# | `gather_partial`: all-gather | reduce-scatter | ranks use the full tensor differently |
# | `reduce_split`: reduce-scatter | all-gather | partial sums become pieces |


# [Note: replicated or partial] The backward of a collective depends on how the ranks use the
# result. The first five assume that a full tensor, and its gradient, are equal on all ranks. So the
# backward of an all-gather (`gather`) takes this rank's piece without communication; a sum would
# count one loss once per rank. Likewise, the gradient of a replicated sum (`reduce`) is already
# replicated. `gather_partial` is for ranks that use the full tensor differently: their gradients
# are partial and have to be summed.
#
# Each backward is itself one of them, so all can be differentiated twice.
#
# In a group of one rank all of them return their input. They are not compiled, because
# communication cannot be traced. Source: f and g of Megatron-LM (Shoeybi et al., 2019, arXiv
# 1909.08053); g-bar of Korthikanti et al., 2022 (arXiv 2205.05198).
@uncompiled
def copy(x: Tensor, rank_group: RankGroup) -> Tensor:
    """Identity in forward; sums the gradient over the ranks."""
    return x if rank_group.size == 1 else _CopyIn.apply(x, rank_group)


@uncompiled
def copy_region(x: Tensor, rank_group: RankGroup, region: Region) -> Tensor:
    """Identity in forward; sums the gradient over ranks with the same region."""
    return _CopyRegion.apply(x, rank_group, region)


@uncompiled
def reduce(x: Tensor, rank_group: RankGroup) -> Tensor:
    """Sums over the ranks; gradients pass through unchanged."""
    return x if rank_group.size == 1 else _Reduce.apply(x, rank_group)


@uncompiled
def gather(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Gathers a sharded tensor; the gradient is this rank's piece."""
    return _along("gather", x, dim, lengths, rank_group)


@uncompiled
def split(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Returns this rank's piece of a replicated tensor; gathers the gradient."""
    return _along("split", x, dim, lengths, rank_group)


@uncompiled
def gather_partial(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Gathers a sharded tensor; reduce-scatters the gradient."""
    return _along("gather_partial", x, dim, lengths, rank_group)


@uncompiled
def reduce_split(x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    """Reduce-scatters a partial sum; gathers the gradient."""
    return _along("reduce_split", x, dim, lengths, rank_group)


def _along(move: str, x: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Tensor:
    if rank_group.size == 1:
        return x
    return _Along.apply(x, move, dim % x.dim(), tuple(lengths), rank_group)


def summed(x: Tensor, rank_group: RankGroup, wire: WireFormat = IDENTITY) -> Tensor:
    """Returns the sum over the ranks as a new tensor; not differentiable."""
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
        # All regions in one message, which is small and needs no groups of ranks with equal
        # regions.
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
        # Each rank uses it differently, so second derivatives are summed over the ranks.
        return copy(grads[0], ctx.rank_group), None


class _Along(Function):
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
        # The differentiable function, because a backward may be differentiated again.
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
    # A copy, because a view would keep the full tensor alive.
    return x.narrow(dim, start, stop - start).clone()
