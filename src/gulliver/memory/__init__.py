"""Where bytes live: tensors that are used together lie in one contiguous chunk."""

from gulliver.memory._awaited import arrived, await_parameter, hide_from_compilers
from gulliver.memory._buffers import BufferPool
from gulliver.memory._chunk import Chunk
from gulliver.memory._claims import (
    ASKS,
    Claim,
    add_claim,
    before_any_write,
    before_write,
    drop_claim,
    storage_of,
)
from gulliver.memory._layout import ChunkLayout, Piece, Slot, plan_chunks
from gulliver.memory._parts import Part, Region, part_of, region_of, set_region, whole_shape
from gulliver.memory._reduced import ADVICE, ReducedGradient, reduced_gradient

__all__ = [
    "ADVICE",
    "ASKS",
    "BufferPool",
    "Chunk",
    "ChunkLayout",
    "Claim",
    "Part",
    "Piece",
    "ReducedGradient",
    "Region",
    "Slot",
    "add_claim",
    "arrived",
    "await_parameter",
    "before_any_write",
    "before_write",
    "drop_claim",
    "hide_from_compilers",
    "part_of",
    "plan_chunks",
    "reduced_gradient",
    "region_of",
    "set_region",
    "storage_of",
    "whole_shape",
]
