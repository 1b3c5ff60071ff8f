"""Gathers the kept results into one page: `python -m benchmarks._index docs/benchmarks.md`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from benchmarks._harness import RESULTS

HEAD = """# Benchmarks

Written by `make bench` from `benchmarks/results`. `python -m benchmarks.NAME` runs one.
"""


PICTURES = "assets/benchmarks"
"""Where the page's pictures are: what is built from the docs alone has to find them."""


def main(path: Path) -> None:
    """Writes the page, newest result of each claim and machine last, and its pictures beside it."""
    results = sorted(RESULTS.glob("*.md"))
    folder = path.parent / PICTURES
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts = [_part(result, folder) for result in results]
    path.write_text("\n".join([HEAD, *parts]), encoding="utf-8")
    print(f"{path}: {len(results)} results")


def _part(result: Path, folder: Path) -> str:
    """A result as a part of the page."""
    text = result.read_text(encoding="utf-8").replace("# ", "## ", 1)

    def kept(match: re.Match[str]) -> str:
        shutil.copy(RESULTS / match[2], folder / match[2])
        return f"![{match[1]}]({PICTURES}/{match[2]})"

    return re.sub(r"!\[([^]]*)\]\(([^)/]+\.png)\)", kept, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
