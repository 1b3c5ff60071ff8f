"""Creates, predicts, measures and searches plans, without running them."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.planner.capability import HEADS, family_of
    from gulliver.planner.tiers import OffloadTiers

__all__ = ["HEADS", "OffloadTiers", "family_of"]

__getattr__, __dir__ = lazy_exports(__name__)
