"""Gulliver: giant models on the hardware you have.

    from gulliver import Booster, LowLevelZeroPlugin

The names in `__all__`, and their packages, are imported on first use (PEP 562): ``import gulliver``
costs no time and does not import torch.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.booster import (
        Booster,
        GeminiPlugin,
        HybridParallelPlugin,
        LowLevelZeroPlugin,
        Plugin,
        TorchDDPPlugin,
        auto_engine,
        keep_logits,
        lazy_parameters,
    )
    from gulliver.checkpoint import AsyncCheckpointer
    from gulliver.comm import World, current_world, guard, init_world, launch, shutdown
    from gulliver.data import DataLoader
    from gulliver.errors import GulliverError
    from gulliver.hardware import Cluster, current_cluster
    from gulliver.plan import Plan
    from gulliver.precision import replace_module
    from gulliver.serve import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncCheckpointer",
    "Booster",
    "Cluster",
    "DataLoader",
    "GeminiPlugin",
    "GulliverError",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plan",
    "Plugin",
    "SamplingParams",
    "TorchDDPPlugin",
    "World",
    "auto_engine",
    "current_cluster",
    "current_world",
    "guard",
    "init_world",
    "keep_logits",
    "launch",
    "lazy_parameters",
    "replace_module",
    "shutdown",
]

__getattr__, __dir__ = lazy_exports(__name__)
