"""Messages between ranks, with the wire formats that encode their elements.

`gulliver.precision.wire` defines the formats; `packed.py` has the collectives of packed elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.watchdog import ANY, TAGS, Purpose, count_sent, flight_recorder
from gulliver.errors import GulliverError
from gulliver.precision.wire.formats import IDENTITY, WireFormat, packed_bytes, wire_format
from gulliver.precision.wire.packing import pack, unpack


def check_wire(wire: WireFormat) -> None:
    if wire is not IDENTITY:
        wire_format(wire)


def with_wire(purpose: Purpose, wire: WireFormat) -> Purpose:
    """Adds the wire format to a purpose, so that messages of different formats never match."""
    if wire.name == "identity":
        return purpose
    text = f"{purpose.text or 'shares a tensor'}, packed as {wire.name} in {wire.block}s"
    return replace(purpose, text=text, wire=wire.code)


def as_bytes(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as bytes, as backends do not support all dtypes."""
    assert tensor.is_contiguous(), "gloo would read the storage from its start"
    return tensor.detach().view(-1).view(torch.uint8)


# Point-to-point messages: how they are posted and matched, and their receive buffers.


_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
_lock = threading.Lock()
_kept_bytes = 0
KEPT_BYTES = 128 << 20
"""Maximum bytes of receive buffers kept for reuse, as touching fresh memory is slow."""


class Messages:
    """Point-to-point messages in flight."""

    def __init__(
        self,
        works: list[Any],
        keep: Any = None,
        finish: Callable[[], None] | None = None,
        arriving: Any = None,
    ) -> None:
        self._works, self._keep, self._finish, self.arriving = works, keep, finish, arriving

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._works, self._keep = [], None
        return self.arriving


def receive(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    # Not `dist.irecv`, which makes a dozen calls to find the same two arguments.
    found = group or dist.group.WORLD
    assert found is not None, "the world is initialized"
    return found.recv([_content(tensor)], dist.get_group_rank(found, peer), tag)


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    count_sent(tensor.nbytes)
    found = group or dist.group.WORLD
    assert found is not None, "the world is initialized"
    return found.send([_content(tensor)], dist.get_group_rank(found, peer), tag)


def exchange_parts(
    incoming: Iterable[tuple[int, Tensor]],
    outgoing: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup | None,
    tag: int,
) -> Messages:
    incoming, outgoing = list(incoming), list(outgoing)
    # Receives first: a send without a posted receive fills buffers, and the pair takes turns.
    works = [receive(tensor, peer, group, tag) for peer, tensor in incoming]
    works += [send(tensor, peer, group, tag) for peer, tensor in outgoing]
    return Messages(works, (incoming, outgoing))


def others(rank: int, size: int) -> list[int]:
    return [(rank + step) % size for step in range(1, size)]


def acquire_buffer(numel: int, dtype: torch.dtype) -> Tensor:
    global _kept_bytes
    with _lock:
        free = _buffers.get((numel, dtype))
        if free:
            buffer = free.pop()
            _kept_bytes -= buffer.nbytes
            return buffer
    return torch.empty(numel, dtype=dtype)


def release_buffer(buffer: Tensor) -> None:
    """Returns a buffer to the pool, which frees the least recently used ones above a limit."""
    global _kept_bytes
    key = (buffer.numel(), buffer.dtype)
    with _lock:
        # The most recently used size is last.
        free = _buffers.pop(key, [])
        free.append(buffer)
        _buffers[key] = free
        _kept_bytes += buffer.nbytes
        while _kept_bytes > KEPT_BYTES:
            oldest = next(iter(_buffers))
            if not _buffers[oldest]:
                del _buffers[oldest]
                continue
            _kept_bytes -= _buffers[oldest].pop().nbytes


def _content(tensor: Tensor) -> Tensor:
    return as_bytes(tensor if tensor.numel() else tensor.new_zeros(1))


# Messages between ranks that know all sizes: to the next rank of a group, and to each.


EXCHANGE_TAG = 300
PACKED_CODE = 1900
"""First purpose code of messages in wire formats; collectives use lower codes."""
Addressed = Iterable[tuple[int, Tensor]]
"""World ranks, each with a contiguous tensor to send or receive."""


# [Note: gloo and NCCL] All messages use `torch.distributed.batch_isend_irecv`. With gloo, the
# messages of a batch are posted one at a time, so receives come first: a message whose receive is
# posted needs no further round trip. With NCCL, a batch is one grouped call, so that no rank's send
# waits for another's. All ranks post in the same order, by which NCCL matches; gloo also matches
# tags. Data is waited for before it is read or forwarded: NCCL would keep that order by itself,
# gloo does not.
#
# Tags below `TAGS` belong to the callers; collectives use higher ones.
def operations(
    incoming: Addressed,
    outgoing: Addressed,
    group: dist.ProcessGroup | None,
    tag: int,
    wire: WireFormat = IDENTITY,
) -> list[dist.P2POp]:
    """Returns torch's point-to-point operations, receives first, for schedules that post them."""
    check_wire(wire)
    if wire.name != "identity":
        raise GulliverError(
            f"point-to-point operations cannot be packed as {wire}: send the bytes of PackedTensors"
        )
    outgoing = list(outgoing)
    count_sent(sum(tensor.nbytes for _, tensor in outgoing))
    # Both sides know the sizes, so empty messages are not sent.
    return [
        dist.P2POp(call, as_bytes(tensor), peer, group, tag)
        for call, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
        for peer, tensor in messages
        if tensor.numel()
    ]


def post(
    incoming: Addressed,
    outgoing: Addressed,
    group: dist.ProcessGroup | None,
    tag: int,
    wire: WireFormat = IDENTITY,
) -> Messages:
    """Starts receives and sends; arguments as for `operations`."""
    check_wire(wire)
    kept = list(incoming), list(outgoing)
    if wire.name == "identity":
        calls = operations(*kept, group, tag)
        return Messages(dist.batch_isend_irecv(calls) if calls else [], kept)
    packed = PackedTensors(wire)
    coming = [(peer, packed.receiving(tensor)) for peer, tensor in kept[0]]
    going = [(peer, packed.sending(tensor)) for peer, tensor in kept[1]]
    calls = operations(coming, going, group, packed.tag(tag))
    works = dist.batch_isend_irecv(calls) if calls else []
    return Messages(works, (kept, going), packed.unpack)


class PackedTensors:
    """Packed buffers of tensors to send or receive in a wire format."""

    # Both ends know shape and dtype of every tensor, so they compute the same sizes; integers, and
    # tensors that would not shrink, are sent unpacked.

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire
        self._arriving: list[tuple[Tensor, Tensor, WireFormat]] = []

    def tag(self, tag: int) -> int:
        return (1 + PACKED_CODE + self.wire.code) * TAGS + tag

    def sending(self, tensor: Tensor) -> Tensor:
        wire = self.wire.of(tensor)
        return tensor if wire is IDENTITY else pack(tensor, wire)

    def receiving(self, tensor: Tensor) -> Tensor:
        wire = self.wire.of(tensor)
        if wire is IDENTITY:
            return tensor
        packed = tensor.new_empty(packed_bytes(tensor.numel(), wire), dtype=torch.uint8)
        self._arriving.append((packed, tensor.detach().view(-1), wire))
        return packed

    def unpack(self) -> None:
        arriving, self._arriving = self._arriving, []
        for packed, tensor, wire in arriving:
            unpack(packed, wire, tensor.numel(), out=tensor)


def shift(
    rank_group: RankGroup, outgoing: Tensor, incoming: Tensor, tag: int, wire: WireFormat = IDENTITY
) -> Messages:
    check_wire(wire)
    _note(rank_group, wire)
    before, after = (
        rank_group.ranks[(rank_group.rank + step) % rank_group.size] for step in (-1, 1)
    )
    group = rank_group.process_group
    messages = post([(before, incoming)], [(after, outgoing)], group, tag, wire)
    messages.arriving = incoming
    return messages


def exchange(
    rank_group: RankGroup,
    outgoing: Sequence[Tensor],
    counts: Sequence[int],
    wire: WireFormat = IDENTITY,
) -> list[Tensor]:
    """All-to-all of tensors of different sizes, which both ends must know."""
    check_wire(wire)
    own = outgoing[rank_group.rank]
    if rank_group.size == 1:
        return [own]
    _note(rank_group, wire)
    order = [(rank_group.rank + step) % rank_group.size for step in range(1, rank_group.size)]
    arriving = [own if p == rank_group.rank else own.new_empty(n) for p, n in enumerate(counts)]
    # Each rank begins with its neighbor, so that not all send to the same rank.
    incoming = [(rank_group.ranks[p], arriving[p]) for p in reversed(order)]
    sent = [(rank_group.ranks[p], outgoing[p]) for p in order]
    post(incoming, sent, rank_group.process_group, EXCHANGE_TAG, wire).wait()
    return arriving


def _note(rank_group: RankGroup, wire: WireFormat) -> None:
    # NCCL has no tags, and formats are agreed on when a model is boosted.
    flight_recorder.note_exchange(rank_group.process_group, with_wire(ANY, wire))


def gather_integers(
    rank_group: RankGroup, values: Sequence[int], device: torch.device
) -> list[list[int]]:
    own = torch.tensor(values, dtype=torch.int64, device=device)
    if rank_group.size == 1:
        return [list(values)]
    return [
        t.tolist()
        for t in exchange(rank_group, [own] * rank_group.size, [len(values)] * rank_group.size)
    ]
