"""What a simulation has found: who ran when, how long jobs took, how far that is from a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from gulliver.schedule._jobs import Job, JobCluster
from gulliver.schedule._state import JobState
from gulliver.solve import fluid_bound, fluid_bound_by_lp


@dataclass(frozen=True)
class Segment:
    """Seconds in which a job's slots and batch did not change."""

    job: str
    begin: float
    end: float
    slots: tuple[int, ...]
    batch: int
    # Samples a second that counted; 0 while it resized.
    rate: float


class Change(NamedTuple):
    """Slots of a job before and after a decision."""

    job: str
    before: int
    after: int


class Round(NamedTuple):
    """A decision."""

    time: float
    cause: str
    changes: tuple[Change, ...]
    why: dict[str, str]
    # Sum of completion times that the policy expected; None if it did not say.
    predicted: float | None
    # Sum that no schedule was below; None likewise.
    bound: float | None


class Summary(NamedTuple):
    """Figures of a simulation; seconds from arrival to end unless said otherwise.

    Attributes:
        mean: mean of them.
        median: median of them.
        p95: 95th percentile of them.
        wait: mean seconds in which a job held no slot.
        makespan: seconds from the first arrival to the last end.
        gpu_hours: hours that slots were held.
        used: share of the slots that were held until the makespan.
        resizes: number of times that jobs lost their resize seconds.
        missed: jobs that ended after their deadline.
        to_bound: mean over the lower bound of the mean; 1 cannot be improved.
    """

    mean: float
    median: float
    p95: float
    wait: float
    makespan: float
    gpu_hours: float
    used: float
    resizes: int
    missed: int
    to_bound: float


@dataclass
class Result:
    """A simulated schedule.

    Attributes:
        jobs: jobs in order of arrival.
        cluster: what they ran on.
        policy: name of the policy.
        ends: second at which each job ended.
        segments: slots that jobs held, in order of begin.
        rounds: decisions that changed something, or predicted something.
        states: final state of each job.
        events: number of decisions.
    """

    jobs: tuple[Job, ...]
    cluster: JobCluster
    policy: str
    ends: dict[str, float] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    states: dict[str, JobState] = field(default_factory=dict)
    events: int = 0
    last_segment: dict[str, int] = field(default_factory=dict)

    def completion(self, name: str) -> float:
        """Seconds from a job's arrival to its end."""
        return self.ends[name] - self.states[name].job.arrival

    @cached_property
    def bound(self) -> float:
        """Mean completion time in seconds that no schedule is below."""
        return bound_of(self.jobs, self.cluster)

    @property
    def gaps(self) -> list[float]:
        """Share by which each prediction of the policy was above its bound."""
        return [
            r.predicted / r.bound - 1 for r in self.rounds if r.predicted is not None and r.bound
        ]

    def summary(self) -> Summary:
        """Computes the figures."""
        times = np.array([self.completion(job.name) for job in self.jobs])
        held = {job.name: 0.0 for job in self.jobs}
        seconds = 0.0
        for segment in self.segments:
            held[segment.job] += segment.end - segment.begin
            seconds += (segment.end - segment.begin) * len(segment.slots)
        span = max(self.ends.values()) - min(job.arrival for job in self.jobs)
        waits = [self.completion(job.name) - held[job.name] for job in self.jobs]
        late = [j for j in self.jobs if j.deadline is not None and self.ends[j.name] > j.deadline]
        return Summary(
            mean=float(times.mean()),
            median=float(np.median(times)),
            p95=float(np.percentile(times, 95)),
            wait=float(np.mean(waits)),
            makespan=span,
            gpu_hours=seconds / 3600,
            used=seconds / (self.cluster.slots * span),
            resizes=sum(state.resizes for state in self.states.values()),
            missed=len(late),
            to_bound=float(times.mean()) / self.bound,
        )


_bounds: dict[tuple[object, ...], float] = {}


def bound_of(jobs: tuple[Job, ...], cluster: JobCluster, intervals: int = 40) -> float:
    """Returns a mean completion time in seconds that no schedule is below.

    It is that of `gulliver.solve.fluid_bound_by_lp` where there is scipy, and else of
    `fluid_bound`: slots may be cut, resizing is free, all arrivals are known, quotas are not there.

    Args:
        jobs: jobs.
        cluster: slots, and nodes.
        intervals: intervals that the linear programme cuts time into; more are tighter and slower.
    """
    key = (jobs, cluster.slots, cluster.node_slots, cluster.across, intervals)
    if key not in _bounds:
        rates = np.stack([job.modes(cluster).goodputs for job in jobs])
        arrivals = [job.arrival for job in jobs]
        found = find_spec("scipy") is not None
        work = [job.samples for job in jobs]
        if found and len(jobs) <= 400:
            total = fluid_bound_by_lp(work, rates, arrivals, cluster.slots, intervals)
        else:
            total = fluid_bound(work, rates, arrivals, cluster.slots)
        _bounds[key] = (total - math.fsum(arrivals)) / len(jobs)
    return _bounds[key]
