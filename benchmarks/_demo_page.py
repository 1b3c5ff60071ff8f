"""Puts a demonstration into docs/demo.md: `python -m benchmarks._demo_page out/demo`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from PIL import Image, ImageSequence

HEIGHT, WIDTH, COLOURS = 730, 730, 16
"""Rows of the contact sheet that the page shows, its width there and colours: below 1 MB."""
MARKS = re.compile(r"(<!-- demo -->\n).*?(<!-- /demo -->)", re.DOTALL)


def main(demo: Path, root: Path) -> None:
    lines = (demo / "report.md").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if line.startswith(("|", "- autoencoder", "- training"))]
    chosen += [line for line in lines if line.startswith(("- total", "- machine"))]
    table = [line for line in chosen if line.startswith("|")]
    facts = [line for line in chosen if line.startswith("-")]
    text = "\n".join([*table, "", *facts]) + "\n"
    page = root / "docs" / "demo.md"
    content = page.read_text(encoding="utf-8")
    page.write_text(MARKS.sub(lambda m: m[1] + text + m[2], content), encoding="utf-8")
    shrink(demo / "sheet.gif", root / "docs" / "assets" / "sheet.gif")


def shrink(sheet: Path, to: Path) -> None:
    """Writes the upper part of an animated contact sheet, smaller."""
    with Image.open(sheet) as image:
        size = WIDTH, HEIGHT * WIDTH // image.width
        box, pause = (0, 0, image.width, HEIGHT), image.info["duration"]
        frames = [
            frame.convert("RGB").crop(box).resize(size).quantize(COLOURS, dither=Image.Dither.NONE)
            for frame in ImageSequence.Iterator(image)
        ]
    frames[0].save(to, save_all=True, append_images=frames[1:], duration=pause, loop=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent.parent)
