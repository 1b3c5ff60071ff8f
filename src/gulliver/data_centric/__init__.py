"""Data-centric parallel training: groups of ranks adapt to the samples of each step."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.data_centric.costs import Samples, Seconds, Tokens
    from gulliver.data_centric.planner import DataCentricOptions, DataCentricPlanner
    from gulliver.data_centric.plugin import DataCentricPlugin
    from gulliver.data_centric.step_loader import DataCentricLoader, LoadedBatch, TrainingStep

__all__ = [
    "DataCentricLoader",
    "DataCentricOptions",
    "DataCentricPlanner",
    "DataCentricPlugin",
    "LoadedBatch",
    "Samples",
    "Seconds",
    "Tokens",
    "TrainingStep",
]

__getattr__, __dir__ = lazy_exports(__name__)
