"""Exact parallel primitives."""

from gulliver.parallel._optimizer import (
    BoostedOptimizer,
    Counter,
    named_groups,
    named_trainables,
    persistent_buffers,
)
from gulliver.parallel.zero import (
    BucketTuner,
    ZeroOptimizer,
    check_optimizer,
    check_trainable,
    is_boosted,
    state_tensors,
)

__all__ = [
    "BoostedOptimizer",
    "BucketTuner",
    "Counter",
    "ZeroOptimizer",
    "check_optimizer",
    "check_trainable",
    "is_boosted",
    "named_groups",
    "named_trainables",
    "persistent_buffers",
    "state_tensors",
]
