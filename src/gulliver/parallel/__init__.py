"""Exact parallel primitives."""

from gulliver.parallel._optimizer import (
    BoostedOptimizer,
    Counter,
    named_groups,
    named_trainables,
    persistent_buffers,
)
from gulliver.parallel.zero import BucketTuner, ZeroOptimizer, check_optimizer, state_tensors

__all__ = [
    "BoostedOptimizer",
    "BucketTuner",
    "Counter",
    "ZeroOptimizer",
    "check_optimizer",
    "named_groups",
    "named_trainables",
    "persistent_buffers",
    "state_tensors",
]
