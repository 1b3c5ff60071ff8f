"""Stores the state of a schedule in a file, for display and for the next scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.scaling import Scaling
from gulliver.schedule.jobs import Job, JobCluster
from gulliver.schedule.live.tracking import (
    LiveJob,
    MeasuredSeconds,
    Phase,
    Spool,
    read_object,
    write_object,
)
from gulliver.schedule.policies import make_policy
from gulliver.schedule.report import describe_change, schedule_page
from gulliver.schedule.simulator import Change, Result, Round, Segment, follow

PLAIN = (
    "note", "batch", "attempt", "launched", "heard", "silent", "stopping", "progress", "resizes",
    "starts", "leaves", "base", "failures", "ended",
)  # fmt: skip
"""Attributes of a `LiveJob` that are stored unchanged."""
STATE = ("done", "drawn", "started", "changed", "service", "resizes", "batch")
"""Attributes of a `JobState` that are stored."""


@dataclass
class ScheduleHistory:
    """State and history of a live schedule."""

    # Unix time of its start; all other times are relative to it.
    begun: float
    # Time of the last update.
    now: float
    policy: str
    seed: int
    slots: dict[int, str]
    # Guaranteed slots by tenant.
    quotas: dict[str, int]
    jobs: dict[str, LiveJob] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    # Reasons for rejected jobs.
    refused: dict[str, str] = field(default_factory=dict)

    def job(self, name: str) -> LiveJob:
        if name in self.refused:
            raise GulliverError(f"job {name!r} was rejected: {self.refused[name]}")
        if name not in self.jobs:
            raise GulliverError(f"the scheduler has no job {name!r}: {nearest(name, self.jobs)}")
        return self.jobs[name]

    @property
    def measured(self) -> MeasuredSeconds:
        return MeasuredSeconds.of(self.jobs.values())

    def cluster(self) -> JobCluster:
        return JobCluster(max(1, len(self.slots)), self.quotas)


def write_history(spool: Spool, history: ScheduleHistory) -> None:
    values = asdict(replace(history, jobs={}, rounds=[]))
    values["jobs"] = {name: _job_values(job) for name, job in history.jobs.items()}
    values["rounds"] = [
        [r.time, r.cause, [list(c) for c in r.changes], r.why, r.predicted, r.bound]
        for r in history.rounds
    ]
    write_object(spool.path / "schedule.json", values)


def _job_values(job: LiveJob) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in PLAIN}
    values |= {"arrival": job.arrival, "phase": job.phase.name}
    values |= {"assigned": job.assigned, "held": job.held, "alive": sorted(job.alive)}
    values["points"] = [[n, b, speed] for (n, b), speed in job.points.items()]
    values["scaling"] = None if job.scaling is None else asdict(job.scaling)
    values["state"] = {name: getattr(job.state, name) for name in STATE}
    values["segments"] = [[s.begin, s.end, s.slots, s.batch, s.rate] for s in job.segments]
    return values


def read_history(spool: Spool) -> ScheduleHistory | None:
    values = read_object(spool.path / "schedule.json")
    if values is None:
        return None
    jobs, rounds = values.pop("jobs"), values.pop("rounds")
    values["slots"] = {int(slot): node for slot, node in values["slots"].items()}
    found = ScheduleHistory(**values)
    for name, values in jobs.items():
        found.jobs[name] = _job_from(spool, name, values)
    for time, cause, changes, why, predicted, bound in rounds:
        made = tuple(Change(*change) for change in changes)
        found.rounds.append(Round(time, cause, made, why, predicted, bound))
    return found


def _job_from(spool: Spool, name: str, values: Mapping[str, Any]) -> LiveJob:
    job = LiveJob(spool.read(name), values["arrival"], Phase[values["phase"]])
    for key in PLAIN:
        setattr(job, key, values.get(key, getattr(job, key)))
    job.assigned, job.held = tuple(values["assigned"]), tuple(values["held"])
    job.alive = set(values["alive"])
    job.points = {(n, b): speed for n, b, speed in values["points"]}
    job.scaling = None if values["scaling"] is None else Scaling(**values["scaling"])
    for key, value in values["state"].items():
        setattr(job.state, key, value)
    job.segments = [
        Segment(name, begin, end, tuple(slots), batch, rate)
        for begin, end, slots, batch, rate in values["segments"]
    ]
    job.state.job = job.job()
    return job


def take_up(job: LiveJob) -> None:
    """Puts a job of a previous scheduler back into the queue."""
    if not job.phase.over:
        job.phase, job.note = Phase.WAITING, "continued by a new scheduler"
        job.assigned, job.held, job.alive, job.heard = (), (), set(), False
        job.silent = False


def result_of(history: ScheduleHistory) -> Result:
    """Converts the history to a simulator's result; unfinished jobs end now."""
    ran = [job for job in history.jobs.values() if job.segments]
    jobs = tuple(_counted(job) for job in ran)
    slots = [s for job in ran for segment in job.segments for s in segment.slots]
    cluster = JobCluster(max([len(history.slots), 1, *(slot + 1 for slot in slots)]))
    result = Result(jobs, cluster, f"{history.policy}, as it happened")
    for job in ran:
        result.ends[job.name] = history.now if job.ended is None else job.ended
        result.states[job.name] = job.state
    result.segments = sorted(
        (segment for job in ran for segment in job.segments), key=lambda s: s.begin
    )
    result.rounds, result.events = history.rounds, len(history.rounds)
    return result


def _counted(job: LiveJob) -> Job:
    """Returns the job with the samples done so far as its length, for the lower bound."""
    found = job.job()
    if job.phase is Phase.ENDED and job.submission.samples is not None:
        return found
    return replace(found, samples=max(1.0, job.state.done))


def live_page(history: ScheduleHistory) -> str:
    lines = [f"{job.name}: {status_line(job, history)}" for job in history.jobs.values()]
    lines += [f"{name} was rejected: {why}" for name, why in history.refused.items()]
    result = result_of(history)
    if not result.jobs:
        return schedule_page("Jobs", [*lines, "Nothing has run yet."], [])
    return schedule_page("Jobs as they ran", lines, [result])


def status_line(job: LiveJob, history: ScheduleHistory) -> str:
    if job.phase.over:
        return f"{job.phase.value} at {job.ended:.4g} s: {job.note}"
    text = f"{job.phase.value} on {len(job.held)} slots" if job.held else "waits"
    if job.submission.samples is not None:
        text += f", {min(job.progress.get('done', 0.0) / job.submission.samples, 1):.0%} done"
    return f"{text} ({job.note or 'submitted'})"


def expected_ends(history: ScheduleHistory) -> dict[str, float]:
    """Predicts when jobs end if no more arrive, by simulation from the current state."""
    # Silent jobs, and those of unknown length, are excluded and keep their slots.
    silent = {s for job in history.jobs.values() if job.silent for s in job.held}
    here = sorted(set(history.slots) - silent)
    places = {slot: place for place, slot in enumerate(here)}
    present = [
        job
        for job in history.jobs.values()
        if not (job.phase.over or job.silent or job.stopping) and job.submission.samples is not None
    ]
    if not here or not present:
        return {}
    quotas = history.quotas if sum(history.quotas.values()) <= len(here) else {}
    cluster = JobCluster(len(here), quotas)
    policy = make_policy(history.policy, history.seed)
    policy.begin(cluster)
    states = [job.seen(history.now, places, history.measured) for job in present]
    finished = [job.state for job in history.jobs.values() if job.phase is Phase.ENDED]
    return follow(history.now, states, finished, cluster, policy).ends


def live_why(history: ScheduleHistory, name: str) -> list[str]:
    job = history.job(name)
    lines = [f"{name} at {history.now:.4g} s, policy {history.policy}: {status_line(job, history)}"]
    if job.phase.over:
        return lines
    if not job.held:
        lines.append(_holders(history))
    lines += _reasons(history.rounds, name)
    if job.resizes or job.starts:
        lines.append(_measured(job))
    ends = expected_ends(history)
    if name in ends:
        left = ends[name] - history.now
        lines.append(
            f"expected to end at {ends[name]:.4g} s, in {left:.4g} s, if no job arrives"
            + ("" if job.scaling else "; its speed has not been measured yet")
        )
    else:
        lines.append("its end is unknown: it does not report, or was submitted without samples")
    return lines


def _holders(history: ScheduleHistory) -> str:
    held = {job.name: len(job.held) for job in history.jobs.values() if job.held}
    others = ", ".join(f"{name} {n}" for name, n in sorted(held.items(), key=lambda p: -p[1])[:6])
    used = sum(held.values())
    return f"{used} of {len(history.slots)} slots are held ({others or 'nobody'})"


def _reasons(rounds: Sequence[Round], name: str) -> list[str]:
    lines = []
    reasons = [entry for entry in rounds if name in entry.why]
    if reasons:
        entry = reasons[-1]
        lines.append(f"decided at {entry.time:.4g} s ({entry.cause}): {entry.why[name]}")
    for entry in reversed(rounds):
        if any(change.job == name for change in entry.changes):
            return [*lines, describe_change(entry, name)]
    return lines


def _measured(job: LiveJob) -> str:
    parts = [f"its start took {seconds:.3g} s" for seconds in job.starts]
    if job.resizes:
        each = ", ".join(f"{seconds:.3g}" for seconds in job.resizes[-5:])
        parts.append(
            f"its resizes took {each} s; the next is estimated at {job.job().resize_seconds:.3g} s"
        )
    points = [f"{b / speed:.3g} s per step on {n} slots" for (n, b), speed in job.points.items()]
    return "measured: " + "; ".join(parts + points)
