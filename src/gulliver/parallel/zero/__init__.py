"""ZeRO: data parallelism whose ranks keep shards of optimizer state, gradients and parameters."""

from gulliver.parallel.zero._elementwise import (
    ELEMENTWISE,
    is_boosted,
    makes_beside,
)
from gulliver.parallel.zero._memory import (
    ChunkBytes,
    Event,
    ImaginedChunk,
    StepReplay,
    after_micro_batches,
    backward_uses,
    held_bytes,
    in_unequal_step,
    ordinary_step,
)
from gulliver.parallel.zero._optimizer import ZeroOptimizer
from gulliver.parallel.zero._reducer import IN_FLIGHT
from gulliver.parallel.zero._sending import GradientGate, ZeroWires
from gulliver.parallel.zero._sharded import ShardedChunk, squared_norm
from gulliver.parallel.zero._sizes import TensorSize, ordered_layouts, shard_dtype
from gulliver.parallel.zero._tuner import TuningStage
from gulliver.parallel.zero._uneven import LEFT, UnevenStep, check_uneven, uneven_step

__all__ = [
    "ELEMENTWISE",
    "IN_FLIGHT",
    "LEFT",
    "ChunkBytes",
    "Event",
    "GradientGate",
    "ImaginedChunk",
    "ShardedChunk",
    "StepReplay",
    "TensorSize",
    "TuningStage",
    "UnevenStep",
    "ZeroOptimizer",
    "ZeroWires",
    "after_micro_batches",
    "backward_uses",
    "check_uneven",
    "held_bytes",
    "in_unequal_step",
    "is_boosted",
    "makes_beside",
    "ordered_layouts",
    "ordinary_step",
    "shard_dtype",
    "squared_norm",
    "uneven_step",
]
