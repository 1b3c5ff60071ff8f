"""Steps of trainers without run folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from gulliver.jobs.display import Display, Scalars
from gulliver.jobs.loop import TrainingLoop
from gulliver.jobs.stop import StopRequest


def _lines(trainer: TrainingLoop) -> list[dict[str, float]]:
    """A list that every step adds its line of the log to, on the main rank."""
    lines: list[dict[str, float]] = []

    def describe(line: dict[str, Any], *_: Any) -> dict[str, str]:
        lines.append(line)
        return {}

    vars(trainer)["describe"] = describe
    return lines


def one_step(trainer: TrainingLoop, batch: Any) -> dict[str, float]:
    """Runs a step as the loop does; returns its line of the log, empty if it was none."""
    lines = _lines(trainer)
    trainer.display = Display("step", 1, enabled=False)
    trainer.scalars = Scalars(trainer.run.folder, None)
    trainer._step(batch, batch.sampler_state)
    return lines[0] if lines else {}


def all_steps(trainer: TrainingLoop) -> list[dict[str, float]]:
    """Trains to the end without checkpoints; returns the lines of the steps."""
    lines = _lines(trainer)
    trainer.run = replace(trainer.run, folder=Path(mkdtemp()))
    vars(trainer)["save"] = lambda: None
    trainer.train(StopRequest())
    return lines
