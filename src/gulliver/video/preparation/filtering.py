"""Filters table rows by a condition such as ``fps >= 12 and motion > 2``, using DuckDB."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra
from gulliver.video.preparation.table import TEXTS, Table, check_other, without_nan
from gulliver.video.preparation.work import held_table

SHAPE = "a condition over columns, such as 'fps >= 12 and motion > 2'"


@dataclass(frozen=True)
class Filtered:
    """Remaining rows, and counts of the others."""

    # Rows that satisfy the condition.
    table: Table
    # Number of rows that do not satisfy it.
    dropped: int
    # Number of rows with an unknown result because of an empty cell; they are removed.
    unknown: int


def filter_table(table: Table, condition: str) -> Filtered:
    """Returns the rows that satisfy a condition over columns.

    Args:
        table: table of clips.
        condition: SQL expression; text is in single quotes.

    Raises:
        GulliverError: it is not a condition, contains a statement, or names an unknown column.
    """
    import numpy as np

    try:
        import duckdb
    except ImportError:
        raise missing_extra("filtering needs DuckDB", "data") from None
    try:
        # A single expression: DuckDB's parser rejects anything else.
        holds = duckdb.SQLExpression(condition).alias("kept")
    except duckdb.Error as error:
        raise GulliverError(
            f"{condition!r} is not a condition: {_line(error)}; use {SHAPE}"
        ) from None
    # The condition may be untrusted: it runs in an in-memory database without external access.
    with duckdb.connect(config={"enable_external_access": "false"}) as database:
        # DuckDB orders NaN above all numbers; a division by zero must be unknown instead.
        database.execute("SET ieee_floating_point_ops = false")
        with suppress(duckdb.CatalogException):  # only newer versions have this setting
            database.execute("SET error_on_division_by_zero = false")
        data = _compared(table)
        try:
            clips = database.from_arrow(data).set_alias("clips")
            found = clips.select(holds).fetchnumpy()["kept"]
        except duckdb.Error as error:
            hint = _texts_of(data, condition)
            if '"' in condition:
                hint = " (put text in single quotes)"
            raise GulliverError(
                f"{condition!r} cannot be evaluated: {_line(error)}{hint}"
            ) from None
    if len(found) != len(table):
        raise GulliverError(f"{condition!r} does not return one value per row; use {SHAPE}")
    if found.dtype != bool:
        raise GulliverError(f"{condition!r} returns {found.dtype}, not true or false; use {SHAPE}")
    unknown = np.ma.getmaskarray(found)
    kept = np.ma.filled(found, False)
    return Filtered(table.rows(kept), int((~kept & ~unknown).sum()), int(unknown.sum()))


def _compared(table: Table) -> Any:
    # CSV text is compared as numbers only if each cell is written as Python prints its number: then
    # different texts are different numbers.
    import pyarrow as pa

    data = without_nan(table.data)
    for place, (name, column) in enumerate(zip(data.column_names, data.columns, strict=True)):
        if table.path.suffix == ".csv" and name not in TEXTS and pa.types.is_string(column.type):
            numbers = _numbers(column.to_pylist())
            if numbers is not None:
                data = data.set_column(place, name, pa.array(numbers, pa.float64()))
    return data


def _numbers(cells: list[str | None]) -> list[float | None] | None:
    """Parses text cells as numbers; None if a cell differs from Python's notation of its number."""
    found: list[float | None] = []
    for cell in cells:
        try:
            number = None if cell is None else float(cell)
        except ValueError:
            return None
        if number is not None and (repr(number) != cell or not math.isfinite(number)):
            return None
        found.append(number)
    return found


def _texts_of(data: Any, condition: str) -> str:
    """Lists the text columns in a condition, which may be the reason for its failure."""
    texts = [field.name for field in data.schema if str(field.type) in ("string", "large_string")]
    named = [name for name in texts if re.search(rf"\b{re.escape(name)}\b", condition)]
    if not named:
        return ""
    return f" ({', '.join(named)} is text; use cast({named[0]} as double) for numbers)"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def filter_file(path: Path, condition: str, out: Path) -> Filtered:
    check_other(out, path)
    with held_table(out, "filter"):
        found = filter_table(Table.read(path), condition)
        return Filtered(found.table.write(out), found.dropped, found.unknown)
