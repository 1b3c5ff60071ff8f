"""Searches grids of data, tensor, sequence and pipeline ranks for the fastest plan."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.planner.search.grids import MinimumResources as MinimumResources
    from gulliver.planner.search.grids import search_grids as search_grids

__getattr__, __dir__ = lazy_exports(__name__)
