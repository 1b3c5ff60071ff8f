"""The one call: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from gulliver.booster._booster import Booster
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin, TorchDDPPlugin

__all__ = ["Booster", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin"]
