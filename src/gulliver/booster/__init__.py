"""The one call: `Booster(plugin=...).boost(model, optimizer, ...)`."""

from gulliver.booster._blocks import recomputable_blocks
from gulliver.booster._booster import Booster
from gulliver.booster._data_centric import DataCentricPlugin
from gulliver.booster._estimate import estimate_sample, estimate_work
from gulliver.booster._fp8 import gate_fp8
from gulliver.booster._gemini import GeminiPlugin
from gulliver.booster._hybrid_plugin import HybridParallelPlugin
from gulliver.booster._measure import with_peaks
from gulliver.booster._plugins import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.booster._step_loader import DataCentricLoader, LoadedBatch, TrainingStep
from gulliver.booster.hybrid import keep_logits, lazy_parameters, sequence_degree
from gulliver.booster.search import auto_engine, search_grids

__all__ = [
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
    "estimate_sample",
    "estimate_work",
    "gate_fp8",
    "keep_logits",
    "lazy_parameters",
    "recomputable_blocks",
    "search_grids",
    "sequence_degree",
    "with_peaks",
]
