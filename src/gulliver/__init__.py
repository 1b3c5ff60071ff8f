"""Gulliver: giant models on the hardware you have.

    from gulliver import Booster, LowLevelZeroPlugin

The names in `__all__`, and their packages, are imported on first use (PEP 562): ``import gulliver``
costs no time and does not import torch.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.booster import Booster as Booster
    from gulliver.booster import GeminiPlugin as GeminiPlugin
    from gulliver.booster import HybridParallelPlugin as HybridParallelPlugin
    from gulliver.booster import LowLevelZeroPlugin as LowLevelZeroPlugin
    from gulliver.booster import Plugin as Plugin
    from gulliver.booster import TorchDDPPlugin as TorchDDPPlugin
    from gulliver.booster import auto_engine as auto_engine
    from gulliver.booster import keep_logits as keep_logits
    from gulliver.booster import lazy_parameters as lazy_parameters
    from gulliver.checkpoint import AsyncCheckpointer as AsyncCheckpointer
    from gulliver.comm import World as World
    from gulliver.comm import current_world as current_world
    from gulliver.comm import guard as guard
    from gulliver.comm import init_world as init_world
    from gulliver.comm import launch as launch
    from gulliver.comm import shutdown as shutdown
    from gulliver.data import DataLoader as DataLoader
    from gulliver.errors import GulliverError as GulliverError
    from gulliver.hardware import Cluster as Cluster
    from gulliver.hardware import current_cluster as current_cluster
    from gulliver.plan import Plan as Plan
    from gulliver.precision import replace_module as replace_module
    from gulliver.serve import LLM as LLM
    from gulliver.serve import SamplingParams as SamplingParams

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(__name__)
