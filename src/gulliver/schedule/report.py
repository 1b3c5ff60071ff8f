"""Explains why a job has its slots and when it should end.

The expected end is not an estimate: the trace is simulated again with the jobs that have arrived by
then and no others, so it is what the policy would do if no more came.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gulliver.errors import GulliverError, nearest
from gulliver.schedule.jobs import Job, JobCluster
from gulliver.schedule.simulator import Result, Round, Segment, simulate
from gulliver.schedule.state import Policy


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
                lines.append(describe_change(entry, name))
                return lines
    return lines


def describe_change(entry: Round, name: str) -> str:
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


# A simulated schedule to look at: slots over time, as one HTML file that needs no other.


WIDTH, LEFT, HEIGHT = 980, 60, 420
COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#999933",
    "#882255",
    "#44bb99",
)
"""Colors of jobs in turn (Tol's bright and muted schemes)."""
IDLE = "#eeeeee"
STYLE = """body{font:15px sans-serif;max-width:1080px;margin:2em auto;color:#222}
table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
svg{display:block;margin:.5em 0}"""

HEADS = (
    "policy", "mean", "median", "p95", "waits", "makespan", "slot hours", "used", "resizes",
    "late", "x bound", "gap",
)  # fmt: skip


def summary_row(result: Result) -> list[str]:
    """Figures of a result as text, under `HEADS`; seconds unless the head says otherwise."""
    found, gaps = result.summary(), result.gaps
    return [
        result.policy,
        *(f"{value:.1f}" for value in (found.mean, found.median, found.p95, found.wait)),
        f"{found.makespan:.0f}",
        f"{found.gpu_hours:.2f}",
        f"{found.used:.0%}",
        str(found.resizes),
        str(found.missed),
        f"{found.to_bound:.2f}",
        f"{sum(gaps) / len(gaps):.0%}" if gaps else "",
    ]


def schedule_page(title: str, lines: Sequence[str], results: Sequence[Result]) -> str:
    """Draws schedules as HTML: the table of figures, then slots over time of each.

    Args:
        title: heading.
        lines: paragraphs to begin with.
        results: simulations of one trace.
    """
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    parts.append(_table([summary_row(result) for result in results]))
    end = max((max(result.ends.values()) for result in results), default=0.0)
    for result in results:
        parts.append(f"<h2>{escape(result.policy)}</h2>{_chart(result, end)}")
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _chart(result: Result, end: float) -> str:
    """Rows are slots; a job's bar says who it is, pale while it resizes; ticks are arrivals."""
    slots = result.cluster.slots
    row = HEIGHT / slots
    scale = (WIDTH - LEFT) / end
    color = {job.name: COLORS[n % len(COLORS)] for n, job in enumerate(result.jobs)}
    drawn = [
        f'<rect x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{HEIGHT}" fill="{IDLE}"/>',
        '<text x="0" y="12" font-size="12">slot 0</text>',
        f'<text x="0" y="{HEIGHT - 2}" font-size="12">slot {slots - 1}</text>',
    ]
    for segment in result.segments:
        label = (
            f"{segment.job}: {segment.begin:.4g} to {segment.end:.4g} s on {len(segment.slots)} "
            f"slots, batch {segment.batch}, "
            + (f"{segment.rate:.4g} samples/s that count" if segment.rate else "resizes")
        )
        for first, last in _runs(segment.slots):
            drawn.append(
                f'<rect x="{LEFT + scale * segment.begin:.1f}" y="{row * first:.1f}" '
                f'width="{max(0.3, scale * (segment.end - segment.begin)):.1f}" '
                f'height="{row * (last - first + 1):.1f}" fill="{color[segment.job]}" '
                f'fill-opacity="{1 if segment.rate else 0.35}" stroke="#fff" stroke-width="0.3">'
                f"<title>{escape(label)}</title></rect>"
            )
    for job in result.jobs:
        x = LEFT + scale * job.arrival
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT}" y2="{HEIGHT + 8}" '
            f'stroke="{color[job.name]}"><title>{escape(job.name)} comes</title></line>'
        )
    label = f"0 to {end:.4g} s; ticks: arrivals; pale: resizing"
    drawn.append(f'<text x="{LEFT}" y="{HEIGHT + 22}" font-size="12">{label}</text>')
    return f'<svg width="{WIDTH}" height="{HEIGHT + 28}" role="img">' + "".join(drawn) + "</svg>"


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = (runs[-1][0], slot)
        else:
            runs.append((slot, slot))
    return runs


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADS)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
