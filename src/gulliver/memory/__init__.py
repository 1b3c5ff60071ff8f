"""Where bytes live: tensors that are used together lie in one contiguous chunk."""

from gulliver.memory._chunk import Chunk
from gulliver.memory._layout import ChunkLayout, Piece, Slot, plan_chunks

__all__ = ["Chunk", "ChunkLayout", "Piece", "Slot", "plan_chunks"]
