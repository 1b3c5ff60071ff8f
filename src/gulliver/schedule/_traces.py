"""Reads and writes traces: CSV with a row for each job, or JSON with a list of jobs."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.hardware import Scaling, fit_scaling
from gulliver.io import named_errors, write_text
from gulliver.schedule._jobs import Job

COSTS = ("sample_seconds", "step_seconds", "exchange_seconds")
WHOLE = ("batch", "slots", "least_batch", "most_batch", "most_slots")
TEXT = ("name", "tenant")
NEEDED = ("name", "arrival", "samples", "batch", "slots")
COLUMNS = (*(field.name for field in fields(Job) if field.name != "scaling"), *COSTS)
"""Columns of a trace."""
MEASURED = "measured"
"""Key of JSON jobs for measured points, in place of the costs."""


def read_trace(path: str | Path) -> tuple[Job, ...]:
    """Reads a trace.

    Args:
        path: CSV file with a header, or JSON file with a list of jobs or ``{"jobs": [...]}``.
            Columns are those of `Job` and of its scaling; empty cells take the defaults. A job of
            JSON may have ``measured``, a list of [slots, batch, samples a second], in place of the
            costs.

    Raises:
        GulliverError: it cannot be read, a column is unknown or missing, or a value is wrong; it
            names the job.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise GulliverError(f"trace {path} cannot be read: {error}") from None
    if path.suffix == ".json":
        rows = _json_rows(path, text)
    elif path.suffix == ".csv":
        reader = csv.DictReader(StringIO(text), restkey="", strict=True)
        try:
            _known(path, reader.fieldnames or ())
            rows = [{k: v for k, v in row.items() if v not in ("", None)} for row in reader]
        except csv.Error as error:
            raise GulliverError(f"trace {path}, line {reader.line_num}: {error}") from None
    else:
        raise GulliverError(f"trace {path}: its name must end in .csv or .json")
    if not rows:
        raise GulliverError(f"trace {path} has no jobs: give at least one")
    return tuple(_job(path, number, row) for number, row in enumerate(rows, 1))


def write_trace(path: str | Path, jobs: Sequence[Job]) -> None:
    """Writes a trace as CSV.

    Raises:
        GulliverError: it cannot be written, or its name does not end in .csv.
    """
    path = Path(path)
    if path.suffix != ".csv":
        raise GulliverError(f"trace {path}: its name must end in .csv")
    out = StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for job in jobs:
        row = {name: getattr(job, name) for name in COLUMNS if name not in COSTS}
        row |= {name: getattr(job.scaling, name) for name in COSTS}
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    with named_errors(path):
        write_text(path, out.getvalue())


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text, object_pairs_hook=partial(_once, path))
    except json.JSONDecodeError as error:
        raise GulliverError(f"trace {path} is no JSON: {error}") from None
    rows = found.get("jobs") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise GulliverError(f'trace {path}: give a list of jobs, or {{"jobs": [...]}}')
    return rows


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise GulliverError(f"trace {path}: {name!r} is given {count} times: give it once")
    return dict(pairs)


def _known(path: Path, names: Any) -> None:
    _once(path, [(name, None) for name in names])
    for name in names:
        if name not in COLUMNS and name != MEASURED:
            shown = f"unknown column {name!r}" if name else "a row has more cells than the header"
            raise GulliverError(f"trace {path}: {shown}: {nearest(str(name), COLUMNS)}")


def _job(path: Path, number: int, row: Mapping[str, Any]) -> Job:
    label = f"trace {path}, job {number}"
    _known(path, row)
    for name in NEEDED:
        if row.get(name) is None:
            raise GulliverError(f"{label}: {name} is missing: a job needs {', '.join(NEEDED)}")
    values = {
        name: _value(label, name, value)
        for name, value in row.items()
        if value is not None and name != MEASURED
    }
    costs = {name: values.pop(name) for name in COSTS if name in values}
    if MEASURED in row:
        if costs:
            raise GulliverError(f"{label}: give measured points or {next(iter(costs))}, not both")
        points = row[MEASURED]
        if not isinstance(points, list) or not all(
            isinstance(p, list) and len(p) == 3 and all(type(n) in (int, float) for n in p)
            for p in points
        ):
            raise GulliverError(
                f"{label}: measured: give a list of [slots, batch, samples a second]"
            )
        try:
            scaling = fit_scaling([(int(n), int(b), float(speed)) for n, b, speed in points])
        except GulliverError as error:
            raise GulliverError(f"{label}: measured: {error}") from None
    elif "sample_seconds" in costs:
        scaling = Scaling(**costs)
    else:
        raise GulliverError(f"{label}: sample_seconds is missing: it says how fast a slot is")
    try:
        return Job(scaling=scaling, **values)
    except GulliverError as error:
        raise GulliverError(f"trace {path}: {error}") from None


def _value(label: str, name: str, value: Any) -> Any:
    """Converts a cell to the type of its column."""
    if name in TEXT:
        return str(value)
    if name == "announced":
        known = {"true": True, "false": False, "1": True, "0": False}
        if str(value).lower() not in known:
            raise GulliverError(f"{label}: announced is {value!r}: give true or false")
        return known[str(value).lower()]
    try:
        number = float(str(value))  # as text, true of JSON is no number
    except ValueError:
        raise GulliverError(f"{label}: {name} is {value!r}: give a number") from None
    if name in WHOLE:
        if not number.is_integer():
            raise GulliverError(f"{label}: {name} is {value}: give a whole number")
        return int(number)
    return number
