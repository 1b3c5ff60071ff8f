"""Messages between ranks that know each other's sizes: to the next of a group, and to each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm._flight_recorder import ANY
from gulliver.comm._messages import TAGS, Messages, count_sent, note_exchange
from gulliver.comm._rank_group import RankGroup
from gulliver.comm._wire import as_bytes, check_wire, with_wire
from gulliver.errors import GulliverError
from gulliver.precision.wire import IDENTITY, WireFormat, pack, packed_bytes, unpack

EXCHANGE_TAG = 300
PACKED_CODE = 1900
"""Codes of messages in wire formats begin here; collectives have those below."""
Addressed = Iterable[tuple[int, Tensor]]
"""Ranks of the world, and the tensor that comes from or goes to each; contiguous, of any dtype."""


# [Note: gloo and NCCL] Everything goes through `torch.distributed.batch_isend_irecv`. Over gloo its
# messages are posted one after the other, so the receives stand first: a message that finds its
# receive posted needs no further round trip. Over NCCL a batch is one grouped call, so that no
# rank's send waits for another's. All ranks post in the same order, which is what NCCL goes by;
# gloo goes by the tags too. What arrives is waited for before it is read or sent on: NCCL would
# keep that order by itself, gloo does not.
#
# Tags below `_messages.TAGS` are the callers' own; collectives count theirs from there on.
class Flight:
    """A message in flight each way; `wait` returns what arrived once both are done."""

    def __init__(self, messages: Messages | None, arriving: Tensor) -> None:
        self._messages, self._arriving = messages, arriving

    def wait(self) -> Tensor:
        """Waits and returns what arrived; the sent tensor may be reused."""
        if self._messages is not None:
            self._messages.wait()
        self._messages = None
        return self._arriving


def operations(
    incoming: Addressed,
    outgoing: Addressed,
    group: dist.ProcessGroup | None,
    tag: int,
    wire: WireFormat = IDENTITY,
) -> list[dist.P2POp]:
    """Returns torch's operations, receives first, for schedules that post them themselves."""
    check_wire(wire)
    if wire.name != "identity":
        raise GulliverError(f"operations are not packed as {wire}: post the bytes of PackedTensors")
    outgoing = list(outgoing)
    count_sent(sum(tensor.nbytes for _, tensor in outgoing))
    # Both sides know the sizes, so a message without content is sent by neither.
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
    """Posts receives and sends; arguments as for `operations`."""
    check_wire(wire)
    kept = list(incoming), list(outgoing)
    if wire.name == "identity":
        calls = operations(*kept, group, tag)
        return Messages(dist.batch_isend_irecv(calls) if calls else [], kept)
    packed = PackedTensors(wire, tag)
    coming = [(peer, packed.receiving(tensor)) for peer, tensor in kept[0]]
    going = [(peer, packed.sending(tensor)) for peer, tensor in kept[1]]
    calls = operations(coming, going, group, packed.tag(tag))
    works = dist.batch_isend_irecv(calls) if calls else []
    return Messages(works, (kept, going), packed.unpack)


class PackedTensors:
    """Bytes of tensors that are sent or received in a wire format."""

    # Both ends know shape and dtype of every tensor, so both find the same bytes; whole numbers,
    # and what would not become smaller, travel as they are.

    def __init__(self, wire: WireFormat, number: int = 0) -> None:
        self.wire, self._number = wire, number
        self._arriving: list[tuple[Tensor, Tensor, WireFormat]] = []

    def tag(self, tag: int) -> int:
        """The tag of a message; those of other formats never match."""
        return (1 + PACKED_CODE + self.wire.code) * TAGS + tag

    def sending(self, tensor: Tensor) -> Tensor:
        """Packs a tensor to be sent."""
        wire = self.wire.of(tensor)
        if wire is IDENTITY:
            return tensor
        generator = None
        if wire.rounding == "stochastic":
            generator = torch.Generator(tensor.device).manual_seed(_next_seed(self._number))
        return pack(tensor, wire, generator=generator)

    def receiving(self, tensor: Tensor) -> Tensor:
        """Returns the buffer to receive a packed tensor into; `unpack` writes the tensor."""
        wire = self.wire.of(tensor)
        if wire is IDENTITY:
            return tensor
        packed = tensor.new_empty(packed_bytes(tensor.numel(), wire), dtype=torch.uint8)
        self._arriving.append((packed, tensor.detach().view(-1), wire))
        return packed

    def unpack(self) -> None:
        """Unpacks all received buffers into their tensors."""
        arriving, self._arriving = self._arriving, []
        for packed, tensor, wire in arriving:
            unpack(packed, wire, tensor.numel(), out=tensor)


_seeds = itertools.count(1)


def _next_seed(number: int) -> int:
    """Returns a new seed, different for each message and rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return (next(_seeds) * 4096 + number % 4096) * 1024 + rank % 1024


def shift(
    rank_group: RankGroup, outgoing: Tensor, incoming: Tensor, tag: int, wire: WireFormat = IDENTITY
) -> Flight:
    """Starts a send to the next rank of a group and a receive from the one before."""
    check_wire(wire)
    _note(rank_group, wire)
    before, after = (
        rank_group.ranks[(rank_group.rank + step) % rank_group.size] for step in (-1, 1)
    )
    return Flight(
        post([(before, incoming)], [(after, outgoing)], rank_group.process_group, tag, wire),
        incoming,
    )


def exchange(
    rank_group: RankGroup,
    outgoing: Sequence[Tensor],
    counts: Sequence[int],
    wire: WireFormat = IDENTITY,
) -> list[Tensor]:
    """All-to-all of parts of any sizes, which are known to both ends."""
    check_wire(wire)
    own = outgoing[rank_group.rank]
    if rank_group.size == 1:
        return [own]
    _note(rank_group, wire)
    order = [(rank_group.rank + step) % rank_group.size for step in range(1, rank_group.size)]
    arriving = [own if p == rank_group.rank else own.new_empty(n) for p, n in enumerate(counts)]
    # Each begins with its neighbour, so that not all send to one.
    incoming = [(rank_group.ranks[p], arriving[p]) for p in reversed(order)]
    sent = [(rank_group.ranks[p], outgoing[p]) for p in order]
    post(incoming, sent, rank_group.process_group, EXCHANGE_TAG, wire).wait()
    return arriving


def _note(rank_group: RankGroup, wire: WireFormat) -> None:
    """Records an exchange, so that ranks with another wire format are reported."""
    # Over NCCL nothing has tags, and formats are agreed upon when a model is boosted.
    note_exchange(rank_group.process_group, with_wire(ANY, wire))


def gather_integers(
    rank_group: RankGroup, values: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Gathers the integers of every rank, as many from each."""
    own = torch.tensor(values, dtype=torch.int64, device=device)
    if rank_group.size == 1:
        return [list(values)]
    return [
        t.tolist()
        for t in exchange(rank_group, [own] * rank_group.size, [len(values)] * rank_group.size)
    ]
