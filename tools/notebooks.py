"""Writes `docs/notebooks/*.ipynb` from the cells of pages: what precedes ``<!-- end of cells -->``.

`python tools/notebooks.py` writes them; with `--check` it only says which are stale.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOKS = {"first_run": "first-run", "finetune_and_chat": "finetune"}
"""Name of each notebook, and of the page that it is made of."""

CELL = re.compile(r"<!-- cell -->\n```python\n(.*?)```\n", re.DOTALL)
OWN_LINK = re.compile(
    r"\s*They are also a \[notebook\]\([^)]*\)\.|, and as a\s+\[notebook\]\([^)]*\)"
)


def cells(page: Path) -> list[tuple[str, str]]:
    """Returns kind and source of a page's cells: text and code in turns."""
    tutorial = page.read_text(encoding="utf-8").partition("<!-- end of cells -->")[0]
    parts = CELL.split(OWN_LINK.sub("", tutorial))
    kinds = ("markdown", "code")
    return [(kinds[n % 2], part.strip()) for n, part in enumerate(parts) if part.strip()]


def notebook(page: Path) -> str:
    """Returns the notebook of a page, as JSON."""
    made = []
    for number, (kind, source) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell |= {"execution_count": None, "outputs": []} if kind == "code" else {}
        made.append({**cell, "source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    values = {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(values, indent=1) + "\n"


def notebooks() -> dict[Path, str]:
    """Returns the notebooks as they should be."""
    folder = DOCS / "notebooks"
    return {folder / f"{name}.ipynb": notebook(DOCS / f"{p}.md") for name, p in NOTEBOOKS.items()}


def main() -> None:
    """Writes the notebooks, or checks them."""
    stale = [p for p, text in notebooks().items() if not p.is_file() or p.read_text() != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"stale: {', '.join(path.name for path in stale)}; run python tools/notebooks.py")
    for path, text in notebooks().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
