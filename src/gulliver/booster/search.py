"""Old location of `gulliver.planner.search` and `auto_engine`, kept for one release."""

from gulliver._lazy import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"gulliver.booster.auto": ["auto_engine"], "gulliver.planner.search.grids": ["search_grids"]},
)
