"""Collectives in a wire format: all-reduce, reduce-scatter and all-gather of packed elements.

Packed elements cannot be summed in transit. So every rank sends each part directly to its owner,
which unpacks the terms, adds them in float32 or wider to its own exact term, and packs the sum
again if other ranks need it. All ranks, including the owner, use the packed sum, so results are
bitwise equal.

| | packed | maximum error, in the format's error bounds |
|---|---|---|
| all-gather | once | one bound per part |
| reduce-scatter | once per axis | one bound per term |
| all-reduce | twice per axis | one bound per term, and one for the sum |

Each is a generator, as in `steps.py`. Exchanges are point-to-point messages over gloo, and an
all-to-all over other backends. Over a torus, collectives run axis by axis, and the sums along one
axis are packed again for the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import (
    Messages,
    acquire_buffer,
    exchange_parts,
    others,
    release_buffer,
    with_wire,
)
from gulliver.comm.steps import Steps, drive, start
from gulliver.comm.torus import run_chained
from gulliver.comm.watchdog import Purpose, count_sent, flight_recorder
from gulliver.errors import GulliverError
from gulliver.precision.wire.formats import WireFormat, packed_bytes
from gulliver.precision.wire.packing import pack, unpack

Lengths = Sequence[int]


# [Note: error feedback] With `error`, the loss of the previous packing is added to the tensor, and
# `error` is set to the loss of this one. So what small elements lose in one step is made up for in
# later steps (Seide et al., 1-bit SGD, 2014; Karimireddy et al., 2019, arXiv 1901.09847). This only
# covers the terms: the loss of packing an all-reduce's sums is not made up for.
class Packer:
    """Packs, exchanges and unpacks the elements of one collective."""

    def __init__(
        self, wire: WireFormat, rank_groups: Sequence[RankGroup], purpose: Purpose, gloo: bool
    ) -> None:
        self.wire, self.rank_groups, self.gloo = wire, rank_groups, gloo
        why = with_wire(purpose, wire)
        # Reserved when the collective is submitted, equal on all ranks.
        self._tags = {
            (depth, way): flight_recorder.next_tag(group.process_group, 1, why)
            for depth, group in enumerate(rank_groups)
            for way in ("out", "back")
        }

    def buffer(self, numel: int, like: Tensor) -> Tensor:
        count = packed_bytes(numel, self.wire)
        if like.device.type == "cpu":
            return acquire_buffer(count, torch.uint8)
        return like.new_empty(count, dtype=torch.uint8)

    def pack(self, tensor: Tensor) -> Tensor:
        return pack(tensor, self.wire, self.buffer(tensor.numel(), tensor))

    def exchange(
        self, depth: int, way: str, outgoing: Sequence[Tensor], counts: Lengths
    ) -> tuple[Any, list[Tensor]]:
        group = self.rank_groups[depth]
        if self.gloo:
            order = others(group.rank, group.size)
            found = [
                acquire_buffer(0 if p == group.rank else c, torch.uint8)
                for p, c in enumerate(counts)
            ]
            incoming = [(group.ranks[p], found[p]) for p in order if counts[p]]
            sent = [(group.ranks[p], outgoing[p]) for p in order if outgoing[p].numel()]
            tag = self._tags[depth, way]
            return exchange_parts(incoming, sent, group.process_group, tag), found
        return self._all_to_all(group, outgoing, counts)

    def _all_to_all(
        self, group: RankGroup, outgoing: Sequence[Tensor], counts: Lengths
    ) -> tuple[Any, list[Tensor]]:
        order = group.group_order()
        sizes = [0 if p == group.rank else outgoing[p].numel() for p in order]
        arriving = [0 if p == group.rank else counts[p] for p in order]
        sent = torch.cat([outgoing[p] for p in order if p != group.rank])
        arrived = sent.new_empty(sum(arriving))
        count_sent(sent.numel())
        work = dist.all_to_all_single(
            arrived, sent, arriving, sizes, group=group.process_group, async_op=True
        )
        parts = arrived.split(arriving)
        return Messages([work], sent), [parts[order.index(p)] for p in range(group.size)]

    def release_buffers(self, *lists: Sequence[Tensor]) -> None:
        for buffer in itertools.chain(*lists):
            if buffer.device.type == "cpu" and buffer.numel() and self.gloo:
                release_buffer(buffer)


def run_packed(
    steps: Steps,
    packer: Packer,
    tensors: Sequence[Tensor],
    finish: Callable[[], None] | None = None,
    limited: int = 0,
) -> list[Any]:
    def whole() -> Steps:
        yield from steps
        if finish is not None:
            finish()

    if packer.gloo:
        return [start(whole(), packer.rank_groups, limited)]
    return run_chained(tensors, lambda: drive(whole()))


def packed_all_gather(output: Tensor, input: Tensor, packer: Packer, add: bool = False) -> Steps:
    numel = input.numel()
    held, made = packer.pack(input), list[Tensor]()
    blocks = [held]
    block, shape = held.view(1, -1), list[int]()
    made.append(held)
    for depth, group in enumerate(packer.rank_groups):
        own = block.reshape(-1)
        messages, found = packer.exchange(
            depth, "out", [own] * group.size, [own.numel()] * group.size
        )
        yield messages
        made += found
        parts = [own if p == group.rank else found[p] for p in range(group.size)]
        if depth + 1 == len(packer.rank_groups) == 1:
            blocks = parts
        else:
            stacked = torch.stack(parts).view(group.size, *shape, held.numel())
            shape.append(group.size)
            block = stacked.movedim(0, depth).contiguous()
            blocks = list(block.view(-1, held.numel()))
    for part, into in zip(blocks, output.view(-1, numel), strict=True):
        unpack(part, packer.wire, numel, out=into, add=float(add))
    packer.release_buffers(made)


def packed_reduce_scatter(
    output: Tensor, input: Tensor, mean: bool, packer: Packer, error: Tensor | None
) -> Steps:
    groups, numel = packer.rank_groups, output.numel()
    parts = input.view(*(group.size for group in groups), numel)
    if error is not None:
        input.add_(error)
    for depth in reversed(range(len(groups))):
        rows = parts.movedim(depth, 0).reshape(groups[depth].size, -1)
        known = error if depth == len(groups) - 1 and error is not None else None
        lost = None if known is None else known.view(parts.shape).movedim(depth, 0)
        total = _wide(rows[groups[depth].rank])
        yield from _added_up(total, list(rows), depth, packer, lost)
        parts = total.view(parts.movedim(depth, 0).shape[1:])
    if mean:
        parts.div_(math.prod(group.size for group in groups))
    output.view(-1).copy_(parts.view(-1))


def packed_all_reduce(tensor: Tensor, mean: bool, packer: Packer, error: Tensor | None) -> Steps:
    flat = tensor.view(-1)
    if error is not None:
        flat.add_(error)
    yield from _all_reduced(flat, mean, packer, len(packer.rank_groups) - 1, error)


def _all_reduced(
    flat: Tensor, mean: bool, packer: Packer, depth: int, error: Tensor | None
) -> Steps:
    """Reduce-scatters along one axis, all-reduces along the outer axes, then all-gathers."""
    group = packer.rank_groups[depth]
    lengths = _cut(flat.numel(), group.size, packer.wire.block)
    parts = flat.split(lengths)
    total = _wide(parts[group.rank])
    lost = None if error is None else error.view(-1).split(lengths)
    yield from _added_up(total, list(parts), depth, packer, lost)
    if depth:
        yield from _all_reduced(total, mean, packer, depth - 1, None)
    elif mean:
        total.div_(math.prod(one.size for one in packer.rank_groups))
    own = packer.pack(total)
    counts = [packed_bytes(n, packer.wire) for n in lengths]
    messages, found = packer.exchange(depth, "back", [own] * group.size, counts)
    yield messages
    for place, part in enumerate(parts):
        unpack(own if place == group.rank else found[place], packer.wire, len(part), out=part)
    packer.release_buffers([own], found)


def _added_up(
    total: Tensor,
    parts: Sequence[Tensor],
    depth: int,
    packer: Packer,
    lost: Sequence[Tensor] | Tensor | None,
) -> Steps:
    """Adds the other ranks' terms to this rank's, in rank order."""
    group = packer.rank_groups[depth]
    empty = total.new_empty(0, dtype=torch.uint8)
    packed = [
        empty if place == group.rank else packer.pack(part) for place, part in enumerate(parts)
    ]
    for place, part in enumerate(parts) if lost is not None else ():
        gone = lost[place]  # pyright: ignore[reportOptionalSubscript]
        if place == group.rank:
            gone.zero_()
            continue
        flat = part.to(gone.dtype, copy=True)
        unpack(packed[place], packer.wire, len(part), out=flat, add=-1.0)
        # An overflow must not be added to all later steps.
        gone.copy_(flat.nan_to_num_(0.0, 0.0, 0.0).view(gone.shape))
    counts = [packed_bytes(total.numel(), packer.wire)] * group.size
    messages, found = packer.exchange(depth, "out", packed, counts)
    yield messages
    for place in range(group.size):
        if place != group.rank:
            unpack(found[place], packer.wire, total.numel(), out=total, add=1.0)
    packer.release_buffers(packed, found)


def check_packed(op: str, wire: WireFormat) -> None:
    if op not in ("sum", "mean"):
        raise GulliverError(
            f"a reduction by {op!r} cannot be packed as {wire}: use sum or mean, or do not pack"
        )


def _wide(term: Tensor) -> Tensor:
    wide = torch.float64 if term.dtype == torch.float64 else torch.float32
    return term.to(wide, copy=True).contiguous()


def _cut(numel: int, count: int, block: int) -> list[int]:
    """Returns the lengths of the ranks' parts, in full blocks; the last may be shorter or empty."""
    each = -(-numel // (count * block)) * block
    return [max(0, min(each, numel - number * each)) for number in range(count)]
