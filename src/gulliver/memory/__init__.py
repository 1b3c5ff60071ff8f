"""Where bytes live: tensors that are used together lie in one contiguous chunk.

Read `_chunk.py` first: the buffers of a chunk. `_prefetch.py` brings chunks ahead of use,
`_record.py` notes what a step uses when, `_bytes.py` counts. `_manager.py` keeps objects within a
limit of memory: `traffic.py` moves them to and from what `stores.py` and `host.py` hold;
`_host_disk.py` is host memory that has a disk behind it. `_activation_stack.py` keeps what a
forward saved in host memory until its backward.
"""

from gulliver.memory._activation_stack import ActivationStack, HostArena
from gulliver.memory._activations import ActivationOffload, offload_activations
from gulliver.memory._around import recompute_modules, wrap_call
from gulliver.memory._budget import (
    BudgetController,
    BudgetRule,
    room_without_unseen,
    smallest_limit,
    with_unseen,
)
from gulliver.memory._buffers import BufferPool
from gulliver.memory._bytes import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    OPTIMIZER_STATE,
    PARAMETERS,
    ByteCounter,
)
from gulliver.memory._chunk import Chunk
from gulliver.memory._fakes import FakeTensors, without_traces
from gulliver.memory._footprint import Footprint, ProcessGauge
from gulliver.memory._host import HostStore
from gulliver.memory._host_disk import HostDiskStore
from gulliver.memory._layout import ChunkLayout, ShardPiece, plan_chunks
from gulliver.memory._malloc import FreedMemory
from gulliver.memory._manager import Manager
from gulliver.memory._moments import moment_size
from gulliver.memory._pages import page_aligned
from gulliver.memory._parts import (
    Part,
    Region,
    part_of,
    region_of,
    set_region,
    set_state_shape,
    state_shape,
    whole_shape,
)
from gulliver.memory._pending import (
    PendingParameter,
    hide_from_compilers,
    mark_pending,
    mark_ready,
)
from gulliver.memory._placed import RESIDENT, ManagedTensor, Residency
from gulliver.memory._placed_chunk import ManagedBufferPool, ManagedChunk
from gulliver.memory._prefetch import LEGAL_PRESENCE, Pass, Prefetcher, Presence, Resident
from gulliver.memory._read_locks import (
    ASKS,
    add_read_lock,
    add_writer,
    any_read_lock,
    before_any_write,
    before_write,
    before_write_at,
    drop_read_lock,
    storage_of,
    writers,
)
from gulliver.memory._record import AccessRecord, UseRecorder
from gulliver.memory._reduced import ReducedGradient, reduced_gradient
from gulliver.memory._stores import (
    IN_MEMORY,
    DiskStore,
    Store,
    check_disk_folder,
    file_system,
    whole_pages,
)
from gulliver.memory._streams import Copier, seconds_between
from gulliver.memory._symbolic import (
    ActivationPeak,
    MemoryPoint,
    StorageCounter,
    activation_peak,
    block_activations,
    follow_step,
    stand_in_loss,
)
from gulliver.memory._traffic import BufferStillReferenced

__all__ = [
    "ACTIVATIONS",
    "ASKS",
    "GRADIENTS",
    "IN_MEMORY",
    "KINDS",
    "LEGAL_PRESENCE",
    "OPTIMIZER_STATE",
    "PARAMETERS",
    "RESIDENT",
    "AccessRecord",
    "ActivationOffload",
    "ActivationPeak",
    "ActivationStack",
    "BudgetController",
    "BudgetRule",
    "BufferPool",
    "BufferStillReferenced",
    "ByteCounter",
    "Chunk",
    "ChunkLayout",
    "Copier",
    "DiskStore",
    "FakeTensors",
    "Footprint",
    "FreedMemory",
    "HostArena",
    "HostDiskStore",
    "HostStore",
    "ManagedBufferPool",
    "ManagedChunk",
    "ManagedTensor",
    "Manager",
    "MemoryPoint",
    "Part",
    "Pass",
    "PendingParameter",
    "Prefetcher",
    "Presence",
    "ProcessGauge",
    "ReducedGradient",
    "Region",
    "Residency",
    "Resident",
    "ShardPiece",
    "StorageCounter",
    "Store",
    "UseRecorder",
    "activation_peak",
    "add_read_lock",
    "add_writer",
    "any_read_lock",
    "before_any_write",
    "before_write",
    "before_write_at",
    "block_activations",
    "check_disk_folder",
    "drop_read_lock",
    "file_system",
    "follow_step",
    "hide_from_compilers",
    "mark_pending",
    "mark_ready",
    "moment_size",
    "offload_activations",
    "page_aligned",
    "part_of",
    "plan_chunks",
    "recompute_modules",
    "reduced_gradient",
    "region_of",
    "room_without_unseen",
    "seconds_between",
    "set_region",
    "set_state_shape",
    "smallest_limit",
    "stand_in_loss",
    "state_shape",
    "storage_of",
    "whole_pages",
    "whole_shape",
    "with_unseen",
    "without_traces",
    "wrap_call",
    "writers",
]
