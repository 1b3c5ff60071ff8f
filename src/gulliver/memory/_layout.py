"""Which tensor lies where in which chunk: plain numbers, no tensors.

A chunk is a contiguous buffer that tensors share. It is cut into as many equal parts as there are
ranks, and ends with padding where its tensors do not fill the last part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Slot:
    """A tensor's place in its chunk, in elements."""

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


@dataclass(frozen=True)
class ChunkLayout:
    """The tensors of a chunk, one behind the other, and the chunk's size with padding."""

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

    def pieces(self, part: int) -> list[Piece]:
        """What part `part` holds of which tensor, in order."""
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
        align: a shard is a multiple of so many elements.

    Raises:
        GulliverError: capacity, parts or align is not positive.
    """
    if min(capacity, parts, align) < 1:
        raise GulliverError(
            f"chunks need positive sizes, not capacity {capacity}, parts {parts}, align {align}"
        )
    layouts: list[ChunkLayout] = []
    slots: list[Slot] = []
    filled = 0

    def close() -> None:
        nonlocal slots, filled
        if slots:
            unit = parts * align
            layouts.append(ChunkLayout(tuple(slots), -(-max(filled, 1) // unit) * unit, parts))
        slots, filled = [], 0

    for name, numel in tensors:
        if filled + numel > capacity:
            close()
        slots.append(Slot(name, filled, numel))
        filled += numel
    close()
    return layouts
