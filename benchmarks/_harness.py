"""What benchmarks share: alternating runs, medians, the table, the JSON line, the kept result.

A benchmark is ``python -m benchmarks.NAME``. It measures its contestants with `alternate`, fills a
`Report` and ends with `finish`: a table for people, then one line of JSON for machines. ``--keep``
writes the table, the line and where they come from to ``benchmarks/results``.

It does not know what is measured, nor how ranks are started.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
VECTORS = re.compile(r"sse4_2|avx\w*|fma|vpclmulqdq|pclmulqdq|amx\w*")
"""Flags of /proc/cpuinfo that are kept with a result."""


@dataclass(frozen=True)
class Bar:
    """A figure and the limit that it is held against."""

    name: str
    value: float
    bar: float
    holds: bool


def at_most(name: str, value: float, bar: float) -> Bar:
    """A bar that holds when the value is not above it."""
    return Bar(name, value, bar, value <= bar)


def at_least(name: str, value: float, bar: float) -> Bar:
    """A bar that holds when the value is not below it."""
    return Bar(name, value, bar, value >= bar)


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, which a busy moment does not move."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    def shown(self, form: str = ".2f", unit: float = 1.0) -> str:
        """Median and quartiles as text, in units of so much."""
        low, middle, high = (f"{v / unit:{form}}" for v in (self.low, self.median, self.high))
        return f"{middle} ({low} to {high})"

    def _quartiles(self) -> list[float]:
        if len(self.values) < 2:
            return list(self.values) * 3
        return statistics.quantiles(self.values, n=4, method="inclusive")


def turns(names: Sequence[str], rounds: int, first: int = 0) -> Iterator[tuple[int, str]]:
    """Yields the number of a round and a name; every second round runs backwards."""
    # Nobody always follows the same neighbour.
    for number in range(first, rounds):
        for name in names[:: 1 if number % 2 == 0 else -1]:
            yield number, name


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, Spread]:
    """Lets contestants take turns, so that a busy machine is charged to all alike."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number, name in turns(list(contestants), rounds, -warm_up):
        value = contestants[name]()
        if number >= 0:
            found[name].append(value)
    return {name: Spread(tuple(values)) for name, values in found.items()}


@dataclass
class Report:
    """Report of a benchmark."""

    claim: str  # in a word or two, the name of its result files
    title: str  # of the table
    columns: Sequence[str]  # of the table
    rows: list[Sequence[str]] = field(default_factory=list)  # of the table, as text
    figures: dict[str, Any] = field(default_factory=dict)  # for the JSON line
    bars: list[Bar] = field(default_factory=list)  # what must hold
    # lines under the table: what was run, what was not
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The line that ends a benchmark's output."""
        return json.dumps(
            {
                "claim": self.claim,
                "hardware": hardware(),
                "instructions": instructions(),
                "commit": commit(),
                "figures": self.figures,
                "bars": [asdict(bar) for bar in self.bars],
            }
        )

    def to_markdown(self) -> str:
        """The result as it is kept."""
        import torch

        command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}"
        return "\n".join(
            [
                f"# {self.title}",
                "",
                f"- date {date.today()}, commit {commit()}",
                f"- {hardware()}; Python {platform.python_version()}, torch {torch.__version__}",
                f"- instructions of the CPU: {', '.join(instructions()) or 'not known'}",
                f"- `{command.strip()}`",
                "",
                markdown_table(self.columns, self.rows),
                "",
                markdown_table(("bar", "value", "limit", "holds"), _bar_rows(self.bars)),
                "",
                *self.notes,
                "",
                f"```json\n{self.to_json()}\n```",
                "",
            ]
        )


def finish(report: Report, keep: bool = False) -> None:
    """Prints the table, the bars and, last, the JSON line; with `keep` writes the result file."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    tables = [(report.title, report.columns, report.rows)]
    if report.bars:
        tables.append(("bars", ("bar", "value", "limit", "holds"), _bar_rows(report.bars)))
    for title, columns, rows in tables:
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in report.notes:
        console.print(note, markup=False)
    if keep:
        name = re.sub(r"[^a-z0-9]+", "-", hardware().lower()).strip("-")
        path = RESULTS / f"{report.claim}_{name}_{date.today()}.md"
        path.write_text(report.to_markdown(), encoding="utf-8")
        console.print(f"kept in {path.relative_to(RESULTS.parent.parent)}")
    print(report.to_json(), flush=True)


def hardware() -> str:
    """The machine in a few words."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name(0)}"
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.*)", info.read_text())
        model = found[1] if found else model
    model = re.sub(r"\(R\)|\(TM\)|Processor|CPU|@.*", "", model)
    wide = " AVX-512" if "avx512f" in instructions() else ""
    return f"{len(os.sched_getaffinity(0))} cores {' '.join(model.split())}{wide}"


def instructions() -> list[str]:
    """Vector instructions of the CPU, on which the native kernels depend."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)$", info.read_text(), re.M) if info.exists() else None
    return [flag for flag in (found[1].split() if found else ()) if VECTORS.fullmatch(flag)]


def free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def is_ratio(network: str) -> bool:
    """Whether a network is named by communication over compute."""
    return network.replace(".", "", 1).isdigit()


def slowest_rank(seconds: float) -> float:
    import torch

    from gulliver.comm import all_reduce

    slowest = torch.tensor([seconds], dtype=torch.float64)
    all_reduce(slowest, "max")
    return float(slowest)


def commit() -> str:
    """The commit that was measured, marked when files other than results differ from it."""
    git = ["git", "-C", str(RESULTS.parent)]
    name = [*git, "describe", "--always", "--abbrev=12"]
    changed = [*git, "diff", "--quiet", "HEAD", "--", ":/", f":(exclude){RESULTS}"]
    try:
        found = subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
        return found + "-dirty" * bool(subprocess.run(changed, capture_output=True).returncode)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _bar_rows(bars: Sequence[Bar]) -> list[Sequence[str]]:
    return [
        (bar.name, f"{bar.value:.4g}", f"{bar.bar:.4g}", "yes" if bar.holds else "NO")
        for bar in bars
    ]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
