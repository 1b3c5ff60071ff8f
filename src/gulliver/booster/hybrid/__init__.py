"""Hybrid parallelism: tensor, sequence and pipeline axes over one model.

Read `steps`, which cuts a model in place; `checks` refuses what cannot be cut, and `mesh` has the
rank groups.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.booster.hybrid.checks import lazy_parameters
    from gulliver.booster.hybrid.mesh import sequence_degree
    from gulliver.booster.hybrid.transformers import keep_logits
    from gulliver.planner.capability import HEADS, family_of

__all__ = ["HEADS", "family_of", "keep_logits", "lazy_parameters", "sequence_degree"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.booster.hybrid.checks": ["lazy_parameters"],
        "gulliver.booster.hybrid.mesh": ["sequence_degree"],
        "gulliver.booster.hybrid.transformers": ["keep_logits"],
        "gulliver.planner.capability": ["HEADS", "family_of"],
    },
)
