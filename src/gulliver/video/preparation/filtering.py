"""Rows of a table for which a condition holds, such as ``fps >= 12 and motion > 2``: by DuckDB."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, missing_extra, nearest
from gulliver.video.preparation.table import TEXTS, Table, check_other, without_nan
from gulliver.video.preparation.work import held_table

_PARTS = (
    "BETWEEN CASE CAST COLLATE COLUMN_REF COMPARISON CONJUNCTION CONSTANT FUNCTION OPERATOR TYPE"
)
ALLOWED = frozenset(_PARTS.split())
"""Kinds of parts of a condition, in DuckDB's words."""
SHAPE = "a condition over columns, such as 'fps >= 12 and motion > 2'"


# [Note: a condition, and nothing else] The condition is SQL that a user writes, or copies from
# somewhere, so it is read before it is run: DuckDB's own parser turns ``SELECT (condition) FROM
# clips`` into a tree, which must be one SELECT of one expression whose parts are of the kinds in
# `ALLOWED`. Statements, subqueries and what would read a file have no place in it. It then runs in
# a database in memory that may not touch the outside.
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

    duckdb = _duckdb()
    with duckdb.connect(config={"enable_external_access": "false"}) as database:
        # To DuckDB NaN is larger than all numbers: a division by zero is to be unknown instead.
        database.execute("SET ieee_floating_point_ops = false")
        with suppress(duckdb.CatalogException):  # a setting that newer versions have
            database.execute("SET error_on_division_by_zero = false")
        tree = _parsed(database, condition)
        used = {_column(path, table, condition) for path in _parts(tree, condition)}
        # At least one column, or nobody knows how many rows there are.
        data = _compared(table, sorted(used) or table.names[:1])
        database.register("clips", data)
        try:
            found = database.execute(_query(condition)).fetchnumpy()["kept"]
        except duckdb.Error as error:
            raise GulliverError(
                f"{condition!r} cannot be worked out: {_first(error)}{_texts_of(data)}"
            ) from None
    if len(found) != len(table):
        raise GulliverError(f"{condition!r} is not of each row by itself: give {SHAPE}")
    if found.dtype != bool:
        raise GulliverError(f"{condition!r} gives {found.dtype}, not true or false: give {SHAPE}")
    unknown = np.ma.getmaskarray(found)
    kept = np.ma.filled(found, False)
    return Filtered(table.rows(kept), int((~kept & ~unknown).sum()), int(unknown.sum()))


def _query(condition: str) -> str:
    # The line's end ends a comment in the condition.
    return f"SELECT ({condition}\n) AS kept FROM clips"


def _compared(table: Table, names: list[str]) -> Any:
    """Takes columns as they are compared."""
    # Text of a CSV file is compared as numbers where each cell is spelt as Python spells its
    # number: then no two of them are one, and no text means a number that it does not say.
    import pyarrow as pa

    data = without_nan(table.data.select(names))
    for place, (name, column) in enumerate(zip(names, data.columns, strict=True)):
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


def _texts_of(data: Any) -> str:
    """Says which columns are text, where that may be why a condition fails."""
    texts = [field.name for field in data.schema if str(field.type) in ("string", "large_string")]
    if not texts:
        return ""
    name = texts[0]
    return f" ({', '.join(texts)} is text, as numbers it is cast({name} as double))"


def _parsed(database: Any, condition: str) -> dict[str, Any]:
    """Parses a condition into DuckDB's tree of one expression."""
    wanted, node = f"{condition!r} is no condition", {}
    asked = database.execute("SELECT json_serialize_sql(?)", [_query(condition)])
    ((text,),) = asked.fetchall()
    tree = json.loads(text)
    if not condition.strip():
        raise GulliverError(f"{wanted}: give {SHAPE}")
    if tree.get("error") and tree.get("error_type") == "parser":
        raise GulliverError(f"{wanted}: {tree.get('error_message')}; give {SHAPE}")
    statements = [statement["node"] for statement in tree.get("statements", ())]
    if len(statements) == 1:
        (node,) = statements
    plain = (
        node
        and node["type"] == "SELECT_NODE"
        and node["from_table"].get("table_name") == "clips"
        and len(node["select_list"]) == 1
        and node["select_list"][0].get("alias") == "kept"
        and not any(node.get(key) for key in ("modifiers", "where_clause", "having", "qualify"))
        and not any(node.get(key) for key in ("group_expressions", "group_sets", "sample"))
    )
    if not plain:
        raise GulliverError(f"{wanted} but a statement: give {SHAPE}")
    return node["select_list"][0]


def _parts(tree: Any, condition: str) -> Iterator[list[str]]:
    """Yields the names that a condition's columns have, after a look at each part's kind."""
    if isinstance(tree, list):
        for part in tree:
            yield from _parts(part, condition)
    elif isinstance(tree, dict):
        kind = tree.get("class")
        if isinstance(kind, str) and kind not in ALLOWED:
            raise GulliverError(
                f"{condition!r} holds a {kind.lower()}, which no condition has: give {SHAPE}"
            )
        if kind == "COLUMN_REF":
            yield tree["column_names"]
        for part in tree.values():
            yield from _parts(part, condition)


def _column(path: list[str], table: Table, condition: str) -> str:
    """Finds the column of a table that a name means; capitals count as small letters, as in SQL."""
    known = {name.lower(): name for name in table.names}
    for name in path[:2] if path[0].lower() == "clips" else path[:1]:
        if name.lower() in known:
            return known[name.lower()]
    name = path[-1]
    quoted = " (text stands in single quotes)" if f'"{name}"' in condition else ""
    raise GulliverError(
        f"table {table.path.name} has no column {name!r}{quoted}: {nearest(name, table.names)}"
    )


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise missing_extra("filtering needs DuckDB", "data") from None
    return duckdb


def _first(error: BaseException) -> str:
    """The first line of an error, without what follows about the place."""
    return str(error).strip().split("\n")[0]


def filter_file(path: Path, condition: str, out: Path) -> Filtered:
    """Filters the table of a file into another."""
    check_other(out, path)
    with held_table(out, "filter"):
        found = filter_table(Table.read(path), condition)
        return Filtered(found.table.write(out), found.dropped, found.unknown)
