"""Score conditioning: what a clip's scores say is put into its caption, in the words of a version.

A model that has read scores in training can be asked for good ones. The columns are those of the
public tools: `aes` (aesthetic score), `flow` (motion), `cmotion` (camera motion), and
`motion_score` (1 to 7, of 2.0). A cell that is empty, or NaN, says nothing.

Source: Open-Sora 1.2 (numbers), 1.3 (words), 2.0 (motion score).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real

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


def _is_told(value: object) -> bool:
    """Whether a cell says something: empty ones are None, "" or NaN."""
    if isinstance(value, Real):
        return not math.isnan(value)
    return bool(str(value or "").strip())


def _score(values: Values, column: str) -> float | None:
    value = values.get(column)
    return float(value) if isinstance(value, Real) and _is_told(value) else None


def _camera(text: str, values: Values) -> list[str]:
    camera = values.get("cmotion")
    if not _is_told(camera) or "camera motion:" in text:
        return []
    return [f"camera motion: {str(camera).strip()}."]


def _as_numbers(text: str, values: Values) -> str:
    phrases = []
    for column, name in (("aes", "aesthetic score"), ("flow", "motion score")):
        value = _score(values, column)
        if value is not None and f"{name}:" not in text:
            phrases.append(f"{name}: {value:.1f}.")
    return " ".join([text, *phrases, *_camera(text, values)])


def _as_words(text: str, values: Values) -> str:
    names = (("aes", "aesthetic score", AESTHETICS), ("flow", "motion strength", MOTIONS))
    phrases = []
    for column, name, words in names:
        value = _score(values, column)
        if value is not None and f"{name} is" not in text:
            phrases.append(f"The {name} is {_word(value, words)}.")
    phrases += _camera(text, values)
    # The sentences need an end of the caption before them; without any it stays as it is.
    return " ".join([text if text.endswith(".") or not phrases else f"{text}.", *phrases])


def _as_motion_score(text: str, values: Values) -> str:
    value = _score(values, "motion_score")
    known = value is None or "motion score." in text
    return text if known else f"{text} {value:g} motion score."


STYLES: dict[str, Callable[[str, Values], str]] = {
    "none": lambda text, values: text,
    "1.2": _as_numbers,
    "1.3": _as_words,
    "2.0": _as_motion_score,
}
"""Ways to put scores into a caption: none, and those of Open-Sora's versions."""
COLUMNS = {"1.2": ("aes", "flow", "cmotion"), "1.3": ("aes", "flow", "cmotion")} | {
    "2.0": ("motion_score",)
}
"""Columns that each style reads."""


def with_scores(text: str, values: Values, style: str) -> str:
    """Adds a clip's scores to its caption, unless they are there."""
    _check_style(style)
    return STYLES[style](text, values)


def check_scores(table: object, records: Sequence[Values], style: str) -> None:
    """Refuses a table none of whose rows has a score of a style: captions would stay as they are.

    Args:
        table: name of the table, for the message.
        records: rows of the table.
        style: name of `STYLES`.

    Raises:
        GulliverError: it names the columns that the style reads, and those with values.
    """
    _check_style(style)
    columns = COLUMNS.get(style, ())
    if not columns or any(_is_told(row.get(column)) for row in records for column in columns):
        return
    phrases = dict.fromkeys(name for row in records for name in row if _is_told(row[name]))
    raise GulliverError(
        f"scores in the style of {style} are read from the columns {', '.join(columns)}: no row of "
        f"{table} has one (columns with values: {', '.join(phrases) or 'none'})"
    )


def _check_style(style: str) -> None:
    if style not in STYLES:
        raise GulliverError(f"unknown style of scores {style!r}: {nearest(style, STYLES)}")
