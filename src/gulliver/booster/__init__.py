"""The one call: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from gulliver.booster._booster import Booster
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.booster.hybrid._lazy import lazy_parameters
from gulliver.booster.hybrid._plugin import HybridParallelPlugin
from gulliver.booster.hybrid._transformers import keep_logits

__all__ = [
    "Booster",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "keep_logits",
    "lazy_parameters",
]
