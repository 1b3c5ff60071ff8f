"""ZeRO: data parallelism with sharded optimizer state, gradients and parameters."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.parallel.zero.memory import Event as Event
    from gulliver.parallel.zero.memory import held_bytes as held_bytes
    from gulliver.parallel.zero.optimizer import ZeroOptimizer as ZeroOptimizer

__getattr__, __dir__ = lazy_exports(__name__)
