"""Messages between neighbouring stages: tensors of any shape, dtype and number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import Messages as UnderWay
from gulliver.comm.messages import PackedTensors, operations, post
from gulliver.errors import GulliverError
from gulliver.precision.wire.formats import IDENTITY

HEADER = 64
DIMS = 12
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


# [Note: headers] A receiver must know what comes. What crosses a cut is the same from step to step
# for micro-batches of the same shapes in the same states, so it is announced once: before the first
# message of each kind goes a header on the CPU with the shapes, dtypes, and which of the tensors
# want gradients. Both ends then remember it; a message of known kind has no header, which would
# cost a latency each time, and a tensor that is not as the header said is refused, not sent.
# Gradients go back in the shapes of what came.
#
# On the CPU each message has a tag of its own, so the order in which the two ends ask does not
# matter; on GPUs the order is that of torch's schedules, which is the same at both ends.
@dataclass(frozen=True)
class Meta:
    """The shape and dtype of a tensor that is to come, and whether it wants a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        """Describes a tensor."""
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Allocates a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _encode(metas: Sequence[Meta]) -> Tensor:
    numbers = [len(metas)]
    for meta in metas:
        if len(meta.shape) > DIMS or meta.dtype not in _DTYPES:
            raise GulliverError(
                f"a tensor of {meta.dtype} and {len(meta.shape)} dims cannot cross stages: at most "
                f"{DIMS} dims, of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        numbers += [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape)]
        numbers += meta.shape
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)), dtype=torch.int64)


def _decode(header: Tensor) -> tuple[Meta, ...]:
    numbers = header.tolist()
    count, at, metas = numbers[0], 1, []
    for _ in range(count):
        dtype, wants, dims = numbers[at : at + 3]
        metas.append(Meta(tuple(numbers[at + 3 : at + 3 + dims]), _DTYPES[dtype], bool(wants)))
        at += 3 + dims
    return tuple(metas)


class Messages:
    """Both ends of one stage: the cuts before and behind it."""

    def __init__(
        self, rank_group: RankGroup, stage: int, places: Sequence[int], micro_batches: int
    ) -> None:
        self.rank_group, self.stage, self.places = rank_group, stage, places
        self.micro_batches = micro_batches
        self._known: dict[tuple[int, str], tuple[Meta, ...]] = {}
        self._headers: list[UnderWay] = []
        self._packed: dict[tuple[int, int], PackedTensors] = {}

    def metas(self, cut: int, kind: str) -> tuple[Meta, ...] | None:
        """Returns what crosses the cut before stage `cut` for a kind of micro-batches, if known."""
        return self._known.get((cut, kind))

    def know(self, kind: str, tensors: Sequence[Tensor], micro: int) -> tuple[Meta, ...]:
        """Makes sure that the next stage knows what it will be sent; returns it."""
        found = tuple(Meta.of(t) for t in tensors)
        known = self.metas(self.stage + 1, kind)
        if known is None:
            self._known[self.stage + 1, kind] = found
            if self._peer(self.stage + 1) is not None:
                self._announce(found, micro)
        elif known != found:
            raise GulliverError(
                f"stage {self.stage} returns {found} where an equal micro-batch returned {known}: "
                "shapes between stages may depend on the shapes of the batch, not on its values"
            )
        return found

    def expect(self, kind: str, micro: int) -> tuple[Meta, ...]:
        """Returns what the stage before will send; waits for its header if that is new."""
        known = self.metas(self.stage, kind)
        if known is None:
            peer = self._peer(self.stage - 1)
            assert peer is not None, "stages of one rank tell each other by `hand_over`"
            header = torch.empty(HEADER, dtype=torch.int64)
            post(
                [(peer, header)],
                [],
                self.rank_group.process_group,
                self._tag(self.stage, 2, micro, 0),
            ).wait()
            known = self._known[self.stage, kind] = _decode(header)
        return known

    def hand_over(self, kind: str, tensors: Sequence[Tensor]) -> None:
        """Records what the stage before, on this rank, hands over."""
        self._known[self.stage, kind] = tuple(Meta.of(t) for t in tensors)

    def _announce(self, metas: Sequence[Meta], micro: int) -> None:
        peer = self._peer(self.stage + 1)
        tag = self._tag(self.stage + 1, 2, micro, 0)
        assert peer is not None
        self._headers.append(post([], [(peer, _encode(metas))], self.rank_group.process_group, tag))

    def finish(self) -> None:
        """Waits for headers that are still in flight."""
        while self._headers:
            self._headers.pop().wait()

    def sends(self, cut: int, tensors: Sequence[Tensor | None], micro: int) -> list[dist.P2POp]:
        """Returns operations that send tensors over the cut before stage `cut`, either way."""
        return self._operations(True, cut, tensors, micro)

    def receives(self, cut: int, tensors: Sequence[Tensor | None], micro: int) -> list[dist.P2POp]:
        """Returns operations that receive what comes over the cut before stage `cut`."""
        return self._operations(False, cut, tensors, micro)

    def _operations(
        self, sends: bool, cut: int, tensors: Sequence[Tensor | None], micro: int
    ) -> list[dist.P2POp]:
        wire = self.rank_group.wire
        packed, identity = PackedTensors(wire), wire is IDENTITY
        forward = sends == (cut == self.stage + 1)
        peer = self._peer(cut if cut == self.stage + 1 else cut - 1)
        if peer is None:
            return []
        found = []
        for entry, tensor in enumerate(tensors):
            tag = self._tag(cut, int(not forward), micro, entry)
            if tensor is not None and not identity:
                tensor = packed.sending(tensor) if sends else packed.receiving(tensor)
                tag = packed.tag(tag)
            messages = [] if tensor is None else [(peer, tensor)]
            ways = ([], messages) if sends else (messages, [])
            found += operations(*ways, self.rank_group.process_group, tag)
        if not sends:
            self._packed[cut, micro] = packed
        return found

    def arrived(self, cut: int, micro: int) -> None:
        """Unpacks what came over the cut before stage `cut`, which was waited for."""
        packed = self._packed.pop((cut, micro), None)
        if packed is not None:
            packed.unpack()

    def _peer(self, stage: int) -> int | None:
        """Rank of a neighbouring stage; None where it is this rank's own."""
        place = self.places[stage]
        return None if place == self.rank_group.rank else self.rank_group.ranks[place]

    def _tag(self, cut: int, way: int, micro: int, entry: int) -> int:
        return 1 + ((cut * 3 + way) * self.micro_batches + micro) * 4 + entry
