"""ZeRO: data parallelism whose ranks keep shards of optimizer state, gradients and parameters."""

from gulliver.parallel.zero._elementwise import (
    ELEMENTWISE,
    check_optimizer,
    check_trainable,
    is_boosted,
    state_tensors,
)
from gulliver.parallel.zero._optimizer import ZeroOptimizer, export_leaves, import_leaves
from gulliver.parallel.zero._statistics import BufferSync
from gulliver.parallel.zero._tuner import BucketTuner, Tuning

__all__ = [
    "ELEMENTWISE",
    "BucketTuner",
    "BufferSync",
    "Tuning",
    "ZeroOptimizer",
    "check_optimizer",
    "check_trainable",
    "export_leaves",
    "import_leaves",
    "is_boosted",
    "state_tensors",
]
