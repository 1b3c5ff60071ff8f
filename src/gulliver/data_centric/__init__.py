"""Data-centric parallel training: groups of ranks adapt to the samples of each step."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.data_centric.costs import Samples as Samples
    from gulliver.data_centric.costs import Seconds as Seconds
    from gulliver.data_centric.costs import Tokens as Tokens
    from gulliver.data_centric.planner import DataCentricOptions as DataCentricOptions
    from gulliver.data_centric.planner import DataCentricPlanner as DataCentricPlanner
    from gulliver.data_centric.plugin import DataCentricPlugin as DataCentricPlugin
    from gulliver.data_centric.step_loader import DataCentricLoader as DataCentricLoader
    from gulliver.data_centric.step_loader import LoadedBatch as LoadedBatch
    from gulliver.data_centric.step_loader import TrainingStep as TrainingStep

__getattr__, __dir__ = lazy_exports(__name__)
