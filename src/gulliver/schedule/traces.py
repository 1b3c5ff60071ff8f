"""Reads and writes traces: CSV with a row for each job, or JSON with a list of jobs."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.scaling import Scaling, fit_scaling
from gulliver.io.files import named_errors, write_text
from gulliver.schedule.jobs import Job, JobCluster

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


# Traces to compare policies on, drawn from a seed; see `SHAPES`.


class ModelKind(NamedTuple):
    """A model with its data.

    Attributes:
        name: what it stands for.
        sample_ms: milliseconds of a sample on a slot.
        step_ms: milliseconds of a step besides.
        exchange_ms: milliseconds to send its gradients once.
        batch: batch size on one slot.
        noise: gradient noise scale over its batch size.
        grows: times its batch size that its largest learning rate allows.
        epoch: samples of an epoch.
    """

    name: str
    sample_ms: float
    step_ms: float
    exchange_ms: float
    batch: int
    noise: float
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
"""Ten kinds of jobs. Their costs are described, not measured."""


class TraceShape(NamedTuple):
    """How a trace is drawn.

    Attributes:
        jobs: number of jobs.
        slots: slots of the cluster it is meant for.
        load: share of the slots that the jobs need if each runs on the slots that it asks for.
        median: median seconds of a job on these.
        spread: standard deviation of the log of seconds.
        burst: jobs that come together.
        elastic: whether batch sizes may change.
        announced: whether lengths are known.
        resize: seconds of a resize.
        noise: factor of the kinds' gradient noise scales.
    """

    jobs: int
    slots: int
    load: float
    median: float
    spread: float
    burst: int = 1
    elastic: bool = True
    announced: bool = True
    resize: float = 10.0
    noise: float = 1.0


# steady: jobs of like sizes, one by one. heavy-tail: a few jobs have most of the work. bursts: many
# arrive at once, then none for a while. fixed-batch: slots change accumulation only. artifact: in
# the manner of the trace that ONES was published with, which is not available: 50 jobs of ten kinds
# on 64 slots, unannounced lengths, at a load where Tiresias runs and waits about as long as in its
# logs.
SHAPES = {
    "steady": TraceShape(60, 16, 0.8, 300, 0.8),
    "heavy-tail": TraceShape(60, 16, 0.8, 120, 1.6),
    "bursts": TraceShape(60, 16, 0.8, 240, 1.0, burst=15),
    "fixed-batch": TraceShape(60, 16, 0.8, 240, 1.2, elastic=False),
    "artifact": TraceShape(50, 64, 0.9, 250, 0.9, announced=False, resize=2.0, noise=8.0),
}


def generate(name: str, seed: int = 0) -> tuple[tuple[Job, ...], JobCluster]:
    """Draws a trace.

    Args:
        name: one of `SHAPES`.
        seed: seed of all that is drawn.

    Returns:
        Jobs, and the cluster that they are meant for.

    Raises:
        GulliverError: an unknown trace.
    """
    if name not in SHAPES:
        raise GulliverError(f"unknown trace {name!r}: {nearest(name, SHAPES)}")
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
    """Draws seconds of arrival over about `span` seconds, the first at 0."""
    groups = -(-shape.jobs // shape.burst)
    gaps = draw.exponential(span / groups, groups)
    starts = np.concatenate([[0.0], np.cumsum(gaps)[:-1]])
    return [round(float(starts[number // shape.burst]), 3) for number in range(shape.jobs)]
