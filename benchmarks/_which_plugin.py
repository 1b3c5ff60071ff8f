"""Puts a table of memory into a page: `python -m benchmarks._which_plugin docs/which-plugin.md`.

For models of several sizes on several numbers of devices: the plugin that sends least of those
whose parameters, gradients and optimizer state fit. The formulas are those of a plan, without the
few chunks that are under way and without padding; a test holds them against plans.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks._harness import markdown_table

SIZES = {"0.1 B": 1.24e8, "1 B": 1e9, "3 B": 3e9, "7 B": 7e9, "13 B": 1.3e10, "70 B": 7e10}
DEVICES = (1, 2, 4, 8, 16, 64)
MEMORIES = (24, 80)  # GB of a device
SHARE = 0.6
"""Of a device's memory that the state may take; the rest is for activations and libraries."""
MARKS = re.compile(r"(<!-- which -->\n).*?(<!-- /which -->)", re.DOTALL)


def state_bytes(stage: int | None, ranks: int, half: bool = False) -> float:
    """Bytes on each rank for each trained parameter, with AdamW.

    Returns:
        Parameters, gradients, float32 copies and two moments.
    """
    size = 2 if half else 4
    copy = 4 if half else 0
    if ranks == 1 or not stage:
        return size + size + copy + 8
    parameters = {1: size, 2: size, 3: 0 if half else size / ranks}[stage]
    return parameters + (4 + copy + 8) / ranks


CHOICES = {"DDP": (None, False), "stage 1": (1, True), "stage 3": (3, True)}
"""What is tried, in this order: with each the ranks send more, or compute in fewer bits."""


def choose(parameters: float, ranks: int, memory: float) -> str:
    """The first of `CHOICES` that fits, and the GB that it takes on each rank; or no."""
    for name, (stage, half) in CHOICES.items():
        needed = parameters * state_bytes(stage, ranks, half) / 1e9
        if needed <= SHARE * memory and (ranks > 1 or stage is None):
            return f"{'no plugin' if ranks == 1 else name}, {needed:.2g}"
    return "no"


def table(memory: int) -> str:
    """One for devices of `memory` GB."""
    columns = ["parameters", *(f"{n} x {memory} GB" for n in DEVICES)]
    rows = [[name, *(choose(p, n, memory) for n in DEVICES)] for name, p in SIZES.items()]
    return markdown_table(columns, rows)


def main(path: Path) -> None:
    text = "\n\n".join(table(memory) for memory in MEMORIES) + "\n"
    content = path.read_text(encoding="utf-8")
    path.write_text(MARKS.sub(lambda m: m[1] + text + m[2], content), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
