"""Creates, predicts, measures and searches plans, without running them."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.planner.capability import HEADS as HEADS
    from gulliver.planner.capability import family_of as family_of
    from gulliver.planner.tiers import OffloadTiers as OffloadTiers

__getattr__, __dir__ = lazy_exports(__name__)
