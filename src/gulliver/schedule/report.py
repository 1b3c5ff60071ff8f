"""Explains a job's slots and its expected end.

The expected end is exact for the policy: the trace is simulated again without later arrivals.
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
    """Explains a job's allocation at one moment.

    Args:
        trace: jobs.
        cluster: slots and quotas.
        policy: scheduling policy.
        name: job.
        at: time in seconds; None for the job's arrival.

    Returns:
        Lines with its slots and the reason, the last change and its cause, the expected end if no
        job arrives later, and the end in the full trace.

    Raises:
        GulliverError: the job is unknown, or the time is before its arrival.
    """
    known = {job.name: job for job in trace}
    if name not in known:
        raise GulliverError(f"no job {name!r} in the trace: {nearest(name, known)}")
    job = known[name]
    moment = job.arrival if at is None else at
    if moment < job.arrival:
        raise GulliverError(f"job {name!r} arrives at {job.arrival:g} s; use that time or later")
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
        f"expected to end at {end:.4g} s, in {end - moment:.4g} s, if no job arrives; with the "
        f"rest of the trace it ends at {whole.ends[name]:.4g} s"
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
        state = "runs" if segment.rate else "resizing, no progress yet"
        return (
            f"{state} on {len(segment.slots)} slots (requested {job.slots}), batch {segment.batch}"
            + _where(result.cluster, job, segment)
        )
    used = sum(len(segment.slots) for segment in held.values())
    others = ", ".join(
        f"{s.job} {len(s.slots)}" for s in sorted(held.values(), key=lambda s: -len(s.slots))[:6]
    )
    return f"waits: {used} of {result.cluster.slots} slots are held ({others or 'nobody'})"


def _where(cluster: JobCluster, job: Job, segment: Segment) -> str:
    """Names a job's nodes, and its loss of goodput from spanning several."""
    if cluster.nodes == 1:
        return ""
    parts = cluster.parts(segment.slots)
    text = " + ".join(f"{part} on node {node}" for node, part in enumerate(parts) if part)
    loss = cluster.loss(job, segment.batch, parts)
    return f"; {text}" + (f", {loss:.1%} slower than with the best placement" * (loss > 0))


def _history(result: Result, name: str, moment: float) -> list[str]:
    lines = []
    past = [entry for entry in result.rounds if entry.time <= moment]
    reasons = [entry for entry in past if name in entry.why]
    if reasons:
        entry = reasons[-1]
        lines.append(f"decided at {entry.time:.4g} s ({entry.cause}): {entry.why[name]}")
    for entry in reversed(past):
        for change in entry.changes:
            if change.job == name:
                lines.append(describe_change(entry, name))
                return lines
    return lines


def describe_change(entry: Round, name: str) -> str:
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
    return text + (f"; other changes: {', '.join(others)}" if others else "")


# Renders schedules as a self-contained HTML file: slots over time.


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
"""Colors of jobs, cyclic (Tol's bright and muted schemes)."""
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
    """Formats a result's statistics as a row under `HEADS`; seconds unless noted there."""
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
    """Renders simulations of one trace as HTML: a table of statistics, then a chart for each."""
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
    """Draws an SVG: rows are slots, bars are jobs (pale while resizing), ticks are arrivals."""
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
            + (f"{segment.rate:.4g} effective samples/s" if segment.rate else "resizes")
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
