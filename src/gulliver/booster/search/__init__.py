"""The search over parallel grids: every grid that a plugin can run, priced and ranked."""

from gulliver.booster.search._answers import (
    MinimumResources,
    Price,
    enough,
    least_bytes,
    prices_of_memory,
    saved_by_a_gib,
    searched_again,
)
from gulliver.booster.search._auto import AutoEngine, auto_engine, plan_of
from gulliver.booster.search._facts import Facts, ModelPart, TensorShares
from gulliver.booster.search._followed import facts_of
from gulliver.booster.search._grids import CHUNKS_MB, Axes, Grid, axes_of, grids_of
from gulliver.booster.search._offload import Least, Offloader, least_offloaded, offloaded_grids
from gulliver.booster.search._offload_tiers import OffloadTiers
from gulliver.booster.search._plugin import plugin_of
from gulliver.booster.search._report import kinds_of_bytes, kinds_of_time, report
from gulliver.booster.search._score import Scored, Scorer
from gulliver.booster.search._search import Found, modes_of, search_grids

__all__ = [
    "CHUNKS_MB",
    "AutoEngine",
    "Axes",
    "Facts",
    "Found",
    "Grid",
    "Least",
    "MinimumResources",
    "ModelPart",
    "OffloadTiers",
    "Offloader",
    "Price",
    "Scored",
    "Scorer",
    "TensorShares",
    "auto_engine",
    "axes_of",
    "enough",
    "facts_of",
    "grids_of",
    "kinds_of_bytes",
    "kinds_of_time",
    "least_bytes",
    "least_offloaded",
    "modes_of",
    "offloaded_grids",
    "plan_of",
    "plugin_of",
    "prices_of_memory",
    "report",
    "saved_by_a_gib",
    "search_grids",
    "searched_again",
]
