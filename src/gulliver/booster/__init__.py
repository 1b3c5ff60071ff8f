"""Entry point of training: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.booster.auto import AutoEngine as AutoEngine
    from gulliver.booster.auto import auto_engine as auto_engine
    from gulliver.booster.booster import Booster as Booster
    from gulliver.booster.hybrid.mesh import sequence_degree as sequence_degree
    from gulliver.booster.hybrid.transformers import keep_logits as keep_logits
    from gulliver.booster.hybrid_plugin import HybridParallelPlugin as HybridParallelPlugin
    from gulliver.booster.plugins import GeminiPlugin as GeminiPlugin
    from gulliver.booster.plugins import LowLevelZeroPlugin as LowLevelZeroPlugin
    from gulliver.booster.plugins import Plugin as Plugin
    from gulliver.booster.plugins import TorchDDPPlugin as TorchDDPPlugin
    from gulliver.checkpoint.huggingface import lazy_parameters as lazy_parameters
    from gulliver.data_centric.plugin import DataCentricPlugin as DataCentricPlugin
    from gulliver.data_centric.step_loader import DataCentricLoader as DataCentricLoader
    from gulliver.data_centric.step_loader import LoadedBatch as LoadedBatch
    from gulliver.data_centric.step_loader import TrainingStep as TrainingStep
    from gulliver.planner.search.grids import search_grids as search_grids

__getattr__, __dir__ = lazy_exports(__name__)
