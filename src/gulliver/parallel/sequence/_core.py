"""Attention of a place's queries to the keys of all places, forward and backward.

`RingAttention` is the autograd function. Of (keys, values) and queries the one that costs less on
the wire goes round:

| | goes round | comes home with it |
|---|---|---|
| forward | K, V | |
| backward | K, V | dK, dV |
| forward, few queries | Q | output, log-sum-exp |
| backward, few queries | Q, dO, O, log-sum-exp | dQ |

What comes home is float32, or float64 for float64. Saved for backward are this rank's own q, k, v,
output and log-sum-exp, and nothing that came over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gulliver.parallel.sequence._kernels import precise
from gulliver.parallel.sequence._layout import Interval, Layout
from gulliver.parallel.sequence._partial import (
    Gradients,
    How,
    Partial,
    Rows,
    attend,
    attend_backward,
)
from gulliver.parallel.sequence._plan import SequenceGroups
from gulliver.parallel.sequence._ring import round_trip, turn
from gulliver.parallel.sequence._tiles import Tile, tiles

Circulate = Literal["kv", "q"]


@dataclass(frozen=True)
class Call:
    """One call of the ring.

    Attributes:
        groups: of the ranks.
        queries: how the queries lie.
        keys: how the keys and values lie.
        how: blocks are computed.
        circulate: what goes round.
    """

    groups: SequenceGroups
    queries: Layout
    keys: Layout
    how: How
    circulate: Circulate = "kv"

    def tiles(self, q_place: int, k_place: int, rows: Interval | None = None) -> tuple[Tile, ...]:
        """What is to be computed between two places."""
        held = self.queries.of_place(q_place), self.keys.of_place(k_place)
        return tiles(*held, self.how.rules, rows)


class RingAttention(torch.autograd.Function):
    """Attention with a gradient, see the top of the file."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The output, ``[batch, heads, own queries, value dim]`` of q's dtype."""
        forward = forward_kv if call.circulate == "kv" else forward_q
        partial = forward(q, k, v, call)
        out = partial.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        """The gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        # A gradient may be any view, even one number seen many times.
        rows = Rows(q, grad.contiguous(), out, lse.masked_fill(lse == -torch.inf, 0.0))
        backward = backward_kv if ctx.call.circulate == "kv" else backward_q
        grads = backward(rows, k, v, ctx.call)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.v.to(v.dtype), None


def forward_kv(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
    """Keys and values go round."""
    groups, pack = call.groups, _KeysAndValues(k, v, call.keys)
    partial = Partial.empty(q, v.shape[3])
    for place, block in turn(pack.own, pack.bytes, groups):
        attend(partial, q, *pack.open(block, place), call.tiles(groups.place, place), call.how)
    return partial


def backward_kv(rows: Rows, k: Tensor, v: Tensor, call: Call) -> Gradients:
    """Keys and values go round, and their gradients come home with them."""
    groups, pack = call.groups, _KeysAndValues(k, v, call.keys)
    dtype = precise(k.dtype)
    dq = torch.zeros_like(rows.q, dtype=dtype, memory_format=torch.contiguous_format)

    def compute(place: int, block: Tensor, half: int | None) -> Tensor:
        gathered = block.new_zeros(pack.numel(place), dtype=dtype)
        into = Gradients(dq, *pack.split(gathered, place))
        found = call.tiles(groups.place, place, _half(rows.q.shape[2], half))
        attend_backward(into, rows, *pack.open(block, place), found, call.how)
        return gathered

    total = round_trip(pack.own, pack.bytes, pack.numel, groups, compute, Tensor.add_)
    return Gradients(dq, *pack.split(total, groups.place))


def forward_q(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
    """Queries go round, and their output and log-sum-exp come home with them."""
    groups, pack = call.groups, _Queries([q], call.queries, v.shape[3])

    def compute(place: int, block: Tensor, half: int | None) -> Tensor:
        (q_block,) = pack.open(block, place)
        gathered = block.new_empty(pack.partial_numel(place), dtype=precise(q.dtype))
        partial = pack.partial(gathered, place)
        partial.out.zero_()
        partial.lse.fill_(-torch.inf)
        found = call.tiles(place, groups.place, _half(q_block.shape[2], half))
        attend(partial, q_block, k, v, found, call.how)
        return gathered

    def add(into: Tensor, arrived: Tensor) -> Tensor:
        # Both are of one place; which one, their length may not tell, and need not.
        place = next(p for p in sizes if pack.partial_numel(p) == len(into))
        other = pack.partial(arrived, place)
        whole = pack.partial(into, place)
        whole.merge(other.out, other.lse, slice(None), (0, other.out.shape[2]))
        return into

    sizes = range(groups.plan.ring)
    total = round_trip(pack.own, pack.bytes, pack.partial_numel, groups, compute, add)
    return pack.partial(total, groups.place)


def backward_q(rows: Rows, k: Tensor, v: Tensor, call: Call) -> Gradients:
    """Queries and their rows' output go round, and their gradients come home with them."""
    groups = call.groups
    pack = _Queries([rows.lse, rows.q, rows.grad, rows.out], call.queries, v.shape[3])
    dtype = precise(k.dtype)
    dk, dv = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (k, v))

    def compute(place: int, block: Tensor, half: int | None) -> Tensor:
        lse, q, grad, out = pack.open(block, place)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        found = call.tiles(place, groups.place, _half(q.shape[2], half))
        attend_backward(Gradients(dq, dk, dv), Rows(q, grad, out, lse), k, v, found, call.how)
        return dq.view(-1)

    def numel(place: int) -> int:
        batch, heads, _, dim = rows.q.shape
        return batch * heads * pack.lengths[place] * dim

    total = round_trip(pack.own, pack.bytes, numel, groups, compute, Tensor.add_)
    return Gradients(total.view(rows.q.shape), dk, dv)


class _KeysAndValues:
    """Keys and values as one message."""

    def __init__(self, k: Tensor, v: Tensor, layout: Layout) -> None:
        self._k, self._v, self._lengths = k, v, layout.place_sizes()
        self.own = _bytes_of([k, v]) if layout.ring > 1 else k.new_empty(0)

    def bytes(self, place: int) -> int:
        """Of a place's message."""
        return self.numel(place) * self._k.element_size()

    def numel(self, place: int) -> int:
        """Elements of a place's keys and values."""
        return sum(self._counts(place))

    def open(self, block: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a message; in a ring of one they did not become one."""
        if not len(block):
            return self._k[:, :, : self._lengths[place]], self._v[:, :, : self._lengths[place]]
        return self.split(block.view(self._k.dtype), place)

    def split(self, flat: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """A place's flat keys and values, or their gradients, by shape."""
        k, v = flat.split(self._counts(place))
        length = self._lengths[place]
        shape = *self._k.shape[:2], length
        return k.view(*shape, self._k.shape[3]), v.view(*shape, self._v.shape[3])

    def _counts(self, place: int) -> list[int]:
        rows = self._k.shape[0] * self._k.shape[1] * self._lengths[place]
        return [rows * self._k.shape[3], rows * self._v.shape[3]]


class _Queries:
    """Tensors ``[batch, heads, queries, ...]`` as one message, those of wide dtypes first."""

    def __init__(self, tensors: Sequence[Tensor], layout: Layout, value_dim: int) -> None:
        self._tensors, self._value_dim = tensors, value_dim
        self.lengths = layout.place_sizes()
        self.own = _bytes_of(tensors)

    def bytes(self, place: int) -> int:
        """Of a place's message."""
        return sum(self._sizes(place))

    def open(self, block: Tensor, place: int) -> list[Tensor]:
        """The tensors of a message."""
        parts = zip(block.split(self._sizes(place)), self._tensors, strict=True)
        return [part.view(t.dtype).view(self._shape(t, place)) for part, t in parts]

    def partial_numel(self, place: int) -> int:
        """Elements of a place's output and log-sum-exp."""
        return self._rows(place) * (self._value_dim + 1)

    def partial(self, flat: Tensor, place: int) -> Partial:
        """They by shape."""
        shape = self._shape(self._tensors[0], place)[:3]
        out, lse = flat.split([self._rows(place) * self._value_dim, self._rows(place)])
        return Partial(out.view(*shape, self._value_dim), lse.view(shape))

    def _rows(self, place: int) -> int:
        return self._tensors[0].shape[0] * self._tensors[0].shape[1] * self.lengths[place]

    def _shape(self, tensor: Tensor, place: int) -> tuple[int, ...]:
        return (*tensor.shape[:2], self.lengths[place], *tensor.shape[3:])

    def _sizes(self, place: int) -> list[int]:
        return [torch.Size(self._shape(t, place)).numel() * t.element_size() for t in self._tensors]


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors])


def _half(length: int, half: int | None) -> Interval | None:
    """Local rows of a half."""
    return None if half is None else [(0, length // 2), (length // 2, length)][half]
