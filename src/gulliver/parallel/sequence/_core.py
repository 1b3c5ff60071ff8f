"""Ring attention, forward and backward: the queries of each ring rank attend to the keys of all.

`RingAttention` is the autograd function. Of (keys, values) and queries the one that costs less on
the wire goes round:

| | goes round | comes home with it |
|---|---|---|
| forward | K, V | |
| backward | K, V | dK, dV |
| forward, few queries | Q | output, log-sum-exp |
| backward, few queries | Q, dO, O, log-sum-exp | dQ |

What comes home is float32, or float64 for float64, as it is a sum over many ranks. Saved for
backward are this rank's own q, k, v, output and log-sum-exp, and nothing that came over the wire:
memory for activations stays at 1 / N of the sequence, and the blocks go round a second time.

Source: Liu et al., Ring Attention, 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gulliver.comm import IDENTITY, WireFormat
from gulliver.errors import once_differentiable
from gulliver.layout import Interval
from gulliver.parallel.sequence._kernels import precise
from gulliver.parallel.sequence._layout import Layout, part_of, size_of
from gulliver.parallel.sequence._partial import (
    Gradients,
    How,
    Partial,
    Rows,
    attend,
    attend_backward,
)
from gulliver.parallel.sequence._plan import SequenceGroups
from gulliver.parallel.sequence._ring import Visit, round_trip, turn
from gulliver.parallel.sequence._tiles import Tile, tiles
from gulliver.precision.wire import pack, packed_bytes, unpack

Circulate = Literal["kv", "q"]


LEAST_PIECE, MOST_PIECES = 1024, 4
"""Least tokens of a piece, below which kernels are slower; and most pieces of a block, beyond which
the last step, which nothing hides, is short enough."""


@dataclass(frozen=True)
class RingCall:
    """One call of the ring."""

    groups: SequenceGroups
    queries: Layout
    keys: Layout
    how: How
    circulate: Circulate = "kv"  # What goes round, "kv" or "q"

    def cuts(self) -> _Cuts:
        """Returns how the blocks that go round are cut into pieces."""
        return _Cuts(self.keys if self.circulate == "kv" else self.queries)

    def tiles(self, visit: Visit, cuts: _Cuts) -> tuple[Tile, ...]:
        """Returns the tiles to compute for a piece that has arrived."""
        place = self.groups.place
        if self.circulate == "kv":
            rows = _half(size_of(self.queries.of_place(place)), visit.half)
            held = self.queries.of_place(place), cuts.held(visit)
        else:
            rows = _half(cuts.size(visit.place, visit.piece), visit.half)
            held = cuts.held(visit), self.keys.of_place(place)
        return tiles(*held, self.how.rules, rows)


class _Cuts:
    """The pieces of a layout's blocks; every rank finds the same."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._sizes = layout, layout.place_sizes()
        most = MOST_PIECES if layout.ring > 1 else 1
        self.pieces = min(most, max(1, max(self._sizes) // LEAST_PIECE))

    def range(self, place: int, piece: int) -> Interval:
        """Returns first and one past the last local token of a piece."""
        edges = [self._sizes[place] * p // self.pieces for p in range(self.pieces + 1)]
        return edges[piece], edges[piece + 1]

    def size(self, place: int, piece: int) -> int:
        """Returns the number of tokens of a piece."""
        first, last = self.range(place, piece)
        return last - first

    def held(self, visit: Visit) -> tuple[Interval, ...]:
        """Returns the positions of a piece in the whole sequence."""
        return part_of(self._layout.of_place(visit.place), *self.range(visit.place, visit.piece))


class RingAttention(torch.autograd.Function):
    """Ring attention with its gradient; see the top of the file."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        """Returns the output, ``[batch, heads, own queries, value dim]`` of q's dtype."""
        forward = forward_kv if call.circulate == "kv" else forward_q
        # `attention` has cast q, k and v as autocast would. Inside, partial results are float32 on
        # purpose: under autocast their products would be cast down again, block by block.
        with torch.autocast(q.device.type, enabled=False):
            partial = forward(q, k, v, call)
        out = partial.out.to(q.dtype)
        # Of this rank alone, so that memory stays at 1 / N of the sequence. `lse` is kept because a
        # block's gradients need the log-sum-exp of whole rows, over the keys of all ranks.
        ctx.save_for_backward(q, k, v, out, partial.lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable("sequence_parallelism_mode='ring_attn'")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """Returns the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        # A gradient may be any view, even one number expanded; messages need plain memory.
        rows = Rows(q, grad.contiguous(), out, lse.masked_fill(lse == -torch.inf, 0.0))
        backward = backward_kv if ctx.call.circulate == "kv" else backward_q
        # Backward runs with the autocast state of whoever called it, perhaps on another thread.
        with torch.autocast(q.device.type, enabled=False):
            grads = backward(rows, k, v, ctx.call)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), None


def forward_kv(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Partial:
    """Computes the forward with keys and values going round."""
    pack = _Pack([k, v], call)
    partial = Partial.empty(q, v.shape[3])
    for visit in turn(pack.own(), pack.bytes, call.groups):
        k_block, v_block = pack.open(visit)
        attend(partial, q, k_block, v_block, call.tiles(visit, pack.cuts), call.how)
    return partial


def backward_kv(rows: Rows, k: Tensor, v: Tensor, call: RingCall) -> Gradients:
    """Computes the backward with keys and values going round, and their gradients behind them."""
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

    totals = round_trip(
        pack.own(), pack.bytes, pack.numel, call.groups, compute, _plus, call.groups.all.wire
    )
    dk, dv = pack.joined(totals)
    return Gradients(dq, dk, dv)


def forward_q(q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Partial:
    """Computes the forward with queries going round, and their partial outputs behind them."""
    pack = _Pack([q], call)
    whole = Partial.empty(q, v.shape[3])
    home = _Pack([whole.out, whole.lse], call)

    def partial(flat: Tensor, visit: Visit) -> Partial:
        return Partial(*home.split(flat, visit))

    def compute(visit: Visit) -> Tensor:
        (q_block,) = pack.open(visit)
        empty = Partial.empty(q_block, v.shape[3])
        gathered = torch.cat([empty.out.view(-1), empty.lse.view(-1)])
        found = call.tiles(visit, pack.cuts)
        attend(partial(gathered, visit), q_block, k, v, found, call.how)
        return gathered

    def add(into: Tensor, arrived: Tensor, visit: Visit) -> Tensor:
        other = partial(arrived, visit)
        rows = 0, other.out.shape[2]
        partial(into, visit).merge(other.out, other.lse, slice(None), rows)
        return into

    totals = round_trip(pack.own(), pack.bytes, home.numel, call.groups, compute, add)
    return Partial(*home.joined(totals))


def backward_q(rows: Rows, k: Tensor, v: Tensor, call: RingCall) -> Gradients:
    """Computes the backward with queries and their rows' outputs going round, gradients behind."""
    # The widest dtype first, so that each part begins at a multiple of its element.
    pack = _Pack([rows.lse, rows.q, rows.grad, rows.out], call, exact=1)
    dtype = precise(k.dtype)
    dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (k, v))
    home = _Pack([rows.q], call)

    def compute(visit: Visit) -> Tensor:
        lse, q, grad, out = pack.open(visit)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        found = call.tiles(visit, pack.cuts)
        attend_backward(Gradients(dq, dk, dv), Rows(q, grad, out, lse), k, v, found, call.how)
        return dq.view(-1)

    totals = round_trip(
        pack.own(), pack.bytes, home.numel, call.groups, compute, _plus, call.groups.all.wire
    )
    (dq,) = home.joined(totals)
    return Gradients(dq, dk, dv)


class _Pack:
    """Packs tensors ``[batch, heads, length, ...]`` of a ring rank as one message for each piece.

    One message instead of one for each tensor: each costs a latency. In a wire format the owner
    packs once, and every rank on the way unpacks what it passes on.

    Args:
        tensors: tensors of this rank.
        call: call of the ring.
        exact: number of the first tensors, which are not packed: sums of exponents are not.
    """

    def __init__(self, tensors: Sequence[Tensor], call: RingCall, exact: int = 0) -> None:
        self._tensors, self.cuts = tensors, call.cuts()
        wire = call.groups.all.wire
        self._wires = [IDENTITY if n < exact else wire for n in range(len(tensors))]
        self._place, self._alone = call.groups.place, call.groups.plan.ring == 1

    def own(self) -> list[Tensor]:
        """Returns this rank's messages, in bytes; in a ring of one they are empty."""
        if self._alone:
            return [self._tensors[0].new_empty(0)]
        return [
            torch.cat(
                [
                    pack(t, wire.of(t))
                    for t, wire in zip(self._held(piece), self._wires, strict=True)
                ]
            )
            for piece in range(self.cuts.pieces)
        ]

    def _held(self, piece: int) -> list[Tensor]:
        """Returns a piece of this rank's tensors, as views."""
        return [t[:, :, slice(*self.cuts.range(self._place, piece))] for t in self._tensors]

    def bytes(self, place: int, piece: int) -> int:
        """Returns the bytes of a message."""
        return sum(self._sizes(place, piece, each_byte=True))

    def numel(self, place: int, piece: int) -> int:
        """Returns the elements of a piece of all tensors."""
        return sum(self._sizes(place, piece))

    def open(self, visit: Visit) -> list[Tensor]:
        """Returns the tensors of a message, as views of it."""
        if visit.place == self._place:
            return self._held(visit.piece)
        parts = visit.block.split(self._sizes(visit.place, visit.piece, each_byte=True))
        shapes = self._shapes(visit.place, visit.piece)
        rows = zip(parts, self._tensors, shapes, self._wires, strict=True)
        return [_opened(part, t, shape, wire) for part, t, shape, wire in rows]

    def split(self, flat: Tensor, visit: Visit) -> list[Tensor]:
        """Splits flat elements into views of the tensors' shapes."""
        parts = flat.split(self._sizes(visit.place, visit.piece))
        shapes = self._shapes(visit.place, visit.piece)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def joined(self, totals: list[Tensor]) -> list[Tensor]:
        """Joins the results of all pieces into this rank's tensors."""
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
        rows = zip(counts, self._tensors, self._wires, strict=True)
        return [packed_bytes(n, wire.of(t, n), t.element_size()) for n, t, wire in rows]


def _opened(part: Tensor, like: Tensor, shape: torch.Size, wire: WireFormat) -> Tensor:
    """Unpacks one tensor of a message; a view where it is not packed."""
    wire = wire.of(like, shape.numel())
    if wire is IDENTITY:
        return part.view(like.dtype).view(shape)
    return unpack(part, wire, shape.numel(), like.dtype).view(shape)


def _plus(into: Tensor, arrived: Tensor, _: Visit) -> Tensor:
    return into.add_(arrived)


def _half(length: int, half: int | None) -> Interval | None:
    """Returns the local rows of a half of the work; None for all."""
    return None if half is None else [(0, length // 2), (length // 2, length)][half]
