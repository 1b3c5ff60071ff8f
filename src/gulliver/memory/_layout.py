"""Layouts of chunks: which tensor lies where in which chunk, as plain numbers.

A chunk is a contiguous buffer that tensors share. It is cut into as many equal parts as there are
ranks, so a tensor may lie on two parts and more. Tensors and parts begin on multiples of an
alignment; the gaps, and what the tensors do not fill of the last part, are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Slot:
    """The run of a chunk that a tensor has, in elements."""

    name: str
    start: int
    numel: int

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.start + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one rank owns: `numel` elements from `start` of the rank's shard.

    `offset` is where the piece begins in the flattened tensor.
    """

    name: str
    start: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """The shard's element after the last."""
        return self.start + self.numel


@dataclass(frozen=True)
class ChunkLayout:
    """The tensors of a chunk in their order, and the chunk's size with padding, in elements."""

    slots: tuple[Slot, ...]
    size: int
    parts: int

    @property
    def part_size(self) -> int:
        """Elements of one rank's shard."""
        return self.size // self.parts

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.size - sum(slot.numel for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """Beginnings and ends of what belongs to no tensor."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.end)), self.size]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pairs if start < end]

    def cuts(self) -> list[int]:
        """Sizes that cut the chunk into runs: a gap before each tensor, then one at the end."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.end)), self.size]
        return [end - start for start, end in pairwise(edges)]

    def pieces(self, part: int) -> list[Piece]:
        """Pieces of tensors that lie on part number `part`, in order."""
        low, high = part * self.part_size, (part + 1) * self.part_size
        found = []
        for slot in self.slots:
            start, end = max(slot.start, low), min(slot.end, high)
            if start < end:
                found.append(Piece(slot.name, start - low, start - slot.start, end - start))
        return found


def plan_chunks(
    tensors: Sequence[tuple[str, int]], capacity: int, parts: int, align: int = 16
) -> list[ChunkLayout]:
    """Packs tensors in their order into chunks.

    Args:
        tensors: name and elements of each, in the order of use.
        capacity: elements of a chunk; a larger tensor gets a chunk of its own.
        parts: shards that each chunk is cut into.
        align: tensors and shards begin on multiples of so many elements, so that kernels may load
            them in whole vectors.

    Returns:
        The chunks, in the order of their tensors; no chunk is empty.

    Raises:
        GulliverError: capacity, parts or align is not positive.
    """
    if min(capacity, parts, align) < 1:
        raise GulliverError(
            f"chunks need positive sizes, not capacity {capacity}, parts {parts}, align {align}"
        )
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
    # A chunk of empty tensors still has a part for every rank: collectives need something to move.
    size = _rounded(max(slots[-1].end, 1), parts * align)
    return ChunkLayout(tuple(slots), size, parts)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
