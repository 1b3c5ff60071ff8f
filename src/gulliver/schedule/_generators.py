"""Traces to compare policies on, drawn from a seed; see `SHAPES`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.hardware import Scaling
from gulliver.schedule._jobs import Job, JobCluster


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
