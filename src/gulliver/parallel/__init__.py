"""Exact parallel primitives."""

from gulliver.parallel._optimizer import BoostedOptimizer, named_trainables
from gulliver.parallel.zero import BucketTuner, ZeroOptimizer, state_tensors

__all__ = ["BoostedOptimizer", "BucketTuner", "ZeroOptimizer", "named_trainables", "state_tensors"]
