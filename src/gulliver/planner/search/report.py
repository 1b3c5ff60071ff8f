"""HTML report of a search, in a single file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gulliver.hardware.offload import rate_text, seconds_text
from gulliver.options import size_text
from gulliver.planner.search.grids import Found, Price
from gulliver.planner.search.score import Scored

SECONDS = {
    "compute": "#4477aa",
    "recompute": "#66ccee",
    "exposed": "#ee6677",
    "bubble": "#ccbb44",
    "update": "#228833",
}
"""Kinds of seconds that add up to a step, and their colors (Tol's bright scheme)."""
BYTES = {
    "parameters": "#4477aa",
    "gradients": "#ccbb44",
    "optimizer_state": "#228833",
    "activations": "#aa3377",
    "working": "#bbbbbb",
}
WIDTH, ROW = 640, 22
STYLE = """body{font:15px sans-serif;max-width:1000px;margin:2em auto;color:#222}
table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #ddd}
td.n{text-align:right}svg{display:block;margin:1em 0}pre{white-space:pre-wrap}"""


def kinds_of_time(scored: Scored) -> dict[str, float]:
    """Seconds of a step by kind, summing to the step."""
    return {kind: getattr(scored.seconds, kind) for kind in SECONDS}


def kinds_of_bytes(scored: Scored) -> dict[str, int]:
    """Bytes of the fullest rank by kind."""
    return {**vars(scored.memory), "working": scored.working}


def report(title: str, lines: Sequence[str], found: Found, prices: Sequence[Price] = ()) -> str:
    """Renders a search as HTML."""
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    if found.best:
        parts += _pictures(found, prices)
    if found.refused:
        rows = [(mesh, why) for mesh, why in found.refused.items()]
        parts += ["<h2>Refused</h2>", _table(("mesh", "why"), rows)]
    parts.append(f"<p>Constants: {escape(found.cluster.name)}. {escape(found.cluster.source)}</p>")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _pictures(found: Found, prices: Sequence[Price]) -> list[str]:
    best = found.best
    names = [f"{number}. {scored.grid}" for number, scored in enumerate(best, 1)]
    rows = [
        (
            str(s.grid),
            seconds_text(s.seconds.step),
            rate_text(s.samples / s.seconds.step),
            size_text(s.bytes)
            + (f", {size_text(s.moved.leaves.total)} behind it" if s.moved is not None else ""),
        )
        for s in best
    ]
    seconds = [kinds_of_time(scored) for scored in best]
    held = [kinds_of_bytes(scored) for scored in best]
    parts = [
        "<h2>The fastest grids</h2>",
        _table(("grid", "step", "samples/s", "memory of a rank"), rows),
        "<h2>Where the time goes</h2>",
        _bars(names, seconds, SECONDS, [seconds_text(s.seconds.step) for s in best]),
        "<h2>Memory of a rank</h2>",
        _bars(names, held, BYTES, [size_text(s.bytes) for s in best], found.limit),
    ]
    known = [(p.limit, p.scored.seconds.step) for p in prices if p.scored is not None]
    if len(known) > 1:
        parts += ["<h2>The price of memory</h2>", _curve(known)]
    return parts


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _bars(
    names: Sequence[str],
    parts: Sequence[Mapping[str, float]],
    colors: Mapping[str, str],
    ends: Sequence[str],
    limit: float = 0,
) -> str:
    """Stacked bars with names and a line at the limit."""
    largest = max(max(sum(part.values()) for part in parts), limit) or 1.0
    height = 2 * ROW * len(names) + 2 * ROW
    drawn = []
    for number, (name, part, end) in enumerate(zip(names, parts, ends, strict=True)):
        y, x = 2 * ROW * number, 0.0
        drawn.append(f'<text x="0" y="{y + 15}" font-size="12">{escape(name)}</text>')
        for kind, value in part.items():
            width = WIDTH * value / largest
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + ROW}" width="{width:.1f}" height="16" '
                f'fill="{colors[kind]}"><title>{kind}: {value:.6g}</title></rect>'
            )
            x += width
        drawn.append(
            f'<text x="{x + 5:.1f}" y="{y + ROW + 13}" font-size="12">{escape(end)}</text>'
        )
    if limit:
        at = WIDTH * limit / largest
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 2 * ROW}" stroke="#222" '
            'stroke-dasharray="4"><title>limit</title></line>'
        )
    for number, (kind, color) in enumerate(colors.items()):
        x, y = 150 * number, height - ROW
        drawn.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{color}"/>')
        name = kind.replace("_", " ")
        drawn.append(f'<text x="{x + 16}" y="{y + 11}" font-size="12">{name}</text>')
    return _svg(WIDTH + 120, height, drawn)


def _curve(points: Sequence[tuple[int, float]]) -> str:
    """Seconds of a step over the memory that a rank may hold."""
    height, left = 220, 70
    low, high = points[0][0], points[-1][0]
    most = max(step for _, step in points)

    def at(limit: int, step: float) -> tuple[float, float]:
        x = left + (WIDTH - left) * (limit - low) / max(1, high - low)
        return x, height - 40 - (height - 60) * step / most

    places = [at(*point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [f'<polyline points="{line}" fill="none" stroke="#4477aa" stroke-width="2"/>']
    for (x, y), (limit, step) in zip(places, points, strict=True):
        told = f"{size_text(limit)}: {seconds_text(step)}"
        drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4477aa"><title>{told}</title></circle>'
        )
        drawn.append(f'<text x="{x - 20:.1f}" y="{y - 8:.1f}" font-size="11">{told}</text>')
    return _svg(WIDTH + 160, height, drawn)


def _svg(width: int, height: int, drawn: Sequence[str]) -> str:
    return f'<svg width="{width}" height="{height}" role="img">' + "".join(drawn) + "</svg>"
