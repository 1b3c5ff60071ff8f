"""Ring exchange with one or two levels.

Rank (o, i) starts with its own block. In step (a, b) it has the block of rank (o - a, i - b): the
inner ring makes a full turn for each hop of the outer ring, while the block of the next hop is in
flight, so a block crosses the slow links only once per outer hop. This is the double ring of
LoongTrain (Gu et al., 2024, arXiv 2406.18485) for any two sizes.

`turn` circulates the blocks. `round_trip` also accumulates a sum for each block and returns it to
the block's owner (the gradients of keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import Messages, shift
from gulliver.errors import once_differentiable
from gulliver.layout.even import Interval
from gulliver.parallel.sequence.kernels import (
    BlockArguments,
    Gradients,
    Partial,
    Rows,
    attend,
    attend_backward,
    precise,
)
from gulliver.parallel.sequence.layout import Layout, SequenceGroups, part_of, size_of
from gulliver.parallel.sequence.mask import Tile, tiles
from gulliver.precision.wire.formats import IDENTITY, WireFormat, packed_bytes
from gulliver.precision.wire.packing import pack, unpack

BLOCK_TAG, GATHERED_TAG = 100, 200
"""Base message tags of rotating blocks and of their sums; the chunk number is added."""
Count = Callable[[int, int], int]


# [Note: gradients follow their blocks] Every rank has a share of the gradient of every block of
# keys and values. Collecting these at the end, in buffers of the full length, would cost the memory
# that sharding the sequence saves, and an exposed all-reduce. So a block's gradient follows the
# block: a rank computes its share for the current block, adds the sum received from the previous
# rank, and sends the result after the block. The share of the rank's own block stays local, so that
# sums make as many hops as blocks, N - 1. With two levels, the sum of an inner turn ends at the
# rank that brought the block into this inner ring, and continues along the outer ring from there.
# The order of additions is that of the ring, so results do not depend on timing.
#
# The share of the own block is computed in two halves, one while the first block is in flight and
# one while the last sum returns, so that both transfers overlap with compute.
#
# [Note: own block] Every rank has the tensors of its own block anyway, so the packed copy is freed
# once it is sent, and visits of the own block may be empty.
#
# [Note: chunks] A long block is sent in chunks, which take turns: each continues as soon as it is
# its turn again, so that the link is always busy and only the last step of one chunk is exposed.
# The number of bytes is the same.
@dataclass(frozen=True)
class Visit:
    """A chunk of a block that has arrived."""

    place: int  # Ring rank that the block belongs to
    piece: int
    block: Tensor  # Flat content; may be empty for the own block
    half: int | None = None  # Half of the rows to compute, 0 or 1; None for all


class _RingChannel:
    def __init__(self, rank_group: RankGroup, piece: int, largest: int) -> None:
        self._rank_group, self._piece, self._largest = rank_group, piece, largest
        self._buffers: list[Tensor | None] = [None, None]
        self._hops = 0

    def send_on(self, block: Tensor, count: int) -> Messages:
        # The buffer of two hops ago is free, because receiving and forwarding its block have
        # completed.
        which = self._hops % 2
        buffer = self._buffers[which]
        if buffer is None:
            # Two buffers serve all hops, because first access to fresh memory is slow.
            buffer = self._buffers[which] = block.new_empty(self._largest)
        self._hops += 1
        return shift(self._rank_group, block, buffer[:count], BLOCK_TAG + self._piece)


class _TwoLevelRing:
    def __init__(self, groups: SequenceGroups, piece: int, count: Count) -> None:
        self._groups, self._piece, self._count = groups, piece, count
        largest = max(count(place, piece) for place in range(groups.plan.ring))
        self._slow = _RingChannel(groups.outer, piece, largest)
        self._fast = _RingChannel(groups.inner, piece, largest)

    def origin(self, a: int, b: int) -> int:
        outer, inner = self._groups.outer, self._groups.inner
        return (outer.rank - a) % outer.size * inner.size + (inner.rank - b) % inner.size

    def visit(self, a: int, b: int, block: Tensor, half: int | None = None) -> Visit:
        return Visit(self.origin(a, b), self._piece, block, half)

    def outwards(self, a: int, held: Tensor) -> Messages | None:
        """Sends a block along the outer ring in step (a, 0), except in the last round."""
        if a + 1 == self._groups.outer.size:
            return None
        return self._slow.send_on(held, self._count(self.origin(a + 1, 0), self._piece))

    def inwards(self, a: int, b: int, block: Tensor) -> Messages | None:
        """Sends a block along the inner ring in step (a, b), except in the last round."""
        if b + 1 == self._groups.inner.size:
            return None
        return self._fast.send_on(block, self._count(self.origin(a, b + 1), self._piece))


def turn(own: Sequence[Tensor], count: Count, groups: SequenceGroups) -> Iterator[Visit]:
    """Yields the blocks of all ring ranks chunk by chunk, starting with the local block."""
    pieces = [_turn(_TwoLevelRing(groups, p, count), block, groups) for p, block in enumerate(own)]
    # So that only the generator holds its block, and frees it once it is sent.
    del own
    for _ in range(groups.plan.ring):
        for piece in pieces:
            yield next(piece)


def _turn(ring: _TwoLevelRing, own: Tensor, groups: SequenceGroups) -> Iterator[Visit]:
    # So the other chunks are computed between posting a hop and waiting for it.
    ahead: Messages | None = Messages([], arriving=own)
    del own
    for a in range(groups.outer.size):
        assert ahead is not None
        block = ahead.wait()
        ahead = ring.outwards(a, block)
        for b in range(groups.inner.size):
            following = ring.inwards(a, b, block)
            yield ring.visit(a, b, block)
            if following is not None:
                block = following.wait()


def round_trip(
    own: Sequence[Tensor],
    count: Count,
    gathered_count: Count,
    groups: SequenceGroups,
    compute: Callable[[Visit], Tensor],
) -> list[Tensor]:
    """Sends every block around the ring; returns the sums over ranks for the local block."""
    trips = [
        _Trip(_TwoLevelRing(groups, p, count), p, gathered_count, groups).steps(block)
        for p, block in enumerate(own)
    ]
    del own
    totals: dict[int, Tensor] = {}
    while len(totals) < len(trips):
        for number, trip in enumerate(trips):
            visit = next(trip)
            assert visit is not None
            try:
                # It forwards the chunk, and waits for its next block when it is its turn again.
                trip.send(compute(visit))
            except StopIteration as end:
                totals[number] = end.value
    return [totals[number] for number in range(len(trips))]


_Steps = Generator[Visit | None, Tensor, Tensor]
"""Yields a visit and receives its result, then yields None to let other chunks run."""


@dataclass
class _Trip:
    # A generator, so that chunks take turns in one thread without an explicit state machine.

    ring: _TwoLevelRing
    piece: int
    gathered_count: Count
    groups: SequenceGroups

    def steps(self, own: Tensor) -> _Steps:
        if self.groups.plan.ring == 1:
            return (yield self.ring.visit(0, 0, own))
        ring, outer = self.ring, self.groups.outer
        nothing = own.new_empty(0)
        held, home, home_flight, flight = own, None, None, None
        del own
        for a in range(outer.size):
            ahead = ring.outwards(a, held)
            steps = self._inner_turn(a, held)
            if a == 0:
                held = nothing
            first, arriving = yield from steps
            if a == 0:
                home, home_flight = first, arriving
            else:
                total = yield from self._rest(ring.visit(a, 0, held, 1), first, arriving)
                if flight is not None:
                    total.add_(flight.wait())
                flight = self._send_sum(outer, total, ring.origin(a + 1, 0))
                yield None
            if ahead is not None:
                held = ahead.wait()
        assert home is not None
        visit = ring.visit(0, 0, nothing, 1)
        total = yield from self._rest(visit, home, home_flight)
        return total if flight is None else total.add_(flight.wait())

    def _inner_turn(
        self, a: int, held: Tensor
    ) -> Generator[Visit | None, Tensor, tuple[Tensor, Messages | None]]:
        """Returns the result of half the held block, and the other ranks' sum, still in flight."""
        ring, inner, block = self.ring, self.groups.inner, held
        del held
        following = ring.inwards(a, 0, block)
        first = yield ring.visit(a, 0, block, 0)
        arriving = None
        for b in range(1, inner.size):
            yield None
            assert following is not None
            block = following.wait()
            following = ring.inwards(a, b, block)
            part = yield ring.visit(a, b, block)
            if arriving is not None:
                part.add_(arriving.wait())
            arriving = self._send_sum(inner, part, ring.origin(a, b + 1))
        yield None
        return first, arriving

    def _rest(
        self, visit: Visit, first: Tensor, arriving: Messages | None
    ) -> Generator[Visit | None, Tensor, Tensor]:
        total = first.add_((yield visit))
        return total if arriving is None else total.add_(arriving.wait())

    def _send_sum(self, rank_group: RankGroup, gathered: Tensor, origin: int) -> Messages:
        """Sends a block's sum on to the next rank, and receives the next block's sum."""
        incoming = gathered.new_empty(self.gathered_count(origin, self.piece))
        return shift(
            rank_group, gathered, incoming, GATHERED_TAG + self.piece, self.groups.all.wire
        )


# Ring attention with backward: the queries of each ring rank attend to the keys of all ranks.
#
# Keys and values circulate in forward and again in backward, where their gradients follow them to
# the owner.
#
# These gradients are float32, or float64 for float64, because they are sums over many ranks. Only
# this rank's own q, k, v, output and log-sum-exp are saved for backward, and no received blocks, so
# activations take 1 / N of the sequence's memory, and the blocks circulate a second time.
#
# Source: Liu et al., Ring Attention, 2023 (arXiv 2310.01889).


LEAST_PIECE, MOST_PIECES = 1024, 4
"""Minimum tokens of a chunk (kernels slow down below it), and maximum chunks of a block."""


@dataclass(frozen=True)
class RingCall:
    """Arguments of one ring attention call."""

    groups: SequenceGroups
    queries: Layout
    keys: Layout
    how: BlockArguments

    def tiles(self, visit: Visit, cuts: _Cuts) -> tuple[Tile, ...]:
        own = self.queries.of_place(self.groups.place)
        return tiles(own, cuts.held(visit), self.how.rules, _half(size_of(own), visit.half))


class _Cuts:
    def __init__(self, layout: Layout) -> None:
        self._layout, self._sizes = layout, layout.place_sizes()
        most = MOST_PIECES if layout.ring > 1 else 1
        self.pieces = min(most, max(1, max(self._sizes) // LEAST_PIECE))

    def range(self, place: int, piece: int) -> Interval:
        edges = [self._sizes[place] * p // self.pieces for p in range(self.pieces + 1)]
        return edges[piece], edges[piece + 1]

    def size(self, place: int, piece: int) -> int:
        first, last = self.range(place, piece)
        return last - first

    def held(self, visit: Visit) -> tuple[Interval, ...]:
        return part_of(self._layout.of_place(visit.place), *self.range(visit.place, visit.piece))


class RingAttention(torch.autograd.Function):
    """Ring attention as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        # `attention` has cast q, k and v as autocast would. Partial results are float32 on purpose;
        # under autocast their products would be cast down in each block.
        with torch.autocast(q.device.type, enabled=False):
            partial = _forward(q, k, v, call)
        out = partial.out.to(q.dtype)
        # Of this rank alone, so that memory stays at 1 / N of the sequence. `lse` is kept because a
        # block's gradients need the log-sum-exp of whole rows, over the keys of all ranks.
        ctx.save_for_backward(q, k, v, out, partial.lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='ring_attn'")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        q, k, v, out, lse = ctx.saved_tensors
        # A gradient may be any view, even an expanded scalar; messages need contiguous memory.
        rows = Rows(q, grad.contiguous(), out, lse.masked_fill(lse == -torch.inf, 0.0))
        # Backward runs with the autocast state of its caller, perhaps on another thread.
        with torch.autocast(q.device.type, enabled=False):
            grads = _backward(rows, k, v, ctx.call)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), None


def _forward(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Partial:
    pack = _Pack([k, v], call)
    partial = Partial.empty(q, v.shape[3])
    for visit in turn(pack.own(), pack.bytes, call.groups):
        k_block, v_block = pack.open(visit)
        attend(partial, q, k_block, v_block, call.tiles(visit, pack.cuts), call.how)
    return partial


def _backward(rows: Rows, k: Tensor, v: Tensor, call: RingCall) -> Gradients:
    """Circulates keys and values again; their gradients follow them and return to the owner."""
    pack = _Pack([k, v], call)
    dtype = precise(k.dtype)
    dq = torch.zeros(rows.q.shape, dtype=dtype, device=k.device)

    def compute(visit: Visit) -> Tensor:
        gathered = k.new_zeros(pack.numel(visit.place, visit.piece), dtype=dtype)
        into = Gradients(dq, *pack.split(gathered, visit))
        found = call.tiles(visit, pack.cuts)
        k_block, v_block = pack.open(visit)
        attend_backward(into, rows, k_block, v_block, found, call.how)
        return gathered

    totals = round_trip(pack.own(), pack.bytes, pack.numel, call.groups, compute)
    dk, dv = pack.joined(totals)
    return Gradients(dq, dk, dv)


class _Pack:
    """Packs a ring rank's tensors ``[batch, heads, length, ...]`` into one message per chunk.

    One message instead of several saves latency. With a wire format, the owner compresses once;
    other ranks forward the compressed message and decompress a copy.
    """

    def __init__(self, tensors: Sequence[Tensor], call: RingCall) -> None:
        self._tensors, self.cuts = tensors, _Cuts(call.keys)
        self._wire = call.groups.all.wire
        self._place, self._alone = call.groups.place, call.groups.plan.ring == 1

    def own(self) -> list[Tensor]:
        if self._alone:
            return [self._tensors[0].new_empty(0)]
        return [
            torch.cat([pack(t, self._wire.of(t)) for t in self._held(piece)])
            for piece in range(self.cuts.pieces)
        ]

    def _held(self, piece: int) -> list[Tensor]:
        return [t[:, :, slice(*self.cuts.range(self._place, piece))] for t in self._tensors]

    def bytes(self, place: int, piece: int) -> int:
        return sum(self._sizes(place, piece, each_byte=True))

    def numel(self, place: int, piece: int) -> int:
        return sum(self._sizes(place, piece))

    def open(self, visit: Visit) -> list[Tensor]:
        if visit.place == self._place:
            return self._held(visit.piece)
        parts = visit.block.split(self._sizes(visit.place, visit.piece, each_byte=True))
        shapes = self._shapes(visit.place, visit.piece)
        rows = zip(parts, self._tensors, shapes, strict=True)
        return [_opened(part, t, shape, self._wire) for part, t, shape in rows]

    def split(self, flat: Tensor, visit: Visit) -> list[Tensor]:
        parts = flat.split(self._sizes(visit.place, visit.piece))
        shapes = self._shapes(visit.place, visit.piece)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def joined(self, totals: list[Tensor]) -> list[Tensor]:
        pieces = [self.split(t, Visit(self._place, n, t)) for n, t in enumerate(totals)]
        return [torch.cat(parts, 2) for parts in zip(*pieces, strict=True)]

    def _shapes(self, place: int, piece: int) -> list[torch.Size]:
        length = self.cuts.size(place, piece)
        return [torch.Size([*t.shape[:2], length, *t.shape[3:]]) for t in self._tensors]

    def _sizes(self, place: int, piece: int, each_byte: bool = False) -> list[int]:
        shapes = self._shapes(place, piece)
        counts = [shape.numel() for shape in shapes]
        if not each_byte:
            return counts
        rows = zip(counts, self._tensors, strict=True)
        return [packed_bytes(n, self._wire.of(t, n), t.element_size()) for n, t in rows]


def _opened(part: Tensor, like: Tensor, shape: torch.Size, wire: WireFormat) -> Tensor:
    wire = wire.of(like, shape.numel())
    if wire is IDENTITY:
        return part.view(like.dtype).view(shape)
    return unpack(part, wire, shape.numel(), like.dtype).view(shape)


def _half(length: int, half: int | None) -> Interval | None:
    return None if half is None else [(0, length // 2), (length // 2, length)][half]
