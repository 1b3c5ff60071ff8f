"""Parallel training: ZeRO, tensor, pipeline and sequence parallelism, sharded convolutions."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.parallel.optimizer import BoostedOptimizer as BoostedOptimizer
    from gulliver.parallel.zero.optimizer import ZeroOptimizer as ZeroOptimizer

__getattr__, __dir__ = lazy_exports(__name__)
