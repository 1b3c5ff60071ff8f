"""Rows of a table for which a condition holds, such as ``fps >= 12 and motion > 2``: by DuckDB."""

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
    """Rows that are kept, and how many were not."""

    # Rows for which the condition holds.
    table: Table
    # Number of rows for which it does not.
    dropped: int
    # Number of rows for which nobody knows, as a cell is empty; they are not kept.
    unknown: int


def filter_table(table: Table, condition: str) -> Filtered:
    """Takes the rows for which a condition over columns holds.

    Args:
        table: table of clips.
        condition: expression of SQL; text stands in single quotes.

    Raises:
        GulliverError: it is no condition, holds a statement, or names a column that there is not.
    """
    import numpy as np

    try:
        import duckdb
    except ImportError:
        raise missing_extra("filtering needs DuckDB", "data") from None
    try:
        # An expression and nothing else: DuckDB's parser refuses whatever is more than one.
        holds = duckdb.SQLExpression(condition).alias("kept")
    except duckdb.Error as error:
        raise GulliverError(
            f"{condition!r} is no condition: {_line(error)}; give {SHAPE}"
        ) from None
    # The condition may be copied from somewhere: it runs in a database in memory that may not
    # touch the outside.
    with duckdb.connect(config={"enable_external_access": "false"}) as database:
        # To DuckDB NaN is larger than all numbers: a division by zero is to be unknown instead.
        database.execute("SET ieee_floating_point_ops = false")
        with suppress(duckdb.CatalogException):  # a setting that newer versions have
            database.execute("SET error_on_division_by_zero = false")
        data = _compared(table)
        try:
            clips = database.from_arrow(data).set_alias("clips")
            found = clips.select(holds).fetchnumpy()["kept"]
        except duckdb.Error as error:
            hint = _texts_of(data, condition)
            if '"' in condition:
                hint = " (text stands in single quotes)"
            raise GulliverError(
                f"{condition!r} cannot be worked out: {_line(error)}{hint}"
            ) from None
    if len(found) != len(table):
        raise GulliverError(f"{condition!r} is not of each row by itself: give {SHAPE}")
    if found.dtype != bool:
        raise GulliverError(f"{condition!r} gives {found.dtype}, not true or false: give {SHAPE}")
    unknown = np.ma.getmaskarray(found)
    kept = np.ma.filled(found, False)
    return Filtered(table.rows(kept), int((~kept & ~unknown).sum()), int(unknown.sum()))


def _compared(table: Table) -> Any:
    """Takes columns as they are compared."""
    # Text of a CSV file is compared as numbers where each cell is spelt as Python spells its
    # number: then no two of them are one, and no text means a number that it does not say.
    import pyarrow as pa

    data = without_nan(table.data)
    for place, (name, column) in enumerate(zip(data.column_names, data.columns, strict=True)):
        if table.path.suffix == ".csv" and name not in TEXTS and pa.types.is_string(column.type):
            numbers = _numbers(column.to_pylist())
            if numbers is not None:
                data = data.set_column(place, name, pa.array(numbers, pa.float64()))
    return data


def _numbers(cells: list[str | None]) -> list[float | None] | None:
    """Returns the numbers that cells are; None where one is spelt in another way."""
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
    """Says which columns of a condition are text, where that may be why it fails."""
    texts = [field.name for field in data.schema if str(field.type) in ("string", "large_string")]
    named = [name for name in texts if re.search(rf"\b{re.escape(name)}\b", condition)]
    if not named:
        return ""
    return f" ({', '.join(named)} is text, as numbers it is cast({named[0]} as double))"


def _line(error: BaseException) -> str:
    """Says an error in one line."""
    return " ".join(str(error).split())


def filter_file(path: Path, condition: str, out: Path) -> Filtered:
    """Filters the table of a file into another."""
    check_other(out, path)
    with held_table(out, "filter"):
        found = filter_table(Table.read(path), condition)
        return Filtered(found.table.write(out), found.dropped, found.unknown)
