"""Score conditioning: what a clip's scores say is put into its caption, in the words of a version.

A model that has read scores in training can be asked for good ones. The columns are those of the
public tools: `aes` (aesthetic score), `flow` (motion), `cmotion` (camera motion), and
`motion_score` (1 to 7, of 2.0). A cell that is empty says nothing.

Source: Open-Sora 1.2 (numbers), 1.3 (words), 2.0 (motion score).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gulliver.errors import GulliverError, nearest

SCORES = ("aes", "flow", "motion_score")
"""Columns of numbers that captions are extended by."""
AESTHETICS = (
    *((4.0, "terrible"), (4.5, "very poor"), (5.0, "poor"), (5.5, "fair"), (6.0, "good")),
    *((6.5, "very good"), (math.inf, "excellent")),
)
"""Words of 1.3 for aesthetic scores below a bound."""
MOTIONS = (
    *((0.5, "very low"), (2.0, "low"), (5.0, "fair"), (10.0, "high"), (20.0, "very high")),
    (math.inf, "extremely high"),
)
Values = Mapping[str, object]


def _word(value: float, words: tuple[tuple[float, str], ...]) -> str:
    return next(word for bound, word in words if value < bound or bound == math.inf)


def _number(values: Values, column: str) -> float | None:
    value = values.get(column)
    return value if isinstance(value, float) else None


def _camera(text: str, values: Values) -> str:
    camera = str(values.get("cmotion") or "").strip()
    if not camera or "camera motion:" in text:
        return text
    return f"{text} camera motion: {camera}."


def _as_numbers(text: str, values: Values) -> str:
    for column, name in (("aes", "aesthetic score"), ("flow", "motion score")):
        value = _number(values, column)
        if value is not None and f"{name}:" not in text:
            text = f"{text} {name}: {value:.1f}."
    return _camera(text, values)


def _as_words(text: str, values: Values) -> str:
    told = (("aes", "aesthetic score", AESTHETICS), ("flow", "motion strength", MOTIONS))
    text = text if text.endswith(".") else f"{text}."
    for column, name, words in told:
        value = _number(values, column)
        if value is not None and f"{name} is" not in text:
            text = f"{text} The {name} is {_word(value, words)}."
    return _camera(text, values)


def _as_motion_score(text: str, values: Values) -> str:
    value = _number(values, "motion_score")
    known = value is None or "motion score." in text
    return text if known else f"{text} {value:g} motion score."


STYLES: dict[str, Callable[[str, Values], str]] = {
    "none": lambda text, values: text,
    "1.2": _as_numbers,
    "1.3": _as_words,
    "2.0": _as_motion_score,
}
"""Ways to put scores into a caption: none, and those of Open-Sora's versions."""


def with_scores(text: str, values: Values, style: str) -> str:
    """Adds a clip's scores to its caption, unless they are there.

    Args:
        text: caption.
        values: scores by column; floats, and text for `cmotion`.
        style: name of `STYLES`.

    Raises:
        GulliverError: an unknown style.
    """
    if style not in STYLES:
        raise GulliverError(f"unknown style of scores {style!r}: {nearest(style, STYLES)}")
    return STYLES[style](text, values)
