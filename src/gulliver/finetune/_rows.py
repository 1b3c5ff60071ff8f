"""Rows of files: JSON Lines, JSON, Parquet, CSV, TSV and plain text, and where each stands.

Files come from many hands: a byte order mark, CRLF, blank lines, a line that was cut off, bytes
that are no UTF-8. What cannot be read is a `BadRow` with its file and line, never an exception
halfway: the caller counts them, and says whether they may be left out. A file that is lost as a
whole (a list that was cut off, UTF-16) is refused. Nothing here knows what a row means.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra
from gulliver.io import named_errors

MARK, WIDE_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
"""What files of UTF-8, and of UTF-16 and UTF-32, may begin with."""
PARQUET_ROWS = 1024
"""Rows that are taken from a Parquet file at a time."""
LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """A row of a file: values by column, and its file and line."""

    values: dict[str, Any]
    source: str


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why: a reason to count by, and after a colon what it met."""

    source: str
    why: str

    @property
    def reason(self) -> str:
        """Reason without what is particular to this row."""
        return self.why.partition(": ")[0]

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


Rows = Iterator[Row | BadRow]


def read_rows(paths: Iterable[Path]) -> Rows:
    """Yields the rows of files, one after the other, in the order of the files.

    Args:
        paths: files, or folders whose files are read in the order of their names. What no suffix
            of `READERS` says is a text, and one row with the column ``text``.

    Raises:
        GulliverError: a path does not exist or cannot be opened, a folder has no files, a table has
            no usable header, or a file of rows has another encoding or was cut off.
    """
    for path in paths:
        for file in _files(Path(path)):
            with named_errors(file, "read"):
                reader = READERS.get(file.suffix.lower(), _text)
                if reader not in (_text, _parquet):
                    _check_encoding(file)
                yield from reader(file)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise GulliverError(f"{path} does not exist")
    if not path.is_dir():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not _is_hidden(file.relative_to(path))
    ]
    if not found:
        raise GulliverError(f"folder {path} has no files to learn from")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _check_encoding(file: Path) -> None:
    """Refuses a file of another encoding: none of its lines could be read."""
    with file.open("rb") as opened:
        if opened.read(2) in WIDE_MARKS:
            raise GulliverError(
                f"{file} is UTF-16 or UTF-32, as its first bytes say: save it as UTF-8"
            )


def _decoded(content: bytes, source: str) -> str | BadRow:
    """The text of bytes, without a byte order mark."""
    if b"\0" in content:
        return BadRow(source, f"a NUL byte: at byte {content.index(0)}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(source, f"no UTF-8: 0x{content[error.start]:02x} at byte {error.start}")


def _text(file: Path) -> Rows:
    text = _decoded(file.read_bytes(), str(file))
    # As Python reads text: what ends lines elsewhere is no part of what is learnt.
    yield text if isinstance(text, BadRow) else Row({"text": _lines(text)}, str(file))


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_lines(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            source = f"{file}:{number}"
            text = _decoded(line, source)
            if isinstance(text, BadRow):
                yield text
            elif text.strip():
                yield _object(text, source)


def _object(text: str, source: str) -> Row | BadRow:
    try:
        return _row(json.loads(text), source)
    except (ValueError, RecursionError) as error:
        return BadRow(source, f"no JSON: {error}")


def _row(value: Any, source: str) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, source)
    return BadRow(source, f"no JSON object: a {type(value).__name__}")


def _json(file: Path) -> Rows:
    """A list of objects, or JSON Lines under another name."""
    with file.open("rb") as opened:
        start = opened.read(64).removeprefix(MARK).lstrip()
    if not start.startswith(b"["):
        _check_lines(file)
        yield from _json_lines(file)
        return
    text = _decoded(file.read_bytes(), str(file))
    if isinstance(text, BadRow):
        raise GulliverError(f"{text}: a list is read whole, so mend it or give JSON Lines")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GulliverError(f"{file} is no JSON list, or was cut off: {error}") from None
    for number, value in enumerate(values, 1):
        yield _row(value, f"{file}#{number}")


def _check_lines(file: Path) -> None:
    """Refuses a file that is a single object over several lines."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.removeprefix(MARK).strip()), b"")
    if not _is_json(first) and _is_json(file.read_bytes()):
        raise GulliverError(
            f"{file} is a single JSON object over several lines: give a list of objects, or an "
            "object a line"
        )


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content.removeprefix(MARK))
    except (ValueError, RecursionError):
        return False
    return True


def _table(delimiter: str) -> Callable[[Path], Rows]:
    """Reads a table with a header; quoted fields may have line breaks, as texts do."""

    def read(file: Path) -> Rows:
        text = _decoded(file.read_bytes(), str(file))
        if isinstance(text, BadRow):
            raise GulliverError(f"{text}: save the table as UTF-8")
        # The module's own bound is meant for cells, not for texts.
        csv.field_size_limit(LONGEST_FIELD)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        columns: list[str] = []
        while True:
            source = f"{file}:{reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                lost = f"{error}, in lines up to {reader.line_num}: is a quote left open?"
                yield BadRow(source, f"no row of a table: {lost}")
                continue
            if not cells:
                continue
            if not columns:
                columns = _header(file, cells)
            elif len(cells) == len(columns):
                values = {name: _lines(cell) for name, cell in zip(columns, cells, strict=True)}
                yield Row(values, source)
            else:
                yield BadRow(
                    source, f"another number of fields: {len(cells)}, the header has {len(columns)}"
                )

    return read


def _header(file: Path, columns: list[str]) -> list[str]:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise GulliverError(f"{file} has the column {twice[0]!r} twice: leave one of them out")
    return columns


def _parquet(file: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("Parquet files need pyarrow", "finetune") from None
    try:
        opened = parquet.ParquetFile(file)
        _header(file, opened.schema_arrow.names)
        number = 0
        for batch in opened.iter_batches(PARQUET_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{file}#{number}")
    except pyarrow.ArrowException as error:
        raise GulliverError(f"{file} is no readable Parquet file: {error}") from error


READERS: dict[str, Callable[[Path], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), _json_lines),
    ".json": _json,
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".parquet": _parquet,
}
"""Suffix of a file to what reads it."""
