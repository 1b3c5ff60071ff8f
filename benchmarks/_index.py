"""Gathers the kept results into one page: `python -m benchmarks._index docs/benchmarks.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks._harness import RESULTS

HEAD = """# Benchmarks

Written by `make bench` from `benchmarks/results`. `python -m benchmarks.NAME` runs one.
"""


def main(path: Path) -> None:
    """Writes the page, newest result of each claim and machine last."""
    results = sorted(RESULTS.glob("*.md"))
    parts = [result.read_text(encoding="utf-8").replace("# ", "## ", 1) for result in results]
    path.write_text("\n".join([HEAD, *parts]), encoding="utf-8")
    print(f"{path}: {len(results)} results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
