"""Exact parallel primitives."""

from gulliver.parallel._optimizer import BoostedOptimizer, named_trainables
from gulliver.parallel.zero import ZeroOptimizer, state_tensors

__all__ = ["BoostedOptimizer", "ZeroOptimizer", "named_trainables", "state_tensors"]
