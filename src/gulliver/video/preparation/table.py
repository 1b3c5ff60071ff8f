"""Tables of clips: Parquet or CSV, with the columns of Open-Sora's tools, held in PyArrow.

A `Table` is read and written as a whole. Unknown columns are preserved: CSV columns are typed only
if their text round-trips exactly. Empty cells are null, and so is NaN in numeric columns. Paths of
clips are relative to the table's folder, as in training, and are adjusted if a table is written to
another folder. Does not import torch.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.io.files import atomic_file, named_errors, write_text

WHOLE = ("num_frames", "height", "width", "resolution")
REAL = ("aspect_ratio", "fps", "aes", "flow", "match")
TEXTS = ("path", "text", "cmotion")
OURS = ("duration", "rotation", "bytes", "sharpness", "brightness", "motion", "text_share")
"""Numeric columns written by other steps: typed for any spelling, if all cells are numbers."""
COLUMNS = ("path", "text", *WHOLE[:3], "aspect_ratio", "resolution", "fps", *REAL[2:], "cmotion")
"""Columns of Open-Sora's tables; aspect_ratio is height / width, resolution is height x width."""


Stamp = tuple[int, int, int]


def arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise missing_extra("tables need pyarrow", "data") from None
    return pyarrow


@dataclass(frozen=True)
class Table:
    """Clips, one per row.

    Attributes:
        data: the columns, a `pyarrow.Table`.
        path: file that they were read from or written to; clips are relative to its folder.
        stamp: the file's state when it was read or written; None if it did not exist.
    """

    data: Any
    path: Path
    stamp: Stamp | None = None

    @classmethod
    def read(cls, path: Path) -> Table:
        """Reads a .parquet or .csv file.

        Raises:
            GulliverError: the file is missing or unreadable, lacks a column `path`, has a duplicate
                column, or non-numeric values in a numeric column.
        """
        path = Path(path)
        if path.is_dir():
            raise GulliverError(
                f"{path} is a folder; create a table of its clips with `gulliver data scan {path}`"
            )
        if not path.is_file():
            raise GulliverError(f"table {path} does not exist")
        check_suffix(path)
        stamp = stamp_of(path)
        data = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
        table = cls(without_nan(data), path, stamp)
        table.require("path")
        return table

    @classmethod
    def of_rows(
        cls,
        rows: Iterable[dict[str, Any]],
        path: Path,
        names: Sequence[str],
        stamp: Stamp | None = None,
    ) -> Table:
        """Creates a table from rows, which may lack cells; `names` are the columns, in order."""
        pa, rows = arrow(), list(rows)
        cells = {name: [row.get(name) for row in rows] for name in names}
        data = {name: pa.array(values, _kind_of(name, values)) for name, values in cells.items()}
        return cls(pa.table(data), Path(path), stamp)

    @property
    def names(self) -> list[str]:
        return self.data.column_names

    def __len__(self) -> int:
        return self.data.num_rows

    def require(self, *names: str) -> None:
        """Raises an error for a missing column; it suggests the most similar one."""
        for name in names:
            if name not in self.names:
                raise GulliverError(
                    f"table {self.path.name} has no column {name!r}: {nearest(name, self.names)}"
                )

    def column(self, name: str) -> list[Any]:
        """Returns a column as Python values; empty cells are None."""
        self.require(name)
        return self.data.column(name).to_pylist()

    def clips(self) -> list[tuple[str, Path]]:
        return [(name or "", self.path.parent / (name or "")) for name in self.column("path")]

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        data, pa = self.data, arrow()
        for name, values in columns.items():
            try:
                array = pa.array(values, _kind_of(name, values))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise GulliverError(
                    f"column {name!r} of {self.path.name} would have values of several types: "
                    f"{_line(error)}; use --again to recompute all"
                ) from error
            place = self.names.index(name) if name in self.names else None
            data = (
                data.append_column(name, array)
                if place is None
                else data.set_column(place, name, array)
            )
        return replace(self, data=data)

    def rows(self, which: Any) -> Table:
        """Selects rows by a boolean mask or by indices, keeping their order."""
        pa = arrow()
        if not len(which):
            # An empty list has no type to index with.
            return replace(self, data=self.data.slice(0, 0))
        array = pa.array(which)
        data = self.data.filter(array) if pa.types.is_boolean(array.type) else self.data.take(array)
        return replace(self, data=data)

    def write(self, path: Path | None = None) -> Table:
        """Writes the table atomically in the format of the suffix; None replaces the input file.

        Returns the written table: relative paths differ in another folder. Raises an error if the
        file has changed since it was read.
        """
        path = Path(path or self.path)
        check_suffix(path)
        self._refuse_changed(path)
        moved = self._moved(path)
        pa = arrow()
        with atomic_file(path) as partial:
            try:
                _write(moved.data, partial, path.suffix)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise GulliverError(f"{path} cannot hold the table: {_line(error)}") from error
        return replace(moved, stamp=stamp_of(path))

    def _refuse_changed(self, path: Path) -> None:
        same = path.absolute() == self.path.absolute()
        if same and self.stamp is not None and stamp_of(path) not in (None, self.stamp):
            raise GulliverError(
                f"{path} was changed by hand or by another step since it was read, and is not "
                "replaced; results are kept; run the same command to continue"
            )

    def _moved(self, path: Path) -> Table:
        here, there = self.path.absolute().parent, path.absolute().parent
        if here == there:
            return replace(self, path=path)
        names = [
            name if not name or os.path.isabs(name) else os.path.relpath(here / name, there)
            for name in self.column("path")
        ]
        return replace(self.with_columns({"path": names}), path=path)


def stamp_of(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_suffix(path: Path) -> None:
    """Raises an error for a name without a Parquet or CSV suffix, or if PyArrow is missing."""
    arrow()
    if path.suffix not in (".parquet", ".csv"):
        raise GulliverError(f"table {path.name} must end in .parquet or .csv")


def check_other(out: Path, table: Path) -> None:
    """Raises an error if a step's output would replace its input."""
    check_suffix(out)
    if out.absolute() == table.absolute():
        raise GulliverError(
            f"--out {out} is the input table, which would lose rows; choose another file"
        )


def broken_path(table: Path) -> Path:
    return table.with_name(f"{table.stem}.broken.csv")


def write_broken(table: Path, step: str, broken: Sequence[tuple[str, str]]) -> Path | None:
    """Lists a step's unusable files next to a table; entries of other steps are kept."""
    path = broken_path(table)
    rows = [row for row in read_broken(table) if row[1] != step]
    rows += [(name, step, reason) for name, reason in broken]
    if not rows:
        path.unlink(missing_ok=True)
        return None
    return write_list(path, ("path", "step", "reason"), rows)


def write_list(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_text(path, text.getvalue())
    return path


def read_broken(table: Path) -> list[tuple[str, str, str]]:
    path = broken_path(table)
    if not path.is_file():
        return []
    with named_errors(path, "read"), path.open(encoding="utf-8", newline="") as file:
        _, *rows = [*csv.reader(file)] or [[]]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def _kind_of(name: str, values: Sequence[Any]) -> Any:
    """Selects the type of a column; None lets PyArrow infer it."""
    pa = arrow()
    if name in WHOLE:
        return pa.int64()
    if name in REAL:
        return pa.float64()
    if name in TEXTS or all(value is None for value in values):
        return pa.string()
    return None


def _write(data: Any, path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(data, path)
        return
    from pyarrow import csv as arrow_csv

    pa = arrow()
    if "text" in data.column_names:
        # A caption is one line in CSV: a multi-line row is probably an unclosed quote.
        place = data.column_names.index("text")
        text = data.column("text").cast(pa.string())
        flat = pa.compute.replace_substring_regex(text, r"\s*[\r\n]+\s*", " ")
        data = data.set_column(place, "text", flat)
    arrow_csv.write_csv(data, path, arrow_csv.WriteOptions(quoting_style="needed"))


def without_nan(data: Any) -> Any:
    """Converts NaN to null, as pandas does: DuckDB orders NaN above all numbers."""
    pa = arrow()
    for place, (name, column) in enumerate(zip(data.column_names, data.columns, strict=True)):
        if pa.types.is_floating(column.type):
            nan = pa.compute.is_nan(column)
            if pa.compute.any(nan).as_py():
                column = pa.compute.if_else(nan, pa.scalar(None, column.type), column)
                data = data.set_column(place, name, column)
    return data


def _read_parquet(path: Path) -> Any:
    pa = arrow()
    from pyarrow import parquet

    try:
        with named_errors(path, "read"):
            data = parquet.ParquetFile(path).read()
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise GulliverError(f"{path} is not a readable Parquet file: {_line(error)}") from error
    _check_names(path, data.column_names)
    return data


def _read_csv(path: Path) -> Any:
    pa = arrow()
    from pyarrow import csv as arrow_csv

    names = _header(path)
    strings = arrow_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
    )
    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    try:
        with named_errors(path, "read"):
            data = arrow_csv.read_csv(path, parse_options=parse, convert_options=strings)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise GulliverError(
            f"{path}: {_line(error)}; a caption with a comma or a quote must be quoted"
        ) from error
    columns = {name: _typed(path, name, data.column(name)) for name in names}
    return pa.table(columns)


def _header(path: Path) -> list[str]:
    try:
        with named_errors(path, "read"), path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise GulliverError(f"{path} is not a CSV table in UTF-8: {error}") from None
    if not names:
        raise GulliverError(f"table {path.name} is empty")
    _check_names(path, names)
    return names


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise GulliverError(f"{path} has two columns {twice[0]!r}; remove one of them")


def _typed(path: Path, name: str, column: Any) -> Any:
    pa = arrow()
    goes_on = pa.compute.index(pa.compute.match_substring_regex(column, r"[\r\n]"), True).as_py()
    if goes_on >= 0:
        raise GulliverError(
            f"{path}, row {goes_on + 1}: {name} spans several lines; close its quote, or write the "
            "caption on one line"
        )
    known = name in WHOLE or name in REAL
    if name in TEXTS or (column.null_count == len(column) and not known):
        return column
    trimmed = pa.compute.utf8_trim_whitespace(column) if known else column
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        try:
            cast = trimmed.cast(kind)
        except pa.ArrowInvalid:
            continue
        # 007, 1e5, 1.10 and TRUE may be names: they would not round-trip.
        if known or name in OURS or _round_trips(cast, column):
            return cast
    return _fractions(path, name, column) if known else column


def _round_trips(cast: Any, text: Any) -> bool:
    """Whether a typed column round-trips to its text; False if it has nan, which may be a word."""
    pa = arrow()
    finite = pa.types.is_boolean(cast.type) or pa.compute.all(pa.compute.is_finite(cast)).as_py()
    return finite is not False and cast.cast(pa.string()).equals(text)


def _fractions(path: Path, name: str, column: Any) -> Any:
    """Parses numbers, some of which may be fractions such as 30000/1001."""
    values: list[float | None] = []
    for row, cell in enumerate(column.to_pylist(), 1):
        try:
            fraction = cell is not None and "/" in cell
            number = float(Fraction(cell) if fraction else cell) if cell else None
        except (ValueError, ZeroDivisionError, OverflowError):
            raise GulliverError(
                f"{path}, row {row}: {name} is {cell!r}, which is not a number; leave the cell "
                "empty if it is unknown"
            ) from None
        values.append(number)
    return arrow().chunked_array([arrow().array(values, arrow().float64())])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
