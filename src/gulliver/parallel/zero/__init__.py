"""ZeRO: data parallelism whose ranks keep only their shard of the optimizer and the gradients."""

from gulliver.parallel.zero._elementwise import ELEMENTWISE, state_tensors
from gulliver.parallel.zero._optimizer import ZeroOptimizer

__all__ = ["ELEMENTWISE", "ZeroOptimizer", "state_tensors"]
