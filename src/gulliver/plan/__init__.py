"""The plan: how a model runs, as values that can be read, edited, checked and compared."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.plan.analysis.step import analyse
    from gulliver.plan.plan import Plan
    from gulliver.plan.results import ComparisonRow, Predicted, Seconds, TierTraffic
    from gulliver.plan.tree import SHARED_BY_TENSOR, Fp8Plan, Model

__all__ = [
    "SHARED_BY_TENSOR",
    "ComparisonRow",
    "Fp8Plan",
    "Model",
    "Plan",
    "Predicted",
    "Seconds",
    "TierTraffic",
    "analyse",
]

__getattr__, __dir__ = lazy_exports(__name__)
