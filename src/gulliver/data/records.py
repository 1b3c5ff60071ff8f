"""Reads CSV and Parquet tables of clips; errors name the file and row.

Captions split at an unquoted comma, or an open quote that spans several rows, would go unnoticed in
training; so rows must match the header, and numbers must be valid.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, check_known, missing_extra
from gulliver.io.files import named_errors
from gulliver.options import Range

NUMBERS = ("num_frames", "height", "width", "fps")  # columns that make opening a file unnecessary
FPS = Range(0.1, 1000)

_MEDIA = ".mp4 .m4v .mov .mkv .webm .avi .gif .png .jpg .jpeg .webp .bmp"
MEDIA = frozenset(_MEDIA.split())  # suffixes of videos and images in a folder

Record = dict[str, Any]


def read_records(table: Path) -> list[Record]:
    """Reads the rows of a .csv or .parquet file with columns `path` and `text`."""
    # In a folder, each video and image is a row, with its file name as text. Cells of the columns
    # `NUMBERS` and `SCORES` become floats, or None if they are empty.
    if table.is_dir():
        return _files_of(table)
    if not table.is_file():
        raise GulliverError(f"table {table} does not exist")
    if table.suffix == ".csv":
        found, columns = _read_csv(table)
    elif table.suffix == ".parquet":
        found, columns = _read_parquet(table)
    else:
        raise GulliverError(f"table {table.name} must end in .csv or .parquet")
    for needed in ("path", "text"):
        if needed not in columns:
            raise GulliverError(
                f"table {table.name} has no column {needed!r} (it has: {', '.join(columns)})"
                if columns
                else f"table {table.name} is empty"
            )
    return [{**record, **_numbers(where, record)} for where, record in found]


def _files_of(folder: Path) -> list[Record]:
    """Lists the videos and images in a folder, recursively, as rows."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in MEDIA)
    if not files:
        raise GulliverError(
            f"folder {folder} contains no video or image ({' '.join(sorted(MEDIA))})"
        )
    return [
        {"path": str(path.relative_to(folder)), "text": re.sub("[_-]+", " ", path.stem)}
        | dict.fromkeys(NUMBERS + SCORES)
        for path in files
    ]


def read_utf8(path: Path) -> str:
    """Reads a UTF-8 file without its byte order mark."""
    with named_errors(path, "read"):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise GulliverError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8 (at byte "
            f"{error.start} of the file): save the file as UTF-8"
        ) from None


def _read_csv(table: Path) -> tuple[list[tuple[str, Record]], list[str]]:
    """Returns each row with its file and line; also returns the columns."""
    reader = csv.reader(io.StringIO(read_utf8(table), newline=""), strict=True)
    columns: list[str] = []
    records, before = [], 0
    try:
        for cells in reader:
            line, before = before + 1, reader.line_num
            where = f"{table}, line {line}"
            if before != line:
                # Captions may have line breaks, but so do rows swallowed by a stray quote.
                raise GulliverError(
                    f"{where}: a quoted field continues to line {before}: close the quote, and "
                    "write captions on one line"
                )
            if cells and not columns:
                columns = _checked_columns(table, cells)
            elif cells:
                records.append((where, _fitted(where, cells, columns)))
    except csv.Error as error:
        open_quote = ": is a quote left open?" if reader.line_num > before + 1 else ""
        raise GulliverError(f"{table}, line {before + 1}: {error}{open_quote}") from None
    return records, columns


def _fitted(where: str, cells: list[str], columns: list[str]) -> Record:
    """Returns the cells by column; missing cells at the end are empty."""
    if len(cells) > len(columns):
        raise GulliverError(
            f"{where}: the row has {len(cells)} fields but the header has {len(columns)}: quote "
            "captions with commas"
        )
    return dict(zip(columns, cells + [""] * (len(columns) - len(cells)), strict=True))


def _checked_columns(table: Path, columns: list[str]) -> list[str]:
    twice = [name for name, count in Counter(columns).items() if count > 1 and name]
    if twice:
        raise GulliverError(f"{table} has two columns {twice[0]!r}; remove one of them")
    return columns


def _read_parquet(table: Path) -> tuple[list[tuple[str, Record]], list[str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("Parquet tables need pyarrow", "video") from None
    try:
        content = parquet.read_table(table)
    except pyarrow.ArrowInvalid as error:
        raise GulliverError(f"{table} is not a readable Parquet file: {error}") from error
    columns = _checked_columns(table, content.column_names)
    rows = enumerate(content.to_pylist(), 1)
    return [(f"{table}, row {number}", record) for number, record in rows], columns


def _numbers(where: str, record: Record) -> dict[str, float | None]:
    return {name: _number(where, name, record.get(name)) for name in NUMBERS + SCORES}


def _number(where: str, column: str, cell: object) -> float | None:
    """Returns the number in a cell; None if it is empty, which pandas reads as NaN."""
    text = "" if cell is None else str(cell).strip()
    if not text or (isinstance(cell, float) and math.isnan(cell)):
        return None
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise GulliverError(
            f"{where}: {column} is {text!r}, which is not a number: leave the cell empty to have "
            "it read from the file"
        ) from None
    if column == "fps" and value not in FPS:
        raise GulliverError(
            f"{where}: fps is {text}, but must be {FPS}: leave the cell empty to have it read from "
            "the file"
        )
    if math.isinf(value):
        raise GulliverError(f"{where}: {column} is {text}: leave the cell empty if unknown")
    return None if math.isnan(value) else value


# Score conditioning: a clip's scores are added to its caption, in the words of a version.
#
# A model trained on scores can be prompted for good ones. The columns are those of the public
# tools: `aes` (aesthetic score), `flow` (motion), `cmotion` (camera motion), and `motion_score` (1
# to 7, of 2.0). An empty or NaN cell adds nothing.
#
# Source: Open-Sora 1.2 (numbers), 1.3 (words), 2.0 (motion score).


SCORES = ("aes", "flow", "motion_score")  # columns of scores that can be added to captions
AESTHETICS = (
    *((4.0, "terrible"), (4.5, "very poor"), (5.0, "poor"), (5.5, "fair"), (6.0, "good")),
    *((6.5, "very good"), (math.inf, "excellent")),
)
"""Open-Sora 1.3's words for aesthetic scores, each with an exclusive upper bound of the score."""
MOTIONS = (
    *((0.5, "very low"), (2.0, "low"), (5.0, "fair"), (10.0, "high"), (20.0, "very high")),
    (math.inf, "extremely high"),
)
Values = Mapping[str, object]


def _word(value: float, words: tuple[tuple[float, str], ...]) -> str:
    return next(word for bound, word in words if value < bound or bound == math.inf)


def _is_set(value: object) -> bool:
    """Whether a cell has a value: not None, "" or NaN."""
    if isinstance(value, Real):
        return not math.isnan(value)
    return bool(str(value or "").strip())


def _score(values: Values, column: str) -> float | None:
    value = values.get(column)
    return float(value) if isinstance(value, Real) and _is_set(value) else None


def _camera(text: str, values: Values) -> list[str]:
    camera = values.get("cmotion")
    if not _is_set(camera) or "camera motion:" in text:
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
    # The caption must end before the added sentences; without any it is unchanged.
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
"""Functions that add scores to a caption, by the version of Open-Sora that defines them."""
COLUMNS = {"1.2": ("aes", "flow", "cmotion"), "1.3": ("aes", "flow", "cmotion")} | {
    "2.0": ("motion_score",)
}


def with_scores(text: str, values: Values, style: str) -> str:
    """Adds a clip's scores to its caption, unless it contains them already."""
    check_known("style of scores", style, STYLES)
    return STYLES[style](text, values)


def check_scores(table: object, records: Sequence[Values], style: str) -> None:
    check_known("style of scores", style, STYLES)
    columns = COLUMNS.get(style, ())
    if not columns or any(_is_set(row.get(column)) for row in records for column in columns):
        return
    phrases = dict.fromkeys(name for row in records for name in row if _is_set(row[name]))
    raise GulliverError(
        f"style {style} needs scores in the columns {', '.join(columns)}, but no row of {table} "
        f"has one (columns with values: {', '.join(phrases) or 'none'})"
    )
