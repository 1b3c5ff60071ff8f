"""Everything that ``gulliver plan MODEL`` answers, as values; `_plan_text.py` says it in words."""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.booster.search import Found, MinimumResources, Price
from gulliver.cli._plan_models import Subject
from gulliver.cli._plan_why import Why


@dataclass(frozen=True)
class Answer:
    """All results of a search."""

    subject: Subject
    found: Found
    # Fastest grids under other limits of memory.
    prices: tuple[Price, ...]
    enough: MinimumResources
    # What was found on the changed cluster; None where nothing was changed.
    changed: Found | None = None
    # What was found for training, LoRA and inference, by name.
    estimates: dict[str, Found] | None = None
    # What is done with a module; None where none was asked for.
    why: Why | None = None
