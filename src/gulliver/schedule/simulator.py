"""Simulates a policy on a trace with discrete events.

Rates are constant between events, so the time of the next event (an arrival, an end, or the
policy's wake-up time) is exact. At each event, the policy decides the allocation until the next
one. Contention between neighboring jobs is not modeled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gulliver.errors import GulliverError
from gulliver.schedule.jobs import Job, JobCluster, check_trace, place
from gulliver.schedule.state import Decision, JobState, Policy, View, limits_of, placed
from gulliver.solve.allocation import fluid_bound


def on_nodes(
    states: Sequence[JobState],
    chosen: Mapping[str, tuple[tuple[int, ...], int]],
    cluster: JobCluster,
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Places starting and resizing jobs on few nodes; other jobs keep their placement."""
    moving = [s for s in states if len(chosen.get(s.job.name, ((), 0))[0]) not in (0, s.count)]
    names = {state.job.name for state in moving}
    taken = {slot for name, (slots, _) in chosen.items() if name not in names for slot in slots}
    free = [slot for slot in range(cluster.slots) if slot not in taken]
    counts = [len(chosen[state.job.name][0]) for state in moving]
    size = cluster.slots // cluster.nodes
    found = dict(chosen)
    for state, parts in zip(moving, place(counts, cluster.parts(free)), strict=True):
        own: list[int] = []
        for node, part in enumerate(parts):
            here = [slot for slot in free if slot // size == node]
            # Prefer the job's own slots, so that charts show only real moves.
            own += sorted(here, key=lambda slot: slot not in state.slots)[:part]
        found[state.job.name] = tuple(own), chosen[state.job.name][1]
        free = [slot for slot in free if slot not in own]
    return found


# Results of a simulation: segments, completion times, and the gap to a lower bound.


@dataclass(frozen=True)
class Segment:
    """An interval in which a job's slots and batch size did not change."""

    job: str
    begin: float
    end: float
    slots: tuple[int, ...]
    batch: int
    # Effective samples per second; 0 during a resize.
    rate: float


class Change(NamedTuple):
    """Slots of a job before and after a decision."""

    job: str
    before: int
    after: int


class Round(NamedTuple):
    """A decision of the policy, and the changes it caused."""

    time: float
    cause: str
    changes: tuple[Change, ...]
    why: dict[str, str]
    # Sum of completion times that the policy expects; None if unknown.
    predicted: float | None
    # Lower bound of that sum; None if unknown.
    bound: float | None


class Summary(NamedTuple):
    """Statistics of a simulation; completion times in seconds unless noted.

    Attributes:
        mean: mean completion time.
        median: median completion time.
        p95: 95th percentile of the completion times.
        wait: mean seconds during which a job held no slot.
        makespan: seconds from the first arrival to the last end.
        gpu_hours: slot-hours held.
        used: mean fraction of the cluster's slots that were held, over the makespan.
        resizes: number of resizes that cost time.
        missed: number of jobs that ended after their deadline.
        to_bound: mean divided by its lower bound; 1 is optimal.
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
        cluster: the cluster.
        policy: name of the policy.
        ends: time at which each job ended, in seconds.
        segments: slots that jobs held, ordered by start time.
        rounds: decisions with a change or a prediction.
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

    def completion(self, name: str) -> float:
        return self.ends[name] - self.states[name].job.arrival

    @cached_property
    def bound(self) -> float:
        """Lower bound on the mean completion time in seconds."""
        return bound_of(self.jobs, self.cluster)

    @property
    def gaps(self) -> list[float]:
        """Relative gap between each prediction of the policy and its bound."""
        return [
            r.predicted / r.bound - 1 for r in self.rounds if r.predicted is not None and r.bound
        ]

    def summary(self) -> Summary:
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


def bound_of(jobs: tuple[Job, ...], cluster: JobCluster) -> float:
    """Returns a lower bound on the mean completion time in seconds."""
    key = (jobs, cluster.slots, cluster.node_slots, cluster.across)
    if key not in _bounds:
        rates = np.stack([job.modes(cluster).goodputs for job in jobs])
        arrivals = [job.arrival for job in jobs]
        work = [job.samples for job in jobs]
        total = fluid_bound(work, rates, arrivals, cluster.slots)
        _bounds[key] = (total - math.fsum(arrivals)) / len(jobs)
    return _bounds[key]


MOST_EVENTS = 2_000_000  # number of events without progress after which a simulation is aborted


def simulate(
    trace: Sequence[Job], cluster: JobCluster, policy: Policy, until: float = math.inf
) -> Result:
    """Simulates a policy on a cluster.

    Args:
        trace: jobs, in any order.
        cluster: slots and quotas.
        policy: scheduling policy; it is reset.
        until: time after which arrivals are ignored, in seconds; present jobs run to their end,
            which gives the end times predicted at that time.

    Raises:
        GulliverError: the cluster cannot run a job, the policy does not support quotas, or the
            policy starves jobs.
    """
    jobs = tuple(sorted(trace, key=lambda job: job.arrival))
    check_trace(jobs, cluster)
    _check_borrowers(jobs, cluster, policy)
    policy.begin(cluster)
    return _Simulation(tuple(job for job in jobs if job.arrival <= until), cluster, policy).run()


def _check_borrowers(jobs: Sequence[Job], cluster: JobCluster, policy: Policy) -> None:
    for job in jobs if not policy.preempts else ():
        quota = cluster.quotas.get(job.tenant, cluster.slots)
        if job.slots > quota:
            raise GulliverError(
                f"job {job.name!r} requests {job.slots} slots, tenant {job.tenant!r} has a quota "
                f"of {quota}, and policy {policy.name!r} does not lend slots; raise the quota, "
                "request fewer slots, or use a policy that takes slots back"
            )


def follow(
    now: float,
    states: Sequence[JobState],
    finished: Sequence[JobState],
    cluster: JobCluster,
    policy: Policy,
) -> Result:
    """Simulates from a given time, with the present jobs and no further arrivals."""
    run = _Simulation((), cluster, policy)
    run.now, run.present, run.finished = now, [replace(s) for s in states], list(finished)
    run.result.states = {state.job.name: state for state in run.present}
    return run.run()


class _Simulation:
    def __init__(self, jobs: tuple[Job, ...], cluster: JobCluster, policy: Policy) -> None:
        self.coming, self.cluster, self.policy = list(jobs), cluster, policy
        self.result = Result(jobs, cluster, policy.name)
        # Index of each job's last segment.
        self._last: dict[str, int] = {}
        # When jobs that change their slots have left them, by slot.
        self._free: dict[int, float] = {}
        self.present: list[JobState] = []
        self.finished: list[JobState] = []
        self.now = 0.0

    def run(self) -> Result:
        ends: dict[str, float] = {}
        wake: float | None = None
        for _ in range(MOST_EVENTS):
            cause = self._end(ends) + self._arrive()
            if not self.coming and not self.present:
                return self.result
            ends = {}
            if self.present:
                self.result.events += 1
                decision = self.policy.decide(self._view(cause))
                self._apply(decision, cause)
                ends = {s.job.name: self._ends_at(s) for s in self.present if s.slots}
                wake = decision.wake
            else:
                wake = None
            self._advance(self._next(ends, wake))
        raise GulliverError(
            f"policy {self.policy.name!r} was called {MOST_EVENTS} times without finishing the "
            "trace; use another policy"
        )

    def _view(self, cause: str) -> View:
        return View(
            self.now, self.cluster, self.present, self.finished, self._limits(), cause or "awake"
        )

    def _limits(self) -> dict[str, int]:
        return limits_of(self.present, self.cluster, self.policy)

    def _ends_at(self, state: JobState) -> float:
        begun = max(self.now, state.ready)
        return begun + (state.job.samples - state.done) / state.rate

    def _next(self, ends: dict[str, float], wake: float | None) -> float:
        times = list(ends.values())
        if self.coming:
            times.append(self.coming[0].arrival)
        if not times and (wake is None or wake <= self.now):
            names = ", ".join(state.job.name for state in self.present)
            raise GulliverError(f"policy {self.policy.name!r} leaves jobs waiting forever: {names}")
        if wake is not None and wake > self.now:
            times.append(wake)
        return min(times)

    def _end(self, ends: dict[str, float]) -> str:
        happened = ""
        for state in [s for s in self.present if ends.get(s.job.name, math.inf) <= self.now]:
            # The last sample is done by definition; rounding must not leave a remainder.
            left = state.job.samples - state.done
            state.drawn += left * _drawn_per_sample(state)
            state.done = state.job.samples
            self.result.ends[state.job.name] = self.now
            self.present.remove(state)
            self.finished.append(state)
            state.slots, state.batch = (), 0
            happened += f"{state.job.name} ended; "
        return happened

    def _arrive(self) -> str:
        happened = ""
        while self.coming and self.coming[0].arrival <= self.now:
            job = self.coming.pop(0)
            state = JobState(job, changed=self.now)
            self.present.append(state)
            self.result.states[job.name] = state
            happened += f"{job.name} arrived; "
        return happened

    def _advance(self, to: float) -> None:
        for state in self.present:
            if not state.slots:
                continue
            state.service += state.count * (to - self.now)
            ran = to - max(self.now, state.ready)
            if ran > 0:
                done = min(state.rate * ran, state.job.samples - state.done)
                state.done += done
                state.drawn += done * _drawn_per_sample(state)
                state.epochs_since += done / state.job.epoch_samples
            begun = min(max(state.ready, self.now), to)
            self._log(state, self.now, begun, False)
            self._log(state, begun, to, True)
        self.now = to

    def _log(self, state: JobState, begun: float, ended: float, runs: bool) -> None:
        if ended <= begun:
            return
        name, log = state.job.name, self.result.segments
        rate = state.rate if runs else 0.0
        last = log[self._last[name]] if name in self._last else None
        if (
            last is not None
            and last.end == begun
            and (last.slots, last.batch, last.rate) == (state.slots, state.batch, rate)
        ):
            log[self._last[name]] = replace(last, end=ended)
            return
        self._last[name] = len(log)
        log.append(Segment(name, begun, ended, state.slots, state.batch, rate))

    def _apply(self, decision: Decision, cause: str) -> None:
        chosen = placed(self.present, decision, range(self.cluster.slots))
        if self.cluster.nodes > 1:
            chosen = on_nodes(self.present, chosen, self.cluster)
        self._check(chosen)
        left: dict[str, float] = {}
        for state in self.present:
            if state.slots and chosen.get(state.job.name, ((), 0))[0] != state.slots:
                # Only a job that runs can save and leave.
                left[state.job.name] = max(self.now, state.ready) + state.job.leave_seconds
                self._free |= dict.fromkeys(state.slots, left[state.job.name])
        changes = []
        for state in self.present:
            slots, batch = chosen.get(state.job.name, ((), 0))
            if slots == state.slots and batch == state.batch:
                continue
            before = state.count
            if slots != state.slots:
                changes.append(Change(state.job.name, before, len(slots)))
                if slots:
                    started = state.started is not None
                    free = [self._free.get(slot, self.now) for slot in slots]
                    again = state.job.resize_seconds - state.job.leave_seconds
                    lost = again if started else state.job.start_seconds
                    state.ready = max(self.now, left.get(state.job.name, self.now), *free) + lost
                    state.resizes += started
                    state.started = state.started if started else self.now
                state.changed, state.epochs_since = self.now, 0.0
            state.slots, state.batch = slots, batch
            parts = self.cluster.parts(slots)
            spans = sum(part > 0 for part in parts) > 1
            state.scaling = state.job.scaling.across(parts, self.cluster.across) if spans else None
        known = decision.predicted is not None
        if changes or known:
            self.result.rounds.append(
                Round(
                    self.now,
                    cause.rstrip("; ") or "the policy woke",
                    tuple(changes),
                    decision.why,
                    decision.predicted,
                    decision.bound,
                )
            )

    def _check(self, chosen: dict[str, tuple[tuple[int, ...], int]]) -> None:
        slots = [slot for held, _ in chosen.values() for slot in held]
        assert len(slots) == len(set(slots)) <= self.cluster.slots, "a slot was assigned twice"
        limits, used = self._limits(), dict[str, int]()
        for state in self.present:
            held, batch = chosen.get(state.job.name, ((), 0))
            if held:
                job = state.job
                assert job.smallest <= batch <= job.largest, f"{job.name}: batch {batch}"
                assert len(held) <= (job.most_slots or len(held)), f"{job.name}: slots {len(held)}"
                used[job.tenant] = used.get(job.tenant, 0) + len(held)
        for tenant, count in used.items():
            assert count <= limits[tenant], f"tenant {tenant!r} has {count} of {limits[tenant]}"


def _drawn_per_sample(state: JobState) -> float:
    costs = state.scaling or state.job.scaling
    return costs.throughput(state.count, state.batch) / state.rate
