"""A page of what quantisation did to a model: one file, for a browser."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }
td { padding: 1px 8px; white-space: nowrap } .bar { background: #47a; height: 0.8em }
figure { display: inline-block; margin: 0 1em 1em 0 } img { max-width: 28em; min-width: 12em }
"""


def write_page(
    path: Path,
    title: str,
    lines: Sequence[str],
    errors: Mapping[str, tuple[str, float]],
    pictures: Mapping[str, tuple[Any, Any]],
) -> None:
    """Writes a page with figures, a bar for each layer's error, and pictures side by side."""
    most = max((error for _, error in errors.values()), default=0.0) or 1.0
    bars = "".join(
        f"<tr><td>{html.escape(name)}<td>{format}<td>{error:.3%}"
        f'<td><div class="bar" style="width:{400 * error / most:.0f}px"></div>'
        for name, (format, error) in errors.items()
    )
    shown = "".join(
        f"<h2>{html.escape(name)}</h2>{_figure('before', one)}{_figure('after', other)}"
        for name, (one, other) in pictures.items()
    )
    told = "".join(f"<li>{html.escape(line)}" for line in lines)
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><ul>{told}</ul>{shown}"
        f"<h2>Relative error of each weight</h2><table>{bars}</table>\n",
        encoding="utf-8",
    )


def _figure(name: str, picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return f'<figure><img src="data:image/png;base64,{data}"><figcaption>{name}</figure>'
