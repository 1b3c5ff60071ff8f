"""Runs the steps of a layout conversion on this rank's part of a tensor.

In every layout a rank has one box (an interval in each dim), which follows from its mesh
coordinate, so no sizes are exchanged. Boxes may have unequal sizes or be empty; collectives that
need equal parts pad them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from gulliver.comm.collectives import all_gather, all_reduce, reduce_scatter
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange, post
from gulliver.solve.conversion import ConversionStep, Sharding, extent

Box = tuple[tuple[int, int], ...]
SWAP_TAG = 7103
OPS: dict[str, Literal["sum", "mean", "max"]] = {"sum": "sum", "avg": "mean", "max": "max"}


@dataclass(frozen=True)
class MeshTensor:
    """A tensor's shape and mesh, and this rank's coordinate."""

    mesh: DeviceMesh
    shape: tuple[int, ...]  # Size of each dim of the whole tensor
    op: str = "sum"  # Reduction of partial values: sum, avg or max

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @cached_property
    def here(self) -> tuple[int, ...]:
        found = self.mesh.get_coordinate()
        assert found is not None, "this rank is on the mesh"
        return tuple(found)

    def box(self, layout: Sharding, coordinate: Sequence[int]) -> Box:
        return tuple(
            extent(length, [self.sizes[a] for a in axes], [coordinate[a] for a in axes])
            for length, axes in zip(self.shape, layout.cuts, strict=True)
        )

    def neighbours(
        self, axes: Sequence[int], at: tuple[int, ...] | None = None
    ) -> list[tuple[int, ...]]:
        """Returns the coordinates that differ from `at` only on `axes`; the last varies fastest."""
        found = []
        for values in itertools.product(*(range(self.sizes[axis]) for axis in axes)):
            changed = dict(zip(axes, values, strict=True))
            found.append(tuple(changed.get(a, c) for a, c in enumerate(at or self.here)))
        return found

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        return int(self.mesh.mesh[coordinate])

    def line(self, axis: int) -> tuple[RankGroup, list[int]]:
        group = self.mesh.get_group(axis)
        ranks = dist.get_process_group_ranks(group)
        numbers = [ranks.index(self.rank_at(c)) for c in self.neighbours([axis])]
        return RankGroup(tuple(ranks), dist.get_rank(group), group), numbers


def run_move(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    return _RUN[move.kind](_own(local), move, place)


def _own(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _slice(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    outer = place.box(move.before, place.here)
    # A copy, because a view would keep the full tensor alive.
    return _view(local, outer, place.box(move.after, place.here)).clone()


def _split(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    before, after = (place.box(layout, place.here) for layout in (move.before, move.after))
    if before == after and place.op != "sum":
        return local
    if before == after:
        return local if place.here[move.axes[0]] == 0 else torch.zeros_like(local)
    whole = local.new_zeros(_shape(after))
    _view(whole, after, before).copy_(local)
    return whole


def _reduce(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    whole = local.clone()
    if len(move.axes) == 1:
        all_reduce(whole, _op(place), place.mesh.get_group(move.axes[0]))
        return whole
    # Reduce-scatters from the fastest axis outwards, an all-reduce on the slowest, and all-gathers
    # back.
    outer, *inner = move.axes
    parts, sizes = whole.view(-1), []
    for axis in reversed(inner):
        sizes.append(parts.numel())
        parts = _scattered(_padded(parts, place.sizes[axis]), axis, place)
    all_reduce(parts, _op(place), place.mesh.get_group(outer))
    for axis, count in zip(inner, reversed(sizes), strict=True):
        parts = _gathered(parts, axis, place).view(-1)[:count].clone()
    return parts.view(whole.shape)


def _gather(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    most, after = move.elements[0], place.box(move.after, place.here)
    blocks = _filled(local, most).view(1, most)
    for axis in move.axes:  # so the slowest links carry the least data
        rows = len(blocks) * place.sizes[axis]
        blocks = _gathered(blocks.reshape(-1), axis, place).view(rows, most)
    whole = local.new_empty(_shape(after))
    # The axis gathered last has become the outermost of the blocks.
    for block, coordinate in zip(blocks, place.neighbours(move.axes[::-1]), strict=True):
        box = place.box(move.before, coordinate)
        _view(whole, after, box).copy_(block[: _count(box)].view(_shape(box)))
    return whole


def _scatter(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    before, most = place.box(move.before, place.here), move.elements[1]
    inwards = move.axes[::-1]
    boxes = [place.box(move.after, c) for c in place.neighbours(inwards)]
    parts = torch.cat([_filled(_view(local, before, box), most) for box in boxes])
    for axis in inwards:  # so the fast links carry most of the data
        parts = _scattered(parts, axis, place)
    own = place.box(move.after, place.here)
    return parts[: _count(own)].view(_shape(own))


def _exchange(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    (axis,) = move.axes
    before, after = (place.box(layout, place.here) for layout in (move.before, move.after))
    group, numbers = place.line(axis)
    outgoing, counts, shared = [local] * group.size, [0] * group.size, [after] * group.size
    for number, other in zip(numbers, place.neighbours([axis]), strict=True):
        sent = _common(before, place.box(move.after, other))
        shared[number] = _common(place.box(move.before, other), after)
        outgoing[number] = _own(_view(local, before, sent)).view(-1)
        counts[number] = _count(shared[number])
    whole = local.new_empty(_shape(after))
    for box, part in zip(shared, exchange(group, outgoing, counts), strict=True):
        _view(whole, after, box).copy_(part.view(_shape(box)))
    return whole


def _swap(local: Tensor, move: ConversionStep, place: MeshTensor) -> Tensor:
    source = _source(move, place, place.here)
    if source == place.here:
        return local
    (target,) = (c for c in place.neighbours(move.axes) if _source(move, place, c) == place.here)
    arriving = local.new_empty(_shape(place.box(move.after, place.here)))
    incoming = [(place.rank_at(source), arriving)]
    post(incoming, [(place.rank_at(target), local)], None, SWAP_TAG).wait()
    return arriving


def _source(
    move: ConversionStep, place: MeshTensor, coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the coordinate that has, before a swap, the box that `coordinate` has after it."""
    low, high = move.axes
    if place.sizes[low] == place.sizes[high]:
        # Ranks with equal boxes each send to one of the receivers.
        swapped = list(coordinate)
        swapped[low], swapped[high] = swapped[high], swapped[low]
        return tuple(swapped)
    wanted, others = place.box(move.after, coordinate), place.neighbours(move.axes, coordinate)
    return next(other for other in others if place.box(move.before, other) == wanted)


def _gathered(flat: Tensor, axis: int, place: MeshTensor) -> Tensor:
    group, numbers = place.line(axis)
    whole = flat.new_empty(group.size * flat.numel())
    all_gather(whole, flat, group.process_group)
    rows = whole.view(group.size, -1)
    return rows if numbers == list(range(group.size)) else rows[numbers]


def _scattered(flat: Tensor, axis: int, place: MeshTensor) -> Tensor:
    group, numbers = place.line(axis)
    parts = flat.view(group.size, -1)
    if numbers != list(range(group.size)):
        parts = torch.empty_like(parts).index_copy_(0, torch.tensor(numbers), parts)
    own = flat.new_empty(parts.shape[1])
    reduce_scatter(own, parts.reshape(-1), _op(place), group.process_group)
    return own


def _op(place: MeshTensor) -> Literal["sum", "mean", "max"]:
    return OPS[place.op]


def _padded(flat: Tensor, parts: int) -> Tensor:
    return _filled(flat, -(-flat.numel() // parts) * parts)


def _filled(tensor: Tensor, count: int) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() == count:
        return flat
    return torch.cat([flat, flat.new_zeros(count - flat.numel())])


def _view(tensor: Tensor, outer: Box, inner: Box) -> Tensor:
    for dim, ((low, _), (first, last)) in enumerate(zip(outer, inner, strict=True)):
        # An empty box may be beyond the end.
        tensor = tensor.narrow(dim, first - low if last > first else 0, last - first)
    return tensor


def _common(one: Box, other: Box) -> Box:
    pairs = zip(one, other, strict=True)
    return tuple((low := max(a, c), max(low, min(b, d))) for (a, b), (c, d) in pairs)


def _shape(box: Box) -> list[int]:
    return [high - low for low, high in box]


def _count(box: Box) -> int:
    count = 1
    for low, high in box:
        count *= high - low
    return count


_RUN = {
    "slice": _slice,
    "gather": _gather,
    "exchange": _exchange,
    "reduce": _reduce,
    "scatter": _scatter,
    "swap": _swap,
    "split": _split,
}
