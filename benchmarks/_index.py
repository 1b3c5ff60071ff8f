"""Writes the page of benchmarks: `python -m benchmarks._index docs/benchmarks.md`.

The page has one chart and one table of at most 25 claims. Full tables, notes and JSON stay in
`benchmarks/results`. Results of uncommitted trees are left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._harness import RESULTS, Bar, markdown_table

HEAD = """# Benchmarks: how fast is it, compared with what?

Each run alternates between Gulliver and a peer on the same work. **All figures are from CPUs**
(gloo between ranks); nothing has been measured on a GPU yet. A ratio above 1 means that Gulliver
is faster. Targets (column *bar*) were set before the run; missed targets are marked.

![Speed relative to the peer, one bar per claim](assets/benchmarks.png)

"""
TAIL = """
`python -m benchmarks.NAME` runs one benchmark. `make bench` runs all of them, which takes hours and
needs an idle machine. Benchmarks that limit network links need root. The files in the last column,
in `benchmarks/results`, contain all tables, versions, the command and the data as JSON.
"""


@dataclass(frozen=True)
class Claim:
    """A row of the page: a bar of a kept result, in words."""

    area: str
    text: str
    peer: str
    # Name of the result and of its bar; of several bars with the name, the worst counts.
    result: str
    bar: str
    # Whether the value is a speed relative to the peer, which the chart shows.
    speed: bool = False


CLAIMS = (
    Claim("ZeRO 2", "step on a slow link", "DDP", "zero-gpt-2-1", "times faster than DDP 5", True),
    Claim(
        "ZeRO 2", "step on loopback", "DDP", "zero-gpt-4-loopback", "times faster than DDP", True
    ),
    Claim(
        *("ZeRO 3", "step on a slow link", "DeepSpeed 3", "zero-gpt-2-1"),
        *("times faster than DeepSpeed 3", True),
    ),
    Claim("Tensor", "step", "DTensor", "tensor", "times faster than DTensor", True),
    Claim(
        "Ring",
        "attention on 4 ranks",
        "torch",
        "sequence",
        "peers: fastest other / ring of 4",
        True,
    ),
    Claim("Pipeline", "step", "torch's 1F1B", "pipeline-4", "best over torch 1f1b", True),
    Claim("Wire", "FP8 messages on a slow link", "float32 messages", "wire", "fp8 over fp32", True),
    Claim(
        *("Torus", "8 MiB all-reduce over two nodes", "gloo", "torus"),
        *("8 MiB, node: gloo flat / torus", True),
    ),
    Claim(
        *("Checkpoint", "time that training is held up", "torch.save", "checkpoint-1gb"),
        "training held up, over torch.save's",
    ),
    Claim(
        *("Checkpoint", "training held up less", "DCP async_save", "checkpoint-1gb"),
        *("torch's async holds up longer, times", True),
    ),
    Claim(
        *("Gemini", "step with state on a disk", "system swap", "memory-headline-2048x20"),
        *("Gemini: times faster than swapping", True),
    ),
    Claim(
        *("Checkpoint", "step while saving sparingly", "calm steps", "checkpoint-every-1gb"),
        "step time, saved sparingly, over calm",
    ),
    Claim(
        *("Gemini", "peak memory, of the limit", "the limit", "memory-headline-2048x20"),
        "Gemini: peak / limit",
    ),
    Claim(
        *("Serving", "tokens/s, 32 requests", "faster of llama.cpp, OpenVINO", "serving-peers"),
        *("float32, 32 requests: of the fastest other's tokens/s", True),
    ),
    Claim(
        *("Serving", "time between tokens under load, p99", "faster of llama.cpp, OpenVINO"),
        *("serving-load", "float32, between p99: of the fastest other's ms"),
    ),
    Claim(
        "int8",
        "generation at batch 1",
        "float32",
        "int8",
        "generation at batch 1, over float32",
        True,
    ),
    Claim("int8", "perplexity", "float32", "int8-models", "perplexity over float32's, int8"),
    Claim(
        *("Data-centric", "step on uneven clips, 4 ranks", "the better of two methods"),
        *("data-centric-measured-4-stdit", "ours over the better other, least row", True),
    ),
    Claim(
        *("DreamBooth", "seconds of a step", "diffusers' script", "dreambooth"),
        "seconds of a step over those of diffusers' script",
    ),
    Claim("FP8", "final loss, relative difference", "float32", "fp8", "final loss apart"),
    Claim(
        *("Embedding", "look-ahead cache, time", "fetching on demand", "embedding_tiers"),
        "look-ahead, of on-demand time",
    ),
    Claim(
        *("Planner", "chosen grid, time over the best grid's", "all 12 grids run"),
        *("planner-truth-long-equal-fast-inside", "chosen over the best"),
    ),
    Claim(
        *("Planner", "order of the grids (Kendall tau)", "all 12 grids run"),
        *("planner-truth-long-equal-fast-inside", "Kendall tau"),
    ),
    Claim(
        "Planner",
        "peak memory, largest error",
        "counted bytes",
        "memory_truth",
        "largest error of the peak",
    ),
    Claim(
        *(
            "Fine-tuning",
            "1 B, all weights in 4 GiB: error of predicted time",
            "the run",
            "finetune-1b",
        ),
        "1 B, all weights: error of the prediction",
    ),
)
COLUMNS = ("part", "what", "peer", "figure", "bar", "met", "machine", "commit", "date", "result")


@dataclass(frozen=True)
class Result:
    """A kept result."""

    claim: str
    date: str
    commit: str
    machine: str
    bars: tuple[Bar, ...]
    file: str


def read(path: Path) -> Result:
    """Reads a result as `finish` of the harness has kept it."""
    text, _, line = path.read_text(encoding="utf-8").partition("```json\n")
    kept = json.loads(line.partition("\n```")[0])
    facts = re.findall(r"^- (.*)$", text, re.MULTILINE)[:2]
    date, _, commit = facts[0].removeprefix("date ").partition(", commit ")
    bars = tuple(Bar(**bar) for bar in kept["bars"])
    return Result(kept["claim"], date, commit, facts[1].partition("; ")[0], bars, path.name)


def newest(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Returns each claim's results from committed trees, newest first; of one day, worst first."""
    clean = [result for result in results if not result.commit.endswith("-dirty")]
    clean.sort(key=lambda result: (result.date, sum(not bar.holds for bar in result.bars)))
    found: dict[str, list[Result]] = {}
    for result in reversed(clean):
        found.setdefault(result.claim, []).append(result)
    return found


def worst(claim: Claim, results: dict[str, list[Result]]) -> tuple[Result, Bar]:
    """Returns the bar of a claim that is nearest to failing, in its newest result with the bar."""
    # The name of a case stands before the bar's: "2 ranks, loopback: times faster than DTensor".
    found = ((r, [b for b in r.bars if b.name.endswith(claim.bar)]) for r in results[claim.result])
    result, bars = next((result, bars) for result, bars in found if bars)
    at_least = any((bar.value > bar.bar) == bar.holds and bar.value != bar.bar for bar in bars)
    return result, (min if at_least else max)(bars, key=lambda bar: bar.value)


def rows(results: dict[str, list[Result]]) -> list[tuple[str, ...]]:
    """Returns a row for each claim that has a result."""
    found = []
    for claim in CLAIMS:
        result, bar = worst(claim, results)
        at_least = (bar.value > bar.bar) == bar.holds
        limit = f"{'at least' if at_least else 'at most'} {bar.bar:.3g}"
        cells = claim.area, claim.text, claim.peer, f"{bar.value:.3g}", limit
        place = result.machine, result.commit, result.date, f"`{result.file}`"
        found.append((*cells, "yes" if bar.holds else "**no**", *place))
    return found


def draw(results: dict[str, list[Result]], path: Path) -> None:
    """Draws the speeds relative to peers, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(claim, worst(claim, results)[1]) for claim in CLAIMS if claim.speed]
    names = [f"{claim.area}: {claim.text}, over {claim.peer}" for claim, _ in shown]
    values = [bar.value for _, bar in shown]
    colours = ["tab:blue" if bar.holds else "tab:orange" for _, bar in shown]
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(shown) + 1), layout="constrained")
    axes.barh(names, [value - 1 for value in values], left=1, color=colours)
    for row, value in enumerate(values):
        axes.annotate(f" {value:.2f}", (max(value, 1), row), va="center")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(right=max(values) * 2)
    axes.set_xlabel("speed relative to the peer, worst case (orange: bar missed)")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(path: Path) -> None:
    results = newest([read(file) for file in sorted(RESULTS.glob("*.md"))])
    text = HEAD + markdown_table(COLUMNS, rows(results)) + "\n" + TAIL
    path.write_text(text, encoding="utf-8")
    draw(results, path.parent / "assets" / "benchmarks.png")
    print(f"{path}: {len(CLAIMS)} claims")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
