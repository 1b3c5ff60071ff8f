"""All-gather and reduce-scatter of uneven pieces along one dim, at once or piece by piece.

A whole tensor is cut along `dim` into one piece for each rank. Lengths differ by at most one when
they were dealt evenly, so a collective of padded pieces carries them almost without waste.

*At once*: `start_gather` and `start_reduce` begin one collective and return what to wait for.
*Piece by piece*: `ring_gather` yields each piece as it comes round the ring, so that a product
with it hides the next hop; `Reduction` sends each piece to its owner as soon as it is computed, and
the owner adds what it gets in the order of the ranks, in float32 or wider: in the order of arrival
the bits would change from run to run.

All ranks call the same functions in the same order. Nothing here is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gulliver.comm import Messages, RankGroup, all_gather, post, reduce_scatter

RING_TAG, PIECE_TAG, SIZE_TAG = 500, 600, 700
"""Message tags: of pieces that go round and of those that go to their owner, plus the step; of
sizes."""

Wait = Callable[[], Tensor]
"""Waits for a collective and returns its result."""


def start_gather(own: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Wait:
    """Starts to gather the pieces of all ranks."""
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
            # A view where nothing comes before the dim, else one copy.
            return buffer.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        pieces = [buffer[slots[p]].narrow(dim, 0, lengths[p]) for p in range(size)]
        return torch.cat(pieces, dim)

    return wait


def start_reduce(whole: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup) -> Wait:
    """Starts to reduce-scatter a tensor; arguments as for `start_gather`."""
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
    # It is read until the collective is done.
    kept = [stacked]

    def wait() -> Tensor:
        handle.wait()
        kept.clear()
        return own.view(shape).narrow(dim, 0, lengths[rank_group.rank]).contiguous()

    return wait


def ring_gather(
    own: Tensor, dim: int, lengths: Sequence[int], rank_group: RankGroup
) -> Iterator[tuple[int, Tensor]]:
    """Yields every rank and its piece, this rank's first, while the next piece travels."""
    # Every piece is passed on to the next rank, so each link carries one piece at a time.
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
    """A reduce-scatter of a tensor whose pieces are computed one by one."""

    # Call `send` for every rank of `order`, then `finish` with the own piece.

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
        """Order in which pieces are computed: at any time all ranks send to different ones."""
        place, size = self._rank_group.rank, self._rank_group.size
        return [(place + step) % size for step in range(1, size)]

    def send(self, place: int, piece: Tensor) -> None:
        """Sends the piece of another rank, and begins to receive one."""
        rank_group, piece = self._rank_group, piece.detach().contiguous()
        step = (place - rank_group.rank) % rank_group.size
        source = (rank_group.rank - step) % rank_group.size
        incoming = [(rank_group.ranks[source], self._arrived[source])]
        sent = [(rank_group.ranks[place], piece)]
        self._messages.append(
            post(incoming, sent, rank_group.process_group, PIECE_TAG + step, rank_group.wire)
        )

    def finish(self, own: Tensor) -> Tensor:
        """Returns the sum of all ranks' pieces for this one, added in the order of the ranks."""
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
    """Returns the numbers that all ranks of the group passed; one small all-gather."""
    own = torch.tensor([size], device=device)
    sizes = own.new_empty(rank_group.size)
    all_gather(sizes, own, group=rank_group.process_group)
    found: list[int] = sizes.tolist()
    return tuple(found[slot] for slot in _slots(rank_group))


def _slots(rank_group: RankGroup) -> list[int]:
    """Returns where the group's collectives put the piece of each rank of a rank group."""
    order = rank_group.group_order()
    return [order.index(place) for place in range(rank_group.size)]


def _padded(piece: Tensor, dim: int, length: int) -> Tensor:
    # Detached: a collective's copies run on a thread of their own, where gradients are recorded.
    piece = piece.detach()
    if piece.shape[dim] == length:
        return piece.contiguous()
    shape = list(piece.shape)
    shape[dim] = length
    padded = piece.new_zeros(shape)
    padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return padded
