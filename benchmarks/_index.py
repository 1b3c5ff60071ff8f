"""Gathers the kept results into one page: `python -m benchmarks._index docs/benchmarks.md`.

First what is claimed: a row for each kind of bar, with the figure that comes nearest to failing.
Then what was measured, table by table. The line of JSON stays in the result's file.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._harness import RESULTS, Bar, markdown_table

HEAD = """# Benchmarks: is it faster than FSDP, DDP, DeepSpeed, torch.save?

Written by `make bench` from `benchmarks/results`; `python -m benchmarks.NAME` runs one. Everything
is measured beside a peer on the same work in the same run, in turns. A *bar* is the limit that was
set before; where several cases share one, the figure is that of the case that is nearest to failing
it. All of it ran on CPUs over gloo.
"""

AREAS = {
    "zero": "ZeRO beside DDP, FSDP2 and DeepSpeed",
    "tensor": "Tensor parallelism beside DTensor, DDP and FSDP2",
    "sequence": "Sequence parallelism beside torch's ring",
    "pipeline": "Pipeline parallelism beside torch's schedules",
    "wire": "Formats of what travels between ranks",
    "torus": "Collectives along a torus beside flat ones",
    "checkpoint": "Checkpoints beside torch.save and dcp.async_save",
    "loader": "Data loader",
    "memory": "Training under a limit of memory",
    "memory_truth": "Bytes of grids: predicted beside counted",
    "finetune": "Fine-tuning beside transformers' Trainer, and in 4 GiB",
    "embedding": "Embedding tables behind a cache",
    "schedule": "Jobs that share a cluster, simulated",
    "joint": "Shardings and recomputation: jointly and in two stages",
    "serving": "Serving beside transformers",
    "fp8": "FP8 training beside float32, and on a GPU beside bf16 and torchao",
}
"""First word of a claim to heading, in the order of the page; other claims follow."""

COLUMNS = ("measured", "claim", "figure", "bar", "holds", "machine", "commit", "date")
PICTURES = "assets/benchmarks"
"""Where the page's pictures are: what is built from the docs alone has to find them."""


@dataclass(frozen=True)
class Result:
    """A kept result."""

    claim: str  # name of the result's files
    title: str  # what was measured
    date: str  # of the measurement
    commit: str  # that was measured
    machine: str  # the hardware in a few words
    software: str  # versions of Python and torch
    command: str  # that measured it
    bars: tuple[Bar, ...]  # what was claimed
    text: str  # tables and notes, without the bars and the line of JSON

    @property
    def area(self) -> str:
        """First word of the claim."""
        return self.claim.partition("-")[0]

    @property
    def anchor(self) -> str:
        """Name of the result's place on the page."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.claim} {self.machine}".lower()).strip("-")


def read(path: Path) -> Result:
    """Reads a result as `finish` of the harness has kept it."""
    text, _, line = path.read_text(encoding="utf-8").partition("```json\n")
    kept = json.loads(line.partition("\n```")[0])
    title, _, text = text.removeprefix("# ").partition("\n")
    facts = re.findall(r"^- (.*)$", text, re.MULTILINE)[:3]
    text = text.partition(facts[2])[2]
    text = re.sub(r"\| bar \| value \|(.*\n)(\|.*\n?)*", "", text)
    date, _, commit = facts[0].removeprefix("date ").partition(", commit ")
    machine, _, software = facts[1].partition("; ")
    bars = tuple(Bar(**bar) for bar in kept["bars"])
    return Result(
        *(kept["claim"], title.strip(), date, commit, machine, software, facts[2].strip("`")),
        *(bars, text.strip()),
    )


def newest(results: Sequence[Result]) -> list[Result]:
    """The newest result of each claim on each machine, in the order of `AREAS`."""
    found = {(r.claim, r.machine): r for r in sorted(results, key=lambda r: r.date)}
    order = {area: place for place, area in enumerate(AREAS)}
    return sorted(found.values(), key=lambda r: (order.get(r.area, len(order)), r.claim, r.machine))


def claims(bars: Sequence[Bar]) -> list[tuple[str, str, str, str]]:
    """Rows of claim, figure, bar and whether it holds; bars of one kind and limit share a row."""
    kinds = [bar.name.rpartition(": ")[2] for bar in bars]
    groups: dict[tuple[str, float], list[Bar]] = {}
    for bar, kind in zip(bars, kinds, strict=True):
        name = kind if kinds.count(kind) > 1 else bar.name
        groups.setdefault((name, bar.bar), []).append(bar)
    return [_row(name, group) for (name, _), group in groups.items()]


def _row(name: str, group: Sequence[Bar]) -> tuple[str, str, str, str]:
    least = any((bar.value > bar.bar) == bar.holds and bar.value != bar.bar for bar in group)
    exact = all(bar.value == bar.bar for bar in group)
    worst = (min if least else max)(group, key=lambda bar: bar.value)
    holding = sum(bar.holds for bar in group)
    of = worst.name.removesuffix(name).removesuffix(": ")
    figure = f"{worst.value:.3g}" + (f" ({of})" if of else "")
    limit = "" if exact else "at least " if least else "at most "
    if len(group) == 1:
        holds = "yes" if holding else "**no**"
    else:
        holds = "yes" if holding == len(group) else f"**{holding} of {len(group)}**"
    return name, figure, f"{limit}{worst.bar:.3g}", holds


def page(results: Sequence[Result]) -> str:
    """The page: tables of claims, then what was measured."""
    parts, areas = [HEAD], dict.fromkeys(result.area for result in results)
    for area in areas:
        rows = [row for result in results if result.area == area for row in _rows(result)]
        parts.append(f"## {AREAS.get(area, area)}\n\n{markdown_table(COLUMNS, rows)}\n")
    parts.append("## What was measured\n")
    return "\n".join([*parts, *map(_details, results)])


def _rows(result: Result) -> list[tuple[str, ...]]:
    link, place = f"[{result.title}](#{result.anchor})", (result.machine, result.commit)
    found = claims(result.bars)
    return [
        (link if number == 0 else "", *claim, *place, result.date)
        for number, claim in enumerate(found)
    ]


def _details(result: Result) -> str:
    def kept(match: re.Match[str]) -> str:
        return f"![{match[1]}]({PICTURES}/{match[2]})"

    text = re.sub(r"!\[([^]]*)\]\(([^)/]+\.png)\)", kept, result.text)
    return (
        f'<a id="{result.anchor}"></a>\n\n### {result.title}\n\n'
        f"{result.date}, commit {result.commit}; {result.machine}; {result.software}; "
        f"`{result.command}`\n\n{text}\n"
    )


def main(path: Path) -> None:
    results = newest([read(file) for file in RESULTS.glob("*.md")])
    text = page(results)
    folder = path.parent / PICTURES
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in re.findall(rf"\({PICTURES}/([^)]+)\)", text):
        shutil.copy(RESULTS / name, folder / name)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(results)} results")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
