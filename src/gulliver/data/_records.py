"""Rows of CSV and Parquet tables of clips: what is ambiguous in them is refused by file and row.

A caption that an unquoted comma cuts, or a quote that swallows the rows after it, would be trained
on without a word; so rows have to fit the header, and numbers have to be numbers.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

from gulliver.data._scores import SCORES
from gulliver.errors import GulliverError, missing_extra
from gulliver.io import named_errors
from gulliver.options import Range

NUMBERS = ("num_frames", "height", "width", "fps")
"""Columns that spare opening a file."""
FPS = Range(0.1, 1000)

_MEDIA = ".mp4 .m4v .mov .mkv .webm .avi .gif .png .jpg .jpeg .webp .bmp"
MEDIA = frozenset(_MEDIA.split())
"""Suffixes of the files of a folder that are clips or pictures."""

Record = dict[str, Any]


def read_records(table: Path) -> list[Record]:
    """Reads the rows of a .csv or .parquet file that has the columns path and text."""
    # Of a folder each video and picture in it is a row, and its name the text. Cells of the columns
    # `NUMBERS` and `SCORES` become floats, or None where they are empty.
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
    """Makes a row of each video and picture in a folder and its folders."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in MEDIA)
    if not files:
        raise GulliverError(
            f"folder {folder} holds no video or picture ({' '.join(sorted(MEDIA))})"
        )
    return [
        {"path": str(path.relative_to(folder)), "text": re.sub("[_-]+", " ", path.stem)}
        | dict.fromkeys(NUMBERS + SCORES)
        for path in files
    ]


def read_utf8(path: Path) -> str:
    """Reads the text of a file, without the byte order mark that spreadsheets put before it."""
    with named_errors(path, "read"):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise GulliverError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} is no UTF-8 (at byte "
            f"{error.start} of the file): save the file as UTF-8"
        ) from None


def _read_csv(table: Path) -> tuple[list[tuple[str, Record]], list[str]]:
    """Returns each row with its file and line for messages, and the columns."""
    reader = csv.reader(io.StringIO(read_utf8(table), newline=""), strict=True)
    columns: list[str] = []
    records, before = [], 0
    try:
        for cells in reader:
            line, before = before + 1, reader.line_num
            where = f"{table}, line {line}"
            if before != line:
                # Captions may have line breaks, but so do rows that a stray quote has swallowed.
                raise GulliverError(
                    f"{where}: a quoted field goes on to line {before}: is a quote left open? "
                    "Captions are written on one line"
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
    """Returns a row by column; cells that it lacks at its end are empty."""
    if len(cells) > len(columns):
        raise GulliverError(
            f"{where}: the row has {len(cells)} fields where the header has {len(columns)}: put "
            "quotes around a caption that has commas in it"
        )
    return dict(zip(columns, cells + [""] * (len(columns) - len(cells)), strict=True))


def _checked_columns(table: Path, columns: list[str]) -> list[str]:
    twice = [name for name, count in Counter(columns).items() if count > 1 and name]
    if twice:
        raise GulliverError(f"{table} has the column {twice[0]!r} twice: leave one of them out")
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
        raise GulliverError(f"{table} is no readable Parquet file: {error}") from error
    columns = _checked_columns(table, content.column_names)
    rows = enumerate(content.to_pylist(), 1)
    return [(f"{table}, row {number}", record) for number, record in rows], columns


def _numbers(where: str, record: Record) -> dict[str, float | None]:
    return {name: _number(where, name, record.get(name)) for name in NUMBERS + SCORES}


def _number(where: str, column: str, cell: object) -> float | None:
    """Returns the number in a cell; None where it is empty, which is NaN to pandas."""
    text = "" if cell is None else str(cell).strip()
    if not text or (isinstance(cell, float) and math.isnan(cell)):
        return None
    try:
        value = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise GulliverError(
            f"{where}: {column} is {text!r}, which is no number: leave the cell empty to have it "
            "read from the file"
        ) from None
    if column == "fps" and value not in FPS:
        raise GulliverError(
            f"{where}: fps is {text}, it must be {FPS}: leave the cell empty to have it read from "
            "the file"
        )
    if math.isinf(value):
        raise GulliverError(f"{where}: {column} is {text}: leave the cell empty where unknown")
    return None if math.isnan(value) else value
