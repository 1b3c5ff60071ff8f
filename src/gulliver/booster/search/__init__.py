"""Every grid that a plugin can run on a cluster, priced and ranked for a model.

Read `_grids.py` (what is searched), `_facts.py` (what a model is to the search), `_score.py` (what
a grid takes) and `_search.py` (how the best are found).
"""

from gulliver.booster.search._auto import Engine, auto_engine, plan_of, plugin_of
from gulliver.booster.search._facts import Facts, Part, Shared, facts_of
from gulliver.booster.search._grids import Axes, Grid, axes_of, grids_of
from gulliver.booster.search._score import Scored, Scorer
from gulliver.booster.search._search import Found, modes_of, search_grids

__all__ = [
    "Axes",
    "Engine",
    "Facts",
    "Found",
    "Grid",
    "Part",
    "Scored",
    "Scorer",
    "Shared",
    "auto_engine",
    "axes_of",
    "facts_of",
    "grids_of",
    "modes_of",
    "plan_of",
    "plugin_of",
    "search_grids",
]
