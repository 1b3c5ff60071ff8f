"""Writes the answers on `docs/planning.md` anew: what each command on the page prints now.

`python -m benchmarks._planning_page docs/planning.md` runs every block that begins with
``$ gulliver plan`` and keeps its first three grids. Refusals, sources and the seconds that the
search itself took are left out. The table of weak scaling comes from the kept result of
`benchmarks.scaling`. `--check` only says which answers differ.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

from benchmarks._harness import RESULTS, markdown_table
from gulliver.cli.dispatch import main as command

SCALING = re.compile(r"(<!-- weak scaling -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCK = re.compile(r"```text\n\$ gulliver (plan [^\n]*)\n(.*?)```", re.DOTALL)
GRIDS = 3
WIDTH = "160"  # Columns that a row of the table has, so that none is broken
LEFT_OUT = ("seconds at", "not counted", "refused:", "the model is made for", "each ")


def shown(arguments: str) -> str:
    """Returns what a command prints, as the page shows it."""
    text = StringIO()
    with redirect_stdout(text), mock.patch.dict(os.environ, COLUMNS=WIDTH):
        try:
            command(shlex.split(arguments))
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"gulliver {arguments} ended with {ended.code}") from None
    found, grids = list[str](), 0
    for line in text.getvalue().splitlines():
        if line.startswith("\u2503"):  # the table's head
            found.append("  ".join(["   ", *line.strip("\u2503 ").replace("\u2503", " ").split()]))
        elif line.startswith("\u2502"):  # a row of the table
            grids += 1
            row = "  ".join(cell.strip() for cell in line.strip("\u2502 ").split("\u2502"))
            found += [f"  {row}"] if grids <= GRIDS else []
        elif line and line[0] not in "\u250f\u2503\u2521\u2514" and not line.startswith(LEFT_OUT):
            found.append(re.sub(r"(meshes) in [^,]*,", r"\1,", line))
    return "\n".join(found) + "\n"


def scaling_table() -> str:
    """Efficiency by number of ranks, from the kept result."""
    kept = sorted(RESULTS.glob("scaling_*.md"))[-1].read_text(encoding="utf-8")
    figures = json.loads(kept.split("```json\n")[1].split("\n```")[0])["figures"]
    curves = {name: curve for name, curve in figures.items() if "Llama" in name}
    rows = []
    for ranks in next(iter(curves.values())):
        cells = [f"{int(ranks):,}"]
        for curve in curves.values():
            simulated, measured = curve[ranks]
            cells.append(f"{simulated:.1%}" + (f" ({measured:.1%})" if measured else ""))
        rows.append(cells)
    return markdown_table(["ranks", *curves], rows) + "\n"


def written(page: str) -> str:
    """The page with the answers of now."""
    page = SCALING.sub(lambda m: m[1] + scaling_table() + m[2], page)
    return BLOCK.sub(lambda m: f"```text\n$ gulliver {m[1]}\n{shown(m[1])}```", page)


def main() -> None:
    path, check = Path(sys.argv[1]), "--check" in sys.argv
    page = path.read_text()
    now = written(page)
    if not check:
        path.write_text(now)
    elif now != page:
        old, new = page.splitlines(), now.splitlines()
        sys.exit("\n".join(line for line in new if line not in old) or "answers differ")


if __name__ == "__main__":
    main()
