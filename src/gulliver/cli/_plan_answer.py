"""Everything that ``gulliver plan MODEL`` answers, as values; `_plan_text.py` says it in words."""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.booster.search import Found, MinimumResources, Price
from gulliver.cli._plan_models import Subject
from gulliver.cli._plan_why import Why


@dataclass(frozen=True)
class Answer:
    """All that is told of a search.

    Attributes:
        subject: model and batch.
        found: what was found.
        prices: fastest grids under other limits of memory.
        enough: what would be enough.
        changed: what was found on the changed cluster; None where nothing was changed.
        estimates: what was found for training, LoRA and inference, by name.
        why: what is done with a module; None where none was asked for.
    """

    subject: Subject
    found: Found
    prices: tuple[Price, ...]
    enough: MinimumResources
    changed: Found | None = None
    estimates: dict[str, Found] | None = None
    why: Why | None = None
