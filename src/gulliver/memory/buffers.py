"""Flat buffers of chunks: allocation, layout, and byte counts by kind.

Predictions use the same classes without allocating.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gulliver._compat import storage_users
from gulliver.solve.partition import balanced_parts

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer_state")
PARAMETERS, GRADIENTS, OPTIMIZER_STATE = KINDS
ACTIVATIONS = "activations"
"""Kind of saved activations in a manager; not model state, so not in `KINDS`."""


class ByteCounter:
    """Counts current and peak bytes by kind."""

    def __init__(self) -> None:
        self.live = dict.fromkeys(KINDS, 0)
        self._total = 0
        self.restart()

    @property
    def total(self) -> int:
        return self._total

    def restart(self) -> None:
        self.peak, self.fullest, self._most = dict(self.live), dict(self.live), self._total

    def add(self, kind: str, nbytes: int) -> None:
        held = self.live[kind] = self.live.get(kind, 0) + nbytes
        self._total += nbytes
        if held > self.peak.get(kind, 0):
            self.peak[kind] = held
        if self._total > self._most:
            self._most, self.fullest = self._total, dict(self.live)


# Flat buffers with byte counts, which are reused where fresh memory is slow.
#
# On a CPU the first access to fresh memory costs several times a copy. Chunks use buffers of few
# sizes, so a small cache of them pays. Devices with a caching allocator need none.


FREE_BUFFERS = 4


class BufferPool:
    """Allocates flat buffers, and reuses buffers that no view refers to."""

    def __init__(self) -> None:
        self.counter = ByteCounter()
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
        self.counter.add(kind, size * dtype.itemsize)
        free = self._free.get((size, dtype, device), ())
        for number, buffer in enumerate(free):
            # A view may still exist: in a graph, or in code that read a gradient.
            if storage_users(buffer) == 1:
                assert isinstance(free, list)
                return free.pop(number)
        with torch.inference_mode(
            False
        ):  # allocated in an evaluation, it must also be usable in training
            return torch.empty(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor, kind: str) -> None:
        self.counter.add(kind, -buffer.nbytes)
        if buffer.device.type != "cpu":
            return
        free = self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), [])
        if len(free) < FREE_BUFFERS:
            free.append(buffer)

    def clear(self) -> None:
        self._free.clear()


# Buffers of optimizer state, one for each kind of state of a chunk's parameters.


ALIGN = 16
"""Alignment of tensors in a buffer, in elements."""


def moment_size(sizes: Iterable[int]) -> int:
    return sum(-(-numel // ALIGN) * ALIGN for numel in sizes)


def first_elements(sizes: Mapping[str, int]) -> dict[str, int]:
    starts, end = dict[str, int](), 0
    for name, numel in sizes.items():
        starts[name] = end
        end += moment_size([numel])
    return starts


@dataclass(eq=False)
class Moment:
    """A flat buffer of optimizer state, with each parameter's offset."""

    # Flat tensor; on meta while its bytes are elsewhere.
    buffer: Tensor
    starts: Mapping[str, int]

    def filled(self, name: str, value: Tensor) -> Tensor:
        """Copies a value to a parameter's part of the buffer; returns that part."""
        start = self.starts[name]
        run = self.buffer[start : start + value.numel()]
        if run.data_ptr() != value.data_ptr() and not value.is_meta:
            run.view(value.shape).copy_(value)
        return run


# Whether the buffer of a chunk is there, which a `gulliver.memory.prefetch.Prefetcher` changes.


class Presence(Enum):
    """State of a resident's data."""

    WHOLE = auto()
    ARRIVING = auto()
    ABSENT = auto()


LEGAL_PRESENCE = (
    (Presence.WHOLE, Presence.ARRIVING),  # this rank's shard was updated; the rest must be gathered
    (Presence.ABSENT, Presence.ARRIVING),  # a buffer was allocated for the load
    (Presence.ARRIVING, Presence.WHOLE),  # the load has completed
    (Presence.WHOLE, Presence.ABSENT),  # used and released
)


@dataclass(eq=False, kw_only=True)
class Resident:
    """An object that a prefetcher loads and releases."""

    presence: Presence = Presence.WHOLE
    # Whether it is used several times in a pass: it stays once it is loaded.
    kept: bool = False
    # Whether a graph may refer to it: it stays until `release_all`.
    held: bool = False
    # Whether it was used in the current pass.
    used: bool = False

    def enter(self, presence: Presence) -> None:
        assert (self.presence, presence) in LEGAL_PRESENCE, f"{self.presence} -> {presence}"
        self.presence = presence


# Layouts of chunks: the positions of tensors in chunks, as plain numbers.
#
# A chunk is a contiguous buffer that tensors share. It is split into one equal part per rank, so a
# tensor may be on several parts. Tensors and parts begin at multiples of an alignment; gaps, and
# the unused end of the last part, are padding.


UNEVEN = 4
"""Maximum padding in a chunk of unsplit tensors: 1 / `UNEVEN` of its size."""


# [Note: chunks of unsplit tensors] Some optimizers need full tensors. Then no tensor is split
# between parts: a chunk's tensors are assigned to parts by size, and every part is as large as the
# fullest, because collectives need equal parts. With chunks of the usual size, most would be padded
# to a multiple of their content: a single matrix over eight ranks to eight times its size. So a
# chunk is extended beyond its size until its tensors fill the parts evenly, and the last tensors
# join the previous chunk if they do not. A matrix that exceeds a rank's share of the model still
# causes padding, because no rank can hold less than one tensor.
@dataclass(frozen=True)
class Slot:
    """A tensor's range of elements in a chunk."""

    name: str
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class ShardPiece(Slot):
    """A rank's part of a tensor: elements ``start:start + numel`` of the rank's shard.

    `offset` is the position of its first element in the flattened tensor.
    """

    offset: int


@dataclass(frozen=True)
class ChunkLayout:
    """The tensors of a chunk in order, and the chunk's padded size in elements."""

    # Ranges of the tensors in order of use, which may differ from the order in the buffer.
    slots: tuple[Slot, ...]
    size: int
    parts: int
    # Whether no tensor is split between parts.
    whole: bool = False

    @property
    def part_size(self) -> int:
        return self.size // self.parts

    @property
    def padding(self) -> int:
        return self.size - sum(slot.numel for slot in self.slots)

    @cached_property
    def by_address(self) -> list[Slot]:
        return sorted(self.slots, key=lambda slot: (slot.start, slot.end))

    def _edges(self) -> list[int]:
        runs = (edge for slot in self.by_address for edge in (slot.start, slot.end))
        return [0, *runs, self.size]

    def gaps(self) -> list[tuple[int, int]]:
        edges = self._edges()
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    def cuts(self) -> list[int]:
        """Returns sizes that split the buffer into alternating padding and tensors."""
        return [end - start for start, end in pairwise(self._edges())]

    def pieces(self, part: int) -> list[ShardPiece]:
        low, high = part * self.part_size, (part + 1) * self.part_size
        found = []
        for slot in self.slots:
            start, end = max(slot.start, low), min(slot.end, high)
            if start < end:
                found.append(ShardPiece(slot.name, start - low, end - start, start - slot.start))
        return found


def plan_chunks(
    tensors: Sequence[tuple[str, int]],
    capacity: int,
    parts: int,
    align: int = 16,
    whole: bool = False,
) -> list[ChunkLayout]:
    """Packs tensors, in their order, into chunks."""
    if whole and parts > 1:
        return [_dealt(run, parts, align) for run in _even_runs(tensors, capacity, parts, align)]
    layouts: list[ChunkLayout] = []
    slots: list[Slot] = []
    for name, numel in tensors:
        start = _rounded(slots[-1].end, align) if slots else 0
        if slots and start + numel > capacity:
            layouts.append(_layout(slots, parts, align))
            slots, start = [], 0
        slots.append(Slot(name, start, numel))
    if slots:
        layouts.append(_layout(slots, parts, align))
    return layouts


def _layout(slots: Sequence[Slot], parts: int, align: int) -> ChunkLayout:
    # A chunk of empty tensors still has a part for every rank, because collectives need data.
    size = _rounded(max(slots[-1].end, 1), parts * align)
    return ChunkLayout(tuple(slots), size, parts)


def _even_runs(
    tensors: Sequence[tuple[str, int]], capacity: int, parts: int, align: int
) -> list[list[tuple[str, int]]]:
    """Splits tensors into chunks whose shards are filled evenly, if possible."""
    runs: list[list[tuple[str, int]]] = [[]]
    held = 0
    for name, numel in tensors:
        if runs[-1] and held + numel > capacity and _is_even(runs[-1], parts, align):
            runs.append([])
            held = 0
        runs[-1].append((name, numel))
        held += _rounded(numel, align)
    while len(runs) > 1 and not _is_even(runs[-1], parts, align):
        last = runs.pop()
        runs[-1] += last
    return runs if runs[0] else []


def _is_even(tensors: Sequence[tuple[str, int]], parts: int, align: int) -> bool:
    sizes = [_rounded(numel, align) for _, numel in tensors]
    held = sum(sizes)
    if UNEVEN * (parts * max(sizes, default=0) - held) > held:
        return False  # in any assignment, a part holds at least the largest
    return UNEVEN * (parts * max(_loads(sizes, parts)) - held) <= held


def _loads(sizes: Sequence[int], parts: int) -> list[int]:
    loads = [0] * parts
    for size, part in zip(sizes, balanced_parts(sizes, parts), strict=True):
        loads[part] += size
    return loads


def _dealt(tensors: Sequence[tuple[str, int]], parts: int, align: int) -> ChunkLayout:
    """Lays out a chunk in which no tensor is split between shards."""
    sizes = [_rounded(numel, align) for _, numel in tensors]
    part_size = max(align, *_loads(sizes, parts))
    ends = [part * part_size for part in range(parts)]
    slots = []
    for (name, numel), size, part in zip(tensors, sizes, balanced_parts(sizes, parts), strict=True):
        slots.append(Slot(name, ends[part], numel))
        ends[part] += size
    return ChunkLayout(tuple(slots), parts * part_size, parts, whole=True)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
