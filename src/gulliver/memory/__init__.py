"""Where bytes live: tensors that are used together lie in one contiguous chunk."""

from gulliver.memory._chunk import Chunk
from gulliver.memory._layout import ChunkLayout, Piece, Slot, plan_chunks
from gulliver.memory._reduced import ADVICE, ReducedGradient, reduced_gradient

__all__ = [
    "ADVICE",
    "Chunk",
    "ChunkLayout",
    "Piece",
    "ReducedGradient",
    "Slot",
    "plan_chunks",
    "reduced_gradient",
]
