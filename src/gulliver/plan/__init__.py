"""The plan: how a model runs, as values that can be read, edited, checked and compared."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.plan.analysis.step import analyse as analyse
    from gulliver.plan.plan import Plan as Plan
    from gulliver.plan.results import ComparisonRow as ComparisonRow
    from gulliver.plan.results import Predicted as Predicted
    from gulliver.plan.results import Seconds as Seconds
    from gulliver.plan.results import TierTraffic as TierTraffic
    from gulliver.plan.tree import SHARED_BY_TENSOR as SHARED_BY_TENSOR
    from gulliver.plan.tree import Fp8Plan as Fp8Plan
    from gulliver.plan.tree import Model as Model

__getattr__, __dir__ = lazy_exports(__name__)
