"""Exact parallel primitives."""

from gulliver.parallel._optimizer import BoostedOptimizer, Counter, named_groups, named_trainables
from gulliver.parallel.zero import BucketTuner, ZeroOptimizer, state_tensors

__all__ = [
    "BoostedOptimizer",
    "BucketTuner",
    "Counter",
    "ZeroOptimizer",
    "named_groups",
    "named_trainables",
    "state_tensors",
]
