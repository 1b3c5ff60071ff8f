"""Puts the tables of models and quirks into their page: `python -m benchmarks._models_page`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from benchmarks._harness import markdown_table
from gulliver.models import CONFIGURATIONS, QUIRKS, build
from gulliver.models.configurations import QUIRKS_OF

PAGE = Path(__file__).parent.parent / "docs" / "video-models.md"


def models_table() -> str:
    """A line for each public model."""
    rows = []
    for name, one in CONFIGURATIONS.items():
        with torch.device("meta"):
            model = build(name)
        count = sum(p.numel() for p in model.parameters())
        frames, height, width = one.clip
        latent = " x ".join(map(str, one.latent(*one.clip)))
        given = ", ".join(one.conditions) or "nothing"
        rows.append(
            (
                f"`{name}`",
                one.release,
                f"`{one.kind}`",
                f"{count / 1e9:.2f} B",
                f"{frames} x {height} x {width} ({latent})",
                " + ".join(one.text),
                given,
                one.note,
            )
        )
    head = ("name", "release", "class", "parameters", "usual clip (latent)", "text encoder")
    return markdown_table((*head, "can be given", ""), rows)


def quirks_table() -> str:
    rows = [
        (f"`{name}`", ", ".join(k for k, names in QUIRKS_OF.items() if name in names), reason)
        for name, reason in QUIRKS.items()
    ]
    return markdown_table(("quirk", "models", "why weights need it"), rows)


def filled(text: str) -> str:
    """The page with its tables as they are now."""
    for mark, table in (("models", models_table()), ("quirks", quirks_table())):
        pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
        text = pattern.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
