"""Explains why a job has its slots and when it should end.

The expected end is not an estimate: the trace is simulated again with the jobs that have arrived by
then and no others, so it is what the policy would do if no more came.
"""

from __future__ import annotations

from collections.abc import Sequence

from gulliver.errors import GulliverError, nearest
from gulliver.schedule._jobs import Job, JobCluster
from gulliver.schedule._result import Result, Round, Segment
from gulliver.schedule._simulator import simulate
from gulliver.schedule._state import Policy


def why(
    trace: Sequence[Job], cluster: JobCluster, policy: Policy, name: str, at: float | None = None
) -> list[str]:
    """Explains a job at one moment.

    Args:
        trace: jobs.
        cluster: slots and quotas.
        policy: rule of who gets what.
        name: job.
        at: second to look at; None for that of its arrival.

    Returns:
        Lines: its slots and why, the last change of them and what caused it, when it should end if
        no job comes after that moment, and when it ends in the whole trace.

    Raises:
        GulliverError: no job of that name, or a moment before its arrival.
    """
    known = {job.name: job for job in trace}
    if name not in known:
        raise GulliverError(f"no job {name!r} in the trace: {nearest(name, known)}")
    job = known[name]
    moment = job.arrival if at is None else at
    if moment < job.arrival:
        raise GulliverError(f"job {name!r} comes at {job.arrival:g} s: give a moment from then on")
    whole = simulate(trace, cluster, policy)
    expected = whole
    if any(other.arrival > moment for other in trace):
        expected = simulate(trace, cluster, policy, until=moment)
    if whole.ends[name] <= moment:
        return [f"{name} ended at {whole.ends[name]:.4g} s"]
    lines = [f"{name} at {moment:.4g} s, policy {whole.policy}: {_now(whole, job, moment)}"]
    lines += _history(whole, name, moment)
    end = expected.ends[name]
    lines.append(
        f"should end at {end:.4g} s, in {end - moment:.4g} s, if no job comes; with those that the "
        f"trace has it ends at {whole.ends[name]:.4g} s"
    )
    if job.deadline is not None:
        lines.append(
            f"deadline at {job.deadline:.4g} s: {'met' if end <= job.deadline else 'missed'}"
        )
    return lines


def _now(result: Result, job: Job, moment: float) -> str:
    held = {s.job: s for s in result.segments if s.begin <= moment < s.end}
    if job.name in held:
        segment = held[job.name]
        state = "runs" if segment.rate else "resizes, and makes no progress yet"
        return (
            f"{state} on {len(segment.slots)} slots (asked for {job.slots}), batch {segment.batch}"
            + _where(result.cluster, job, segment)
        )
    used = sum(len(segment.slots) for segment in held.values())
    others = ", ".join(
        f"{s.job} {len(s.slots)}" for s in sorted(held.values(), key=lambda s: -len(s.slots))[:6]
    )
    return f"waits: {used} of {result.cluster.slots} slots are held ({others or 'nobody'})"


def _where(cluster: JobCluster, job: Job, segment: Segment) -> str:
    """Names a job's nodes, and what it loses by spanning several."""
    if cluster.nodes == 1:
        return ""
    parts = cluster.parts(segment.slots)
    text = " + ".join(f"{part} of node {node}" for node, part in enumerate(parts) if part)
    loss = cluster.loss(job, segment.batch, parts)
    return f"; {text}" + (f", {loss:.1%} slower than where it would lie best" * (loss > 0))


def _history(result: Result, name: str, moment: float) -> list[str]:
    """The last reason that the policy gave, and the last change."""
    lines = []
    past = [entry for entry in result.rounds if entry.time <= moment]
    reasons = [entry for entry in past if name in entry.why]
    if reasons:
        entry = reasons[-1]
        lines.append(f"said at {entry.time:.4g} s ({entry.cause}): {entry.why[name]}")
    for entry in reversed(past):
        for change in entry.changes:
            if change.job == name:
                lines.append(told_change(entry, name))
                return lines
    return lines


def told_change(entry: Round, name: str) -> str:
    """Describes how a decision has changed a job's slots, and whose slots it took."""
    change = next(change for change in entry.changes if change.job == name)
    verb = "grew" if change.after > change.before else "shrank"
    if change.after == change.before:
        return f"moved to other slots at {entry.time:.4g} s, when {entry.cause}"
    verb = "started" if not change.before else verb if change.after else "was paused"
    text = f"{verb} at {entry.time:.4g} s from {change.before} to {change.after} slots, when "
    text += entry.cause
    others = [
        f"{other.job} {other.before} to {other.after}"
        for other in entry.changes
        if other.job != name and (other.after > other.before) != (change.after > change.before)
    ]
    return text + (f"; against it: {', '.join(others)}" if others else "")
