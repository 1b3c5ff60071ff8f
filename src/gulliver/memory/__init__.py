"""Where bytes live: tensors that are used together lie in one contiguous chunk."""

from gulliver.memory._awaited import arrived, await_parameter
from gulliver.memory._buffers import BufferPool
from gulliver.memory._chunk import Chunk
from gulliver.memory._layout import ChunkLayout, Piece, Slot, plan_chunks
from gulliver.memory._reduced import ADVICE, ReducedGradient, reduced_gradient

__all__ = [
    "ADVICE",
    "BufferPool",
    "Chunk",
    "ChunkLayout",
    "Piece",
    "ReducedGradient",
    "Slot",
    "arrived",
    "await_parameter",
    "plan_chunks",
    "reduced_gradient",
]
