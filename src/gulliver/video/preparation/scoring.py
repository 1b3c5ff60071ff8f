"""Built-in scorers: functions of a clip's `Samples` that need no download.

The name of a function is its column. Pictures are those of `take_samples`: eight moments, at most
512 pixels wide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.video.preparation.packets import MOMENTS, Samples, averaged, take_samples
from gulliver.video.preparation.table import Table, check_suffix, write_broken
from gulliver.video.preparation.work import FileOutcome, fill_columns

HASH_SIDE = 32
"""Side length of the hashed picture."""
BITS = 8
"""Side length of the block of low frequencies in the hash."""
PLAIN = 2.0
"""Standard deviation, in grey levels, of a blank picture: its hash is 0."""
STRONG = 48
"""Minimum gradient at the edge of a letter, in grey levels."""
LINE = (6, 0.2)
"""Height of a line of text: minimum in pixels, and maximum as a fraction of the picture."""


def sharpness(samples: Samples) -> float:
    """Variance of the Laplacian of the brightness; below about 50 a clip is blurred or blank."""
    grey = samples.grey
    if min(grey.shape[1:]) < 3:
        return 0.0
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return float((around - 4 * grey[:, 1:-1, 1:-1]).var(axis=(1, 2)).mean())


def brightness(samples: Samples) -> float:
    """Mean brightness, 0 (black) to 255 (white)."""
    return float(samples.grey.mean())


def motion(samples: Samples) -> float:
    """Mean difference between consecutive frames, in gray levels; 0 is still, 10 is a lot."""
    return float(np.abs(samples.grey_neighbours - samples.grey).mean())


def text_share(samples: Samples) -> float:
    """Fraction of the picture inside text boxes, from 0 to 1; the mean over three moments."""
    # A line of text is a row of strong edges that are close together (morphological gradient,
    # closed along the row), flat, mostly filled, and crossed by as many strokes as it has letters.
    cv2 = _cv2()
    shares = []
    for picture in samples.pictures[:: max(1, len(samples.pictures) // 3)]:
        grey = cv2.cvtColor(np.ascontiguousarray(picture), cv2.COLOR_RGB2GRAY)
        covered = np.zeros(grey.shape, bool)
        for left, top, width, height in text_boxes(grey):
            covered[top : top + height, left : left + width] = True
        shares.append(covered.mean())
    return float(np.mean(shares))


def text_boxes(grey: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Finds lines of text in a picture uint8 [H, W]: left, top, width and height of each."""
    cv2 = _cv2()
    ring = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    gradient = cv2.morphologyEx(grey, cv2.MORPH_GRADIENT, ring)
    otsu, _ = cv2.threshold(gradient, 0, 255, cv2.THRESH_BINARY | cv2.THRESH_OTSU)
    edges = (gradient > max(otsu, STRONG)).astype(np.uint8)
    rows = cv2.morphologyEx(edges, cv2.MORPH_CLOSE, np.ones((1, 9), np.uint8))
    _, _, found, _ = cv2.connectedComponentsWithStats(rows)
    return [
        (left, top, width, height)
        for left, top, width, height, area in found[1:].tolist()
        if _is_line(grey, edges[top : top + height, left : left + width], area)
    ]


def _is_line(grey: np.ndarray, edges: np.ndarray, area: int) -> bool:
    height, width = edges.shape
    if not LINE[0] <= height <= LINE[1] * grey.shape[0] or width < 2 * height:
        return False
    middle = edges[height // 4 : height - height // 4].astype(np.int8)
    strokes = (np.diff(middle, axis=1) > 0).sum(1).mean()
    return area > 0.5 * width * height and strokes > 0.5 * width / height


def phash(samples: Samples) -> str:
    """Perceptual hash of each moment: 64 bits as 16 hexadecimal digits, concatenated."""
    # A bit is whether one of the 8 x 8 lowest frequencies (cosine transform of 32 x 32 averages) is
    # above their median: coding and scaling change few of them.
    small = averaged(samples.grey, HASH_SIDE)
    basis = _cosines(HASH_SIDE)[:BITS]
    low = (basis @ small @ basis.T).reshape(len(small), -1)
    bits = low > np.median(low, axis=1, keepdims=True)
    bits[small.std(axis=(1, 2)) < PLAIN] = False
    return np.packbits(bits, axis=1).tobytes().hex()


@cache
def _cosines(side: int) -> np.ndarray:
    place = np.arange(side)
    waves = np.cos(np.pi / side * (place + 0.5) * place[:, None]) * np.sqrt(2 / side)
    waves[0] /= np.sqrt(2)
    return waves.astype(np.float32)


def hash_bits(hashes: list[str]) -> np.ndarray:
    """Converts hashes of clips to bits, bool [clips, MOMENTS * 64]."""
    if not hashes:
        return np.zeros((0, MOMENTS * BITS * BITS), bool)
    content = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)
    return np.unpackbits(content.reshape(len(hashes), MOMENTS * BITS), axis=1).astype(bool)


def _cv2() -> Any:
    try:
        import cv2
    except ImportError:
        raise missing_extra("text_share needs OpenCV", "data") from None
    return cv2


IN_THE_BOX: dict[str, Callable[[Samples], Any]] = {
    "sharpness": sharpness,
    "brightness": brightness,
    "motion": motion,
    "text_share": text_share,
    "phash": phash,
}
"""Built-in scorers by column name."""


# Scores clips with built-in scorers and plug-ins, each of which fills a column.
#
# A plug-in is an entry point of the group `GROUP`, named like its column, that refers to a function
# of `Samples` returning a number, text, or None. All scorers share one decoding.


GROUP = "gulliver.scorers"
"""Entry point group of plug-ins."""
Scorer = Callable[[Samples], Any]


@dataclass(frozen=True)
class Scored:
    """A table with scores."""

    # The table; missing scores are null.
    table: Table
    # Name and reason of each file with missing or partial scores.
    broken: list[tuple[str, str]]
    fresh: int
    # Number of rows with all requested scores.
    whole: int


def find_scorers(names: Sequence[str]) -> dict[str, Scorer]:
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
        raise GulliverError(f"no scorer is selected: {nearest('', [*IN_THE_BOX, *plugged])}")
    return found


def _loaded(point: EntryPoint) -> Scorer:
    where = f"scorer {point.name!r} of {point.dist.name if point.dist else point.value}"
    if point.name in IN_THE_BOX or point.name in ("path", "num_frames", "height", "width", "fps"):
        raise GulliverError(f"{where} has the name of another scorer; rename its entry point")
    try:
        function = point.load()
    except Exception as error:
        raise GulliverError(f"{where} cannot be imported: {_one_line(error)}") from error
    return function


def score(
    table: Table,
    names: Sequence[str] = tuple(IN_THE_BOX),
    out: Path | None = None,
    again: bool = False,
    workers: int = 0,
) -> Scored:
    """Writes a table with a column per scorer; rows with existing scores are skipped.

    Args:
        table: table of clips.
        names: scorers.
        out: table to write; None: the input table.
        again: whether to recompute existing scores.
        workers: threads; 0 uses one per core.

    Raises:
        GulliverError: a scorer is unknown.
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
    """Scores a clip; an error of one scorer is recorded, and the others are kept."""
    samples = take_samples(path)
    values: dict[str, Any] = {}
    problems = [] if samples.problem is None else [f"only a part was scored: {samples.problem}"]
    for name, scorer in scorers.items():
        try:
            values[name] = _plain(name, scorer(samples))
        except Exception as error:
            problems.append(f"{name}: {_one_line(error)}")
    return FileOutcome(values, "; ".join(problems) or None)


def _plain(name: str, value: Any) -> Any:
    """Converts a score to a plain number or text; NaN becomes None."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, float | int | str | None):
        raise GulliverError(f"returns {type(value).__name__}; return a number, text or None")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _one_line(error: BaseException) -> str:
    kind = "" if isinstance(error, GulliverError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
