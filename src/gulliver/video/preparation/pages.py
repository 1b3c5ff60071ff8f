"""Renders a table as a self-contained HTML page.

It has a histogram of each numeric column, then the clips: three frames each, with their columns. It
loads nothing and runs no script.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.io.files import write_text
from gulliver.video.preparation.packets import take_samples
from gulliver.video.preparation.table import Table, read_broken
from gulliver.video.preparation.work import FileOutcome, work_on

FRAMES = 3
"""Relative positions of a clip's frames: beginning, middle and end."""
SIDE = 160
"""Maximum pixels of a frame's longer side."""
BARS = 32
"""Bars of a histogram."""
HIDDEN = ("path", "text", "phash")
"""Columns that are not listed below a clip."""
STYLE = """
body{background:#101218;color:#eceef2;font:14px system-ui,sans-serif;margin:24px}
h1{font-size:20px}h2{font-size:16px;color:#8c929e;margin-top:32px}
.charts,.clips{display:flex;flex-wrap:wrap;gap:16px}
figure{margin:0;background:#1a1d26;border-radius:8px;padding:10px}
.clips figure{max-width:500px}
img{display:block;max-width:100%}
figcaption{margin-top:6px;overflow-wrap:anywhere}
small{color:#8c929e}svg{display:block}
li{overflow-wrap:anywhere}
"""


def show(table: Table, out: Path, most: int = 200, workers: int = 0) -> int:
    if out.suffix not in (".html", ".htm"):
        raise GulliverError(f"--out {out.name} is a web page and must end in .html")
    taken = np.unique(np.linspace(0, len(table) - 1, min(most, len(table))).round().astype(int))
    chosen = table.rows(taken.tolist()) if len(table) else table
    # Pictures are fast to create, but a page of thousands of clips may be interrupted.
    with work_on(chosen.clips(), _strip, out, "show", "", workers) as outcomes:
        rows = chosen.data.to_pylist()
        cards = [_card(row, outcome) for row, outcome in zip(rows, outcomes, strict=True)]
        write_text(out, "".join(_page(table, cards)))
    return len(cards)


def _page(table: Table, cards: Sequence[str]) -> Iterator[str]:
    name, broken = html.escape(table.path.name), read_broken(table.path)
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
    yield f"<style>{STYLE}</style><h1>{name}: {len(table):,} clips</h1>"
    yield '<div class="charts">'
    for column, values in _numbers(table):
        yield _histogram(column, values)
    yield f'</div><h2>{len(cards):,} of {len(table):,} clips</h2><div class="clips">'
    yield from cards
    yield "</div>"
    if broken:
        yield f"<h2>{len(broken):,} unusable files</h2><ul>"
        for path, step, reason in broken:
            yield f"<li>{html.escape(path)} <small>{html.escape(f'{step}: {reason}')}</small></li>"
        yield "</ul>"
    yield "</html>\n"


def _numbers(table: Table) -> Iterator[tuple[str, np.ndarray]]:
    for name in table.names:
        kind = str(table.data.schema.field(name).type)
        if kind.startswith(("int", "uint", "float", "double", "halffloat")):
            values = [value for value in table.column(name) if value is not None]
            found = np.array(values, np.float64)
            found = found[np.isfinite(found)]
            if len(found):
                yield name, found


def _histogram(name: str, values: np.ndarray, width: int = 260, height: int = 90) -> str:
    counts, _ = np.histogram(values, BARS)
    step, most = width / BARS, max(1, counts.max())
    bars = "".join(
        f'<rect x="{place * step:.1f}" y="{height - tall:.1f}" width="{step - 1:.1f}" '
        f'height="{tall:.1f}"><title>{count:,}</title></rect>'
        for place, count in enumerate(counts.tolist())
        for tall in [height * count / most]
        if count
    )
    ends = " · ".join(
        f"{what} {_short(value)}"
        for what, value in (
            ("least", values.min()),
            ("median", float(np.median(values))),
            ("most", values.max()),
        )
    )
    return (
        f'<figure><svg width="{width}" height="{height}" fill="#5b8fd6">{bars}</svg>'
        f"<figcaption>{html.escape(name)}<br><small>{ends}</small></figcaption></figure>"
    )


def _strip(path: Path) -> dict[str, Any]:
    from PIL import Image

    samples = take_samples(path, FRAMES, SIDE)
    still = (samples.pictures == samples.pictures[:1]).all()
    pictures = samples.pictures[: 1 if still else FRAMES]
    content = io.BytesIO()
    Image.fromarray(np.concatenate(list(pictures), axis=1)).save(content, "JPEG", quality=80)
    return {"jpeg": base64.b64encode(content.getvalue()).decode()}


def _card(row: dict[str, Any], outcome: FileOutcome) -> str:
    facts = ", ".join(
        f"{name} {_short(value)}"
        for name, value in row.items()
        if name not in HIDDEN and value is not None
    )
    picture = (
        f'<img loading="lazy" alt="" src="data:image/jpeg;base64,{outcome.values["jpeg"]}">'
        if outcome.problem is None
        else f"<b>{html.escape(outcome.problem)}</b>"
    )
    text = html.escape(str(row.get("text") or ""))
    path = html.escape(str(row.get("path")))
    return (
        f"<figure>{picture}<figcaption>{text}<br><small>{path}<br>{html.escape(facts)}</small>"
        "</figcaption></figure>"
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
