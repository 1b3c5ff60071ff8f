"""The one call: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from gulliver.booster._booster import Booster
from gulliver.booster._hybrid_plugin import HybridParallelPlugin
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.booster.hybrid import keep_logits, lazy_parameters, sequence_degree

__all__ = [
    "Booster",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "keep_logits",
    "lazy_parameters",
    "sequence_degree",
]
