"""Where bytes live: tensors that are used together lie in one contiguous chunk.

Read `_chunk.py` first: the buffers of a chunk. `_prefetch.py` brings chunks ahead of use,
`_record.py` notes what a step uses when, `_bytes.py` counts.
"""

from gulliver.memory._budget import BudgetController, BudgetRule, smallest_limit
from gulliver.memory._buffers import BufferPool
from gulliver.memory._bytes import GRADIENTS, KINDS, OPTIMIZER_STATE, PARAMETERS, ByteCounter
from gulliver.memory._chunk import Chunk
from gulliver.memory._claims import (
    ASKS,
    Claim,
    add_claim,
    before_any_write,
    before_write,
    drop_claim,
    is_claimed,
    storage_of,
)
from gulliver.memory._footprint import Footprint
from gulliver.memory._layout import ChunkLayout, Piece, Slot, plan_chunks
from gulliver.memory._manager import Manager
from gulliver.memory._moments import Moment, moment_size
from gulliver.memory._parts import Part, Region, part_of, region_of, set_region, whole_shape
from gulliver.memory._pending import hide_from_compilers, mark_pending, mark_ready
from gulliver.memory._placed import Placed
from gulliver.memory._placed_chunk import LentBuffers, PlacedChunk
from gulliver.memory._prefetch import LEGAL_PRESENCE, Mover, Pass, Prefetcher, Presence, Resident
from gulliver.memory._record import AccessRecord, UseRecorder, seconds_between
from gulliver.memory._reduced import ADVICE, ReducedGradient, reduced_gradient
from gulliver.memory._stores import DiskStore, Store, Transfer, whole_pages
from gulliver.memory._symbolic import ActivationPeak, activation_peak

__all__ = [
    "ADVICE",
    "ASKS",
    "GRADIENTS",
    "KINDS",
    "LEGAL_PRESENCE",
    "OPTIMIZER_STATE",
    "PARAMETERS",
    "AccessRecord",
    "ActivationPeak",
    "BudgetController",
    "BudgetRule",
    "BufferPool",
    "ByteCounter",
    "Chunk",
    "ChunkLayout",
    "Claim",
    "DiskStore",
    "Footprint",
    "LentBuffers",
    "Manager",
    "Moment",
    "Mover",
    "Part",
    "Pass",
    "Piece",
    "Placed",
    "PlacedChunk",
    "Prefetcher",
    "Presence",
    "ReducedGradient",
    "Region",
    "Resident",
    "Slot",
    "Store",
    "Transfer",
    "UseRecorder",
    "activation_peak",
    "add_claim",
    "before_any_write",
    "before_write",
    "drop_claim",
    "hide_from_compilers",
    "is_claimed",
    "mark_pending",
    "mark_ready",
    "moment_size",
    "part_of",
    "plan_chunks",
    "reduced_gradient",
    "region_of",
    "seconds_between",
    "set_region",
    "smallest_limit",
    "storage_of",
    "whole_pages",
    "whole_shape",
]
