"""Entry point of training: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.booster.auto import AutoEngine, auto_engine
    from gulliver.booster.booster import Booster
    from gulliver.booster.hybrid.mesh import sequence_degree
    from gulliver.booster.hybrid.transformers import keep_logits
    from gulliver.booster.hybrid_plugin import HybridParallelPlugin
    from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
    from gulliver.checkpoint.huggingface import lazy_parameters
    from gulliver.data_centric.plugin import DataCentricPlugin
    from gulliver.data_centric.step_loader import DataCentricLoader, LoadedBatch, TrainingStep
    from gulliver.planner.search.grids import search_grids

__all__ = [
    "AutoEngine",
    "Booster",
    "DataCentricLoader",
    "DataCentricPlugin",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LoadedBatch",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TrainingStep",
    "auto_engine",
    "keep_logits",
    "lazy_parameters",
    "search_grids",
    "sequence_degree",
]

__getattr__, __dir__ = lazy_exports(__name__)
