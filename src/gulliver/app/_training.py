"""Looks at a run, which may still be training: nothing is written, and anything may be half there.

Losses come from the lines of the logs that can be read; samples are the pictures and clips in the
run's folder `samples`, and the sheet that `gulliver demo` puts next to the run.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.video import Run, TrainConfig

POINTS = 400
"""Most points of a curve: a longer log is drawn as the means of as many stretches."""
SAMPLES = 24
SUFFIXES = {".png", ".gif", ".mp4", ".jpg", ".webp"}


@dataclass(frozen=True)
class RunView:
    """Figures and samples of a run, as the page shows them."""

    # How far it is, in a line.
    summary: str
    # Points (step, loss, "training" or "held out").
    losses: list[tuple[int, float, str]]
    # Files of pictures and clips, newest first.
    samples: list[Path]


def look(folder: Path) -> RunView:
    """Looks at a run."""
    run = Run(folder)
    try:
        config = run.read_config()
        newest = run.checkpoints.latest()
        lines, held_out = run.log.read(), run.validation.read()
    except (GulliverError, OSError, ValueError, TypeError, KeyError) as error:
        return RunView(f"{folder} cannot be read now: {error}", [], [])
    losses = [*_curve(lines, "training"), *_curve(held_out, "held out")]
    return RunView(_summary(run, config, lines, newest), losses, _samples(folder))


def shapes_of(folder: Path) -> list[str]:
    """Lists the shapes that a run was trained with, as frames x height x width."""
    data = Run(folder).read_config().data
    if data.buckets is not None:
        return []
    return [shape.split(":")[0].strip() for shape in data.shapes]


def _summary(
    run: Run, config: TrainConfig, lines: list[dict[str, Any]], newest: Path | None
) -> str:
    told = "no step yet"
    if lines:
        step, loss = lines[-1]["step"], lines[-1].get("loss")
        told = f"step {step} of {config.steps}"
        if isinstance(loss, int | float):
            told += f", loss {loss:.4f}"
        if step < config.steps:
            told += f", {_age(run.log.path)} since the last line of its log"
    checkpoint = "no checkpoint yet" if newest is None else f"newest checkpoint {newest.name}"
    return f"{run.folder}: {told}; {checkpoint}"


def _age(path: Path) -> str:
    try:
        seconds = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return "some time"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _curve(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float, str]]:
    points = [
        (line["step"], float(line["loss"]))
        for line in lines
        if isinstance(line.get("loss"), int | float) and math.isfinite(line["loss"])
    ]
    stretch = max(1, -(-len(points) // POINTS))
    parts = [points[n : n + stretch] for n in range(0, len(points), stretch)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part), name) for part in parts]


def _samples(folder: Path) -> list[Path]:
    found: list[tuple[float, Path]] = []
    for path in [*folder.glob("samples/**/*"), folder.parent / "sheet.gif"]:
        try:
            facts = path.stat()
        except OSError:
            continue
        # Whoever writes one as it grows has written nothing at first.
        if path.suffix.lower() in SUFFIXES and facts.st_size and not path.name.startswith("."):
            found.append((facts.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:SAMPLES]]
