"""Gulliver: giant models on the hardware you have.

    from gulliver import Booster, LowLevelZeroPlugin

The names in `__all__`, and their packages, are imported on first use (PEP 562): ``import gulliver``
costs no time and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_PACKAGES = {
    "booster": (
        *("Booster", "GeminiPlugin", "HybridParallelPlugin", "LowLevelZeroPlugin", "Plugin"),
        *("TorchDDPPlugin", "auto_engine", "keep_logits", "lazy_parameters"),
    ),
    "checkpoint": ("AsyncCheckpointer",),
    "embedding": (),
    "comm": ("World", "current_world", "guard", "init_world", "launch", "shutdown"),
    "data": ("DataLoader",),
    "errors": ("GulliverError",),
    "hardware": ("Cluster", "current_cluster"),
    "plan": ("Plan",),
    "precision": ("replace_module",),
    "serve": ("LLM", "SamplingParams"),
    **dict.fromkeys(
        ("families", "io", "layout", "memory", "models", "parallel", "quantize", "solve", "video"),
        (),
    ),
}
"""Public packages, each with the names that this module re-exports."""

_PLACES = {name: package for package, names in _PACKAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"gulliver.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'gulliver' has no attribute {name!r}")
    value = getattr(import_module(f"gulliver.{_PLACES[name]}"), name)
    globals()[name] = value  # so that `__getattr__` is called once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *__all__})
