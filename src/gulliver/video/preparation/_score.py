"""Scores of clips: a column for each scorer, those in the box and those of plug-ins.

A plug-in is an entry point of the group `GROUP`: its name is the column, and it leads to a function
of `Samples` that returns a number, text, or None. All scorers that are asked for see one decoding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.video.preparation._samples import Samples, take_samples
from gulliver.video.preparation._scorers import IN_THE_BOX
from gulliver.video.preparation._table import Table, check_suffix, write_broken
from gulliver.video.preparation._work import FileOutcome, fill_columns

GROUP = "gulliver.scorers"
"""Group of the entry points of plug-ins."""
Scorer = Callable[[Samples], Any]


@dataclass(frozen=True)
class Scored:
    """A table with scores."""

    # The table; scores that could not be had are null.
    table: Table
    # Name and reason of each file without some score, or of which a part was scored.
    broken: list[tuple[str, str]]
    fresh: int
    # Number of those that have every score that was asked for.
    whole: int


def find_scorers(names: Sequence[str]) -> dict[str, Scorer]:
    """Finds scorers by name."""
    plugged = {point.name: point for point in entry_points(group=GROUP)}
    found: dict[str, Scorer] = {}
    for name in names:
        if name in IN_THE_BOX and name not in plugged:
            found[name] = IN_THE_BOX[name]
        elif name in plugged:
            found[name] = _loaded(plugged[name])
        else:
            raise GulliverError(
                f"unknown scorer {name!r}: {nearest(name, [*IN_THE_BOX, *plugged])}"
            )
    if not found:
        raise GulliverError(f"no scorer is named: {nearest('', [*IN_THE_BOX, *plugged])}")
    return found


def _loaded(point: EntryPoint) -> Scorer:
    where = f"scorer {point.name!r} of {point.dist.name if point.dist else point.value}"
    if point.name in IN_THE_BOX or point.name in ("path", "num_frames", "height", "width", "fps"):
        raise GulliverError(f"{where} has a name that is taken: rename its entry point")
    try:
        function = point.load()
    except Exception as error:
        raise GulliverError(f"{where} cannot be imported: {_told(error)}") from error
    if not callable(function):
        raise GulliverError(f"{where} is no function: its entry point leads to {function!r}")
    return function


def score(
    table: Table,
    names: Sequence[str] = tuple(IN_THE_BOX),
    out: Path | None = None,
    again: bool = False,
    workers: int = 0,
) -> Scored:
    """Writes a table with a column for each scorer; rows that have their scores are left alone.

    Args:
        table: table of clips.
        names: scorers.
        out: table to write; None: the one that was read.
        again: whether to score anew what has scores.
        workers: threads; 0 takes one for each core.

    Raises:
        GulliverError: an unknown scorer.
    """
    scorers, out = find_scorers(names), Path(out or table.path)
    check_suffix(out)
    have = {name: _column(table, name, again) for name in scorers}
    left = [row for row in range(len(table)) if any(have[name][row] is None for name in scorers)]
    settings = json.dumps(sorted(scorers))
    work = partial(score_file, scorers=scorers)
    with fill_columns(table, left, work, out, "score", have, settings, workers) as broken:
        whole = sum(all(have[name][row] is not None for name in scorers) for row in left)
        scored = table.with_columns(have).write(out)
        write_broken(out, "score", broken)
    return Scored(scored, broken, len(left), whole)


def _column(table: Table, name: str, again: bool) -> list[Any]:
    known = name in table.names and not again
    return table.column(name) if known else [None] * len(table)


def score_file(path: Path, scorers: dict[str, Scorer]) -> FileOutcome:
    """Scores a clip; what a scorer raises is the clip's problem, and the others are kept."""
    samples = take_samples(path)
    values: dict[str, Any] = {}
    problems = [] if samples.problem is None else [f"only a part was scored: {samples.problem}"]
    for name, scorer in scorers.items():
        try:
            values[name] = _plain(name, scorer(samples))
        except Exception as error:
            problems.append(f"{name}: {_told(error)}")
    return FileOutcome(values, "; ".join(problems) or None)


def _plain(name: str, value: Any) -> Any:
    """Turns a score into a number or text of Python; NaN is None."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float | int | str | None):
        raise GulliverError(f"gives {type(value).__name__}: give a number, text or None")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _told(error: BaseException) -> str:
    """Says an error in one line."""
    kind = "" if isinstance(error, GulliverError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
