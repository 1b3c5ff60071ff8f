"""ZeRO: data parallelism whose ranks keep shards of optimizer state, gradients and parameters."""

from gulliver.parallel.zero._elementwise import ELEMENTWISE, check_optimizer, state_tensors
from gulliver.parallel.zero._optimizer import ZeroOptimizer, check_trainable, is_boosted
from gulliver.parallel.zero._reducer import IN_FLIGHT
from gulliver.parallel.zero._saved import export_leaves, import_leaves
from gulliver.parallel.zero._sizes import TensorSize, ordered_layouts, shard_dtype
from gulliver.parallel.zero._statistics import BufferSync
from gulliver.parallel.zero._tuner import BucketTuner, Tuning

__all__ = [
    "ELEMENTWISE",
    "IN_FLIGHT",
    "BucketTuner",
    "BufferSync",
    "TensorSize",
    "Tuning",
    "ZeroOptimizer",
    "check_optimizer",
    "check_trainable",
    "export_leaves",
    "import_leaves",
    "is_boosted",
    "ordered_layouts",
    "shard_dtype",
    "state_tensors",
]
