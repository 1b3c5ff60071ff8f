"""Plans of the search over grids, held against what runs.

`python -m benchmarks.planner` has two parts. `truth` runs grids of four ranks on shaped links
(fast inside of pairs and slow between them; swapped; all equal; it needs root), for two Llamas of
different shapes, beside what the search and the plan predict for them, and beside FSDP2 and
DTensor's tensor parallelism put together by hand. Products of matrices sleep as long as they would
take on a slow device (`_planner_ranks.py`). `speed` searches for an 8-B Llama on 64 H100 and for
the 405-B one on 1024, each in a fresh process.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import tyro

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._models import llama
from benchmarks._planner_ranks import Row, Truth, measure
from benchmarks._tensor_models import Sizes
from benchmarks.netlab import Net, run
from gulliver.hardware.probe import named_cluster
from gulliver.planner.search.grids import search_grids

RATE, UPLINK, DELAY_US = "2gbit", "300mbit", 300
NETWORKS: dict[str, dict[str, Any]] = {
    "fast inside": {"nodes": 2, "uplink": UPLINK, "delay_us": DELAY_US},
    "swapped": {"nodes": 2, "uplink": UPLINK, "delay_us": DELAY_US, "order": "round-robin"},
    "equal": {"rate": "500mbit"},
}
MODELS = {"long": Sizes(256, 1024, 4, 256, 8, 64), "wide": Sizes(512, 512, 4, 256, 16, 16)}
LARGE = {
    "8 B": (4096, 14336, 32, 32, "h100x64", 512, 5.0),
    "405 B": (16384, 53248, 126, 128, "h100x1024", 1024, 30.0),
}
"""Width, width of the MLP, blocks, heads, cluster, samples of a step, and seconds allowed."""
PARTS = ("speed",)
"""Parts of a run; ``truth`` is asked for: it needs root, and three minutes for each network."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    parts: tuple[str, ...] = PARTS
    networks: tuple[str, ...] = tuple(NETWORKS)[:2]
    """Networks of the truth, four and a half minutes each; "equal" is run where it is named."""
    models: tuple[str, ...] = tuple(MODELS)
    steps: int = 7  # Measured steps of each grid
    rate: float = 6e9  # FLOP/s of the device that is slept
    keep: bool = False  # Write benchmarks/results


def kendall(rows: Sequence[Row]) -> float:
    """Kendall's tau of searched and measured seconds: share of pairs in one order, less the others.

    Only pairs whose measured seconds differ by more than the spread of each grid's steps count.
    """
    signs = [
        (a.searched > b.searched) == (a.measured > b.measured)
        for a, b in itertools.combinations(rows, 2)
        if a.measured and b.measured and abs(a.measured - b.measured) > max(a.spread, b.spread)
    ]
    return 2 * sum(signs) / max(1, len(signs)) - 1


def add_truth(report: Report, options: Options) -> None:
    """Runs grids on every network."""
    chosen: dict[tuple[str, str], str] = {}
    for network in options.networks:
        shape = {"rate": RATE, **NETWORKS[network]}
        with Net(4, **shape) as net:
            models = {name: MODELS[name] for name in options.models}
            found = run(measure, net, models, options.rate, options.steps)[0]
        for model, truth in found.items():
            chosen[model, network] = truth.best[0][0]
            _add_model(report, f"{model}, {network}", truth)
    for model in options.models:
        plans = [chosen.get((model, network)) for network in ("fast inside", "swapped")]
        if None not in plans:
            report.bars.append(
                at_least(f"{model}: plan changes with the links", plans[0] != plans[1], True)
            )


def _add_model(report: Report, name: str, truth: Truth) -> None:
    ran = [row for row in truth.rows if row.measured is not None]
    for row in truth.rows:
        report.rows.append((f"{name}: {row.grid}", *_cells(row)))
    for peer, seconds in truth.peers.items():
        report.rows.append((f"{name}: {peer}", "", "", f"{1e3 * seconds:.0f} ms", "", ""))
    report.figures[name] = asdict(truth)
    if len(ran) < 2 or ran[0] is not truth.rows[0]:
        report.notes.append(f"{name}: the chosen grid did not run: {truth.rows[0].why}")
        return
    measured = [row.measured or 0.0 for row in ran]
    best = min(*measured, *truth.peers.values())
    errors = [abs(row.searched / (row.measured or 1.0) - 1) for row in ran]
    report.bars += [
        at_least(f"{name}: grids run", len(ran), 12),
        at_most(f"{name}: chosen over the best", measured[0] / best, 1.10),
        at_least(f"{name}: Kendall tau", kendall(ran), 0.8),
        at_most(f"{name}: median error of seconds", statistics.median(errors), 0.15),
    ]
    report.notes.append(
        f"{name}: launching an operator takes {1e6 * truth.fitted[0]:.0f} us, memory moves "
        f"{truth.fitted[1] / 1e9:.2f} GB/s (passes of one process, four at once), an update "
        f"{1e3 * truth.update_s[1]:.0f} ms (predicted {1e3 * truth.update_s[0]:.0f} ms); links "
        + ", ".join(f"{1e6 * a:.0f} us {b / 1e6:.0f} MB/s" for a, b in truth.links)
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.measured is None:
        return "", "", "does not run", "", row.why[:40]
    return (
        f"{1e3 * row.searched:.0f} ms",
        f"{1e3 * row.planned:.0f} ms",
        f"{1e3 * row.measured:.0f} ms",
        f"{row.searched / row.measured - 1:+.0%}",
        f"{row.planned / row.measured - 1:+.0%}",
    )


def add_speed(report: Report) -> None:
    """Searches in fresh processes."""
    for name, (*_, cluster, _, limit) in LARGE.items():
        command = [sys.executable, "-m", "benchmarks.planner", "--search", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, gib, looked = json.loads(done.stdout.splitlines()[-1])
        report.rows.append(
            (f"search: {name} on {cluster}", f"{looked:,} grids", "", f"{seconds:.2f} s", "", "")
        )
        report.figures[f"search {name}"] = {"cpu_s": seconds, "GiB": gib, "grids": looked}
        report.bars += [
            at_most(f"{name} on {cluster}: CPU seconds of the search", seconds, limit),
            at_most(f"{name} on {cluster}: GiB of the process", gib, 4.0),
        ]


def search(name: str) -> None:
    """Searches for a large Llama, and prints CPU seconds, GiB and the number of grids."""
    width, wide, blocks, heads, cluster, samples, _ = LARGE[name]
    with torch.device("meta"):
        model = llama(128256, width, wide, blocks, heads, 8, 8192, use_cache=False)
    optimizer = torch.optim.AdamW(model.parameters())
    begun = time.process_time()
    found = search_grids(model, optimizer, tokens(8192), named_cluster(cluster), samples)
    took = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps([took, most, found.looked]))


def tokens(length: int) -> dict[str, torch.Tensor]:
    """One sample on meta."""
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    if sys.argv[1:2] == ["--search"]:
        search(sys.argv[2])
        return
    options = tyro.cli(Options, description=__doc__)
    claim = "planner"
    if options.parts == ("truth",):  # takes minutes a network: kept network by network
        some = () if set(options.models) == set(MODELS) else options.models
        claim = "-".join(("planner-truth", *some, *options.networks)).replace(" ", "-")
    report = Report(
        claim,
        "Grids: predicted by the search, predicted by the plan, measured",
        ("grid", "search", "plan", "measured", "error of the search", "error of the plan"),
    )
    if "truth" in options.parts:  # before this process computes: its ranks are forked
        add_truth(report, options)
    if "speed" in options.parts:
        add_speed(report)
    finish(report, options.keep)


if __name__ == "__main__":
    main()
