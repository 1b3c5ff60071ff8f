"""Says what a newcomer would do next, where a command has done what it was asked for."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gulliver.video import TrainConfig

ANY = "17x64x64"
"""Shape that is named where none is known."""


def hint(*words: object) -> None:
    """Prints a command, as it would be typed; standard output stays free for results."""
    print("next: gulliver " + shlex.join(map(str, words)), file=sys.stderr)


def after_scan(table: Path) -> None:
    """Names the two ways on from a table of a folder."""
    hint("data", "cut", table, "--out", "clips/clips.parquet")
    hint("data", "score", table)


def after_show(table: Path) -> None:
    """Names the training on a table."""
    hint("train", "--data.table", table, "--data.shapes", ANY, "--out", "runs/mine")


def after_train(config: TrainConfig) -> None:
    """Names the ways to see what a run has learnt."""
    from gulliver.video import parse_shapes

    shape = next(iter(parse_shapes(config.data.shapes)))
    words = ["generate", "--run", config.out, "--prompt", "the digit 3 moving left"]
    if not config.data.made:
        words = [*words[:-1], "YOUR SENTENCE", "--frames", shape.frames]
        side = round((shape.height * shape.width) ** 0.5)
        words += ["--resolution", side, "--aspect-ratio", shape.aspect_ratio]
    hint(*words)
    hint("app", config.out)
