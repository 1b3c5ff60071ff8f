"""A simulated schedule to look at: slots over time, as one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gulliver.schedule._result import Result

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
