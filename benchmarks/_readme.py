"""Puts a demonstration into the README: `python -m benchmarks._readme out/demo`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

MARKS = re.compile(r"(<!-- demo -->\n).*?(<!-- /demo -->)", re.DOTALL)


def main(demo: Path, root: Path) -> None:
    lines = (demo / "report.md").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if line.startswith(("|", "- autoencoder", "- training"))]
    chosen += [line for line in lines if line.startswith(("- all in", "- machine"))]
    table = [line for line in chosen if line.startswith("|")]
    facts = [line for line in chosen if line.startswith("-")]
    text = "\n".join([*table, "", *facts]) + "\n"
    readme = root / "README.md"
    content = readme.read_text(encoding="utf-8")
    readme.write_text(MARKS.sub(lambda m: m[1] + text + m[2], content), encoding="utf-8")
    assets = root / "docs" / "assets"
    assets.mkdir(exist_ok=True)
    shutil.copy(demo / "sheet.gif", assets / "sheet.gif")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).parent.parent)
