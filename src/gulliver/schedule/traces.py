"""Reads and writes traces of jobs: CSV with a row per job, or JSON with a list of jobs."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from gulliver.errors import GulliverError, check_known, nearest
from gulliver.hardware.scaling import Scaling, fit_scaling
from gulliver.io.files import named_errors, write_text
from gulliver.options import checked
from gulliver.schedule.jobs import Job, JobCluster

COSTS = tuple(field.name for field in fields(Scaling) if field.name.endswith("_seconds"))
NEEDED = ("name", "arrival", "samples", "batch", "slots")
HINTS = get_type_hints(Job, include_extras=True) | dict.fromkeys(COSTS, float)
COLUMNS = tuple(name for name in HINTS if name != "scaling")
MEASURED = "measured"  # key of measured points in a JSON job, which replace the costs


def read_trace(path: str | Path) -> tuple[Job, ...]:
    """Reads a trace.

    Args:
        path: CSV file with a header, or JSON file with a list of jobs or ``{"jobs": [...]}``.
            The columns are the fields of `Job` and its scaling; empty cells use the defaults. A
            JSON job may have ``measured``, a list of [slots, batch, samples per second], instead of
            costs.

    Raises:
        GulliverError: the file cannot be read, a column is unknown or missing, or a value is
            invalid.
    """
    path = Path(path)
    if path.suffix not in (".json", ".csv"):
        raise GulliverError(f"trace {path} has an unknown suffix; use .csv or .json")
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        if path.suffix == ".json":
            found = json.loads(text)
            rows = found.get("jobs") if isinstance(found, dict) else found
        else:
            table = csv.DictReader(StringIO(text), strict=True)
            names = Counter(table.fieldnames or ())
            if twice := [name for name, count in names.items() if count > 1]:
                raise ValueError(f"two columns are named {twice[0]!r}")
            rows = []
            for row in table:
                # The reader puts surplus cells under None, and None into missing ones.
                if None in row or None in row.values():
                    raise ValueError(f"line {table.line_num} needs {len(names)} cells")
                rows.append({k: _cell(k, v) for k, v in row.items() if v})
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise GulliverError(f"trace {path} cannot be read: {reason}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise GulliverError(f'trace {path} has no list of jobs; use a list or {{"jobs": [...]}}')
    return tuple(
        _job(f"trace {path}, job {row.get('name', number)!r}", row)
        for number, row in enumerate(rows, 1)
    )


def write_trace(path: str | Path, jobs: Sequence[Job]) -> None:
    """Writes a trace as CSV."""
    path = Path(path)
    if path.suffix != ".csv":
        raise GulliverError(f"trace {path} has an unknown suffix; use .csv")
    out = StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for job in jobs:
        row = {name: getattr(job, name) for name in COLUMNS if name not in COSTS}
        row |= {name: getattr(job.scaling, name) for name in COSTS}
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    with named_errors(path):
        write_text(path, out.getvalue())


def _cell(name: str, text: str) -> Any:
    """Parses a CSV cell: a number or a boolean, except in text columns."""
    if HINTS.get(name) is str:
        return text
    try:
        return json.loads(text.lower())
    except (ValueError, AttributeError):
        return text


def _job(label: str, row: Mapping[str, Any]) -> Job:
    for name in row:
        if name not in COLUMNS and name != MEASURED:
            raise GulliverError(f"{label}: unknown column {name!r}: {nearest(str(name), COLUMNS)}")
    values = {
        name: checked(value, HINTS[name], f"{label}: {name}")
        for name, value in row.items()
        if value is not None and name != MEASURED
    }
    for name in NEEDED:
        if name not in values:
            raise GulliverError(f"{label}: {name} is missing; a job needs {', '.join(NEEDED)}")
    costs = {name: values.pop(name) for name in COSTS if name in values}
    try:
        if MEASURED in row:
            points = [(int(n), int(b), float(speed)) for n, b, speed in row[MEASURED]]
            scaling = fit_scaling(points)
        elif "sample_seconds" in costs:
            scaling = Scaling(**costs)
        else:
            raise GulliverError("sample_seconds is missing; set the seconds per sample on one slot")
        return Job(scaling=scaling, **values)
    except GulliverError as error:
        raise GulliverError(f"{label}: {error}") from None
    except (TypeError, ValueError):
        shown = "measured must be a list of [slots, batch, samples per second]"
        raise GulliverError(f"{label}: {shown}") from None


# Random traces for comparing policies; see `SHAPES`.


class ModelKind(NamedTuple):
    """A kind of job: a model with its data."""

    name: str
    sample_ms: float
    step_ms: float
    exchange_ms: float
    # Batch size per slot.
    batch: int
    # Gradient noise scale relative to the batch size.
    noise: float
    # Largest batch size relative to `batch` that its learning rate allows.
    grows: int
    epoch: int


KINDS = (
    ModelKind("small-convnet", 0.4, 4, 3, 64, 4, 8, 20_000),
    ModelKind("deep-convnet", 1.2, 8, 6, 64, 4, 8, 20_000),
    ModelKind("wide-convnet", 2.0, 6, 20, 32, 8, 16, 20_000),
    ModelKind("mobile-convnet", 0.6, 8, 2, 64, 6, 8, 20_000),
    ModelKind("inception", 3.0, 12, 8, 32, 8, 16, 10_000),
    ModelKind("image-classifier", 4.0, 10, 10, 32, 16, 16, 10_000),
    ModelKind("detector", 8.0, 20, 15, 16, 8, 8, 4_000),
    ModelKind("sentence-encoder", 5.0, 12, 25, 16, 8, 8, 6_000),
    ModelKind("translator", 3.0, 15, 20, 32, 16, 16, 8_000),
    ModelKind("recurrent-net", 1.0, 20, 10, 32, 4, 8, 10_000),
)
"""Ten kinds of jobs with assumed, not measured, costs."""


class TraceShape(NamedTuple):
    """Parameters of a random trace."""

    jobs: int
    slots: int
    # Mean fraction of the slots in use if every job runs on its requested slots.
    load: float
    # Median seconds of a job on its requested slots, and standard deviation of their log.
    median: float
    spread: float
    # Number of jobs that arrive together.
    burst: int = 1
    elastic: bool = True
    announced: bool = True
    resize: float = 10.0
    # Factor of the kinds' gradient noise scales.
    noise: float = 1.0


# steady: jobs of similar size, one by one.
# heavy-tail: a few jobs have most of the work.
# bursts: many jobs arrive at once, then none for a while.
# fixed-batch: the number of slots only changes gradient accumulation.
# artifact: similar to the trace published with ONES, which is not available: 50 jobs of ten kinds
#   on 64 slots, unannounced lengths, and a load at which Tiresias' jobs run and wait about as long
#   as in the published logs.
SHAPES = {
    "steady": TraceShape(60, 16, 0.8, 300, 0.8),
    "heavy-tail": TraceShape(60, 16, 0.8, 120, 1.6),
    "bursts": TraceShape(60, 16, 0.8, 240, 1.0, burst=15),
    "fixed-batch": TraceShape(60, 16, 0.8, 240, 1.2, elastic=False),
    "artifact": TraceShape(50, 64, 0.9, 250, 0.9, announced=False, resize=2.0, noise=8.0),
}


def generate(name: str, seed: int = 0) -> tuple[tuple[Job, ...], JobCluster]:
    """Generates a random trace.

    Args:
        name: one of `SHAPES`.
        seed: random seed.

    Returns:
        The jobs, and the cluster that they are intended for.

    Raises:
        GulliverError: the trace is unknown.
    """
    check_known("trace", name, SHAPES)
    shape = SHAPES[name]
    draw = np.random.default_rng([seed, *name.encode()])
    drawn = [_drawn_job(shape, f"{name[0]}{number:02d}", draw) for number in range(shape.jobs)]
    service = sum(j.slots * j.samples / j.goodput(j.slots, j.batch) for j in drawn)
    span = service / (shape.load * shape.slots)
    times = _arrivals(shape, span, draw)
    timed = zip(drawn, times, strict=True)
    return tuple(replace(job, arrival=time) for job, time in timed), JobCluster(shape.slots)


def _drawn_job(shape: TraceShape, name: str, draw: np.random.Generator) -> Job:
    kind = KINDS[int(draw.integers(len(KINDS)))]
    most = min(16, shape.slots // 2)
    sizes = [size for size in (1, 2, 4, 8, 16) if (size > 1 or shape.announced) and size <= most]
    slots = int(draw.choice(sizes))
    batch = kind.batch * slots
    scaling = Scaling(kind.sample_ms / 1e3, kind.step_ms / 1e3, kind.exchange_ms / 1e3)
    seconds = shape.median * float(np.exp(shape.spread * draw.standard_normal()))
    samples = max(kind.epoch * 2.0, seconds * scaling.throughput(slots, batch))
    return Job(
        name=f"{name}-{kind.name}",
        arrival=0.0,
        samples=float(round(samples)),
        batch=batch,
        slots=slots,
        scaling=scaling,
        noise=shape.noise * kind.noise * kind.batch,
        least_batch=kind.batch if shape.elastic else None,
        most_batch=max(batch, kind.batch * kind.grows) if shape.elastic else None,
        epoch=float(kind.epoch),
        resize_seconds=shape.resize,
        announced=shape.announced,
        curvature=float(draw.uniform(2.0, 5.0)),
    )


def _arrivals(shape: TraceShape, span: float, draw: np.random.Generator) -> list[float]:
    """Draws arrival times over about `span` seconds, starting at 0."""
    groups = -(-shape.jobs // shape.burst)
    gaps = draw.exponential(span / groups, groups)
    starts = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    return [round(float(starts[number // shape.burst]), 3) for number in range(shape.jobs)]
