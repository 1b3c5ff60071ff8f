"""Runs a policy over a trace: an exact discrete-event simulation.

Between two events nothing changes, so the next event is known in closed form: a job arrives, a job
ends, or the policy asks to be woken. At each event the policy decides what every job has from then
on. Contention between neighbouring jobs is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gulliver.errors import GulliverError
from gulliver.schedule._handover import Handover
from gulliver.schedule._jobs import Job, JobCluster, check_trace
from gulliver.schedule._nodes import on_nodes
from gulliver.schedule._result import Change, Result, Round, Segment
from gulliver.schedule._state import Decision, JobState, Policy, View, limits_of, placed

MOST_EVENTS = 2_000_000
"""Events after which a policy that asks to be woken again and again is given up."""


def simulate(
    trace: Sequence[Job], cluster: JobCluster, policy: Policy, until: float = math.inf
) -> Result:
    """Simulates a cluster.

    Args:
        trace: jobs, in any order.
        cluster: slots and quotas.
        policy: rule of who gets what; it begins anew.
        until: second after which no job comes any more, those that are there being finished: so
            one sees what is to be expected at that moment.

    Raises:
        GulliverError: the cluster cannot run a job, the policy knows no quotas, or it leaves jobs
            waiting for ever.
    """
    jobs = tuple(sorted(trace, key=lambda job: job.arrival))
    check_trace(jobs, cluster)
    _check_borrowers(jobs, cluster, policy)
    policy.begin(cluster)
    return _Simulation(tuple(job for job in jobs if job.arrival <= until), cluster, policy).run()


def _check_borrowers(jobs: Sequence[Job], cluster: JobCluster, policy: Policy) -> None:
    """Refuses jobs that would wait for ever for borrowed slots."""
    for job in jobs if not policy.preempts else ():
        quota = cluster.quotas.get(job.tenant, cluster.slots)
        if job.slots > quota:
            raise GulliverError(
                f"job {job.name!r} asks for {job.slots} slots, tenant {job.tenant!r} has a quota "
                f"of {quota}, and policy {policy.name!r} lends none: raise the quota, ask for "
                "fewer slots, or take a policy that takes slots back"
            )


def follow(
    now: float,
    states: Sequence[JobState],
    finished: Sequence[JobState],
    cluster: JobCluster,
    policy: Policy,
) -> Result:
    """Simulates from a moment on, with the present jobs and no arrivals."""
    run = _Simulation((), cluster, policy)
    run.now, run.present, run.finished = now, [replace(s) for s in states], list(finished)
    run.result.states = {state.job.name: state for state in run.present}
    return run.run()


class _Simulation:
    """State of a simulation."""

    def __init__(self, jobs: tuple[Job, ...], cluster: JobCluster, policy: Policy) -> None:
        self.coming, self.cluster, self.policy = list(jobs), cluster, policy
        self.result = Result(jobs, cluster, policy.name)
        self.present: list[JobState] = []
        self.finished: list[JobState] = []
        self.handover = Handover()
        self.now = 0.0

    def run(self) -> Result:
        """Runs all events."""
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
            f"policy {self.policy.name!r} was asked {MOST_EVENTS} times: give it up"
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
            raise GulliverError(
                f"policy {self.policy.name!r} leaves jobs waiting for ever: {names}"
            )
        if wake is not None and wake > self.now:
            times.append(wake)
        return min(times)

    def _end(self, ends: dict[str, float]) -> str:
        """Removes jobs that end now."""
        happened = ""
        for state in [s for s in self.present if ends.get(s.job.name, math.inf) <= self.now]:
            # The last sample is done by definition: nothing is left over by rounding.
            left = state.job.samples - state.done
            state.drawn += left * _drawn_per_sample(state)
            state.done = state.job.samples
            self.result.ends[state.job.name] = self.now + state.job.end_seconds
            self.present.remove(state)
            self.finished.append(state)
            self.handover.end(state, self.now)
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
        """Advances all jobs to `to`."""
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

    @property
    def _last(self) -> dict[str, int]:
        return self.result.last_segment

    def _apply(self, decision: Decision, cause: str) -> None:
        """Applies a decision."""
        chosen = placed(self.present, decision, range(self.cluster.slots))
        if self.cluster.nodes > 1:
            chosen.update(on_nodes(self.present, decision, chosen, self.cluster, self.now))
        self._check(chosen)
        left = {
            state.job.name: self.handover.leave(state, self.now)
            for state in self.present
            if state.slots != chosen.get(state.job.name, ((), 0))[0]
        }
        changes = []
        for state in self.present:
            slots, batch = chosen.get(state.job.name, ((), 0))
            if slots == state.slots and batch == state.batch:
                continue
            before = state.count
            if slots != state.slots:
                changes.append(Change(state.job.name, before, len(slots)))
                ready = self.handover.enter(state, slots, self.now, left[state.job.name])
                if slots:
                    state.ready = ready
                    state.resizes += state.started is not None
                    state.started = self.now if state.started is None else state.started
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
        """Asserts that a decision keeps slots, quotas and batch limits."""
        slots = [slot for held, _ in chosen.values() for slot in held]
        assert len(slots) == len(set(slots)) <= self.cluster.slots, "a slot was given twice"
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
    """Samples processed per sample that counts."""
    costs = state.scaling or state.job.scaling
    return costs.throughput(state.count, state.batch) / state.rate
