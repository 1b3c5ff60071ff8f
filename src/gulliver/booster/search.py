"""Old location of `gulliver.planner.search` and `auto_engine`, kept for one release."""

from gulliver.booster.auto import auto_engine
from gulliver.planner.search.grids import search_grids

__all__ = ["auto_engine", "search_grids"]
