"""The tuned size of chunks beside a full sweep, and the predicted step beside the measured one.

`python -m benchmarks.tuner` trains the same model on shaped links (needs root) with chunks of every
size, in turns, and with the size that the tuner finds by itself in the first steps.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import tyro

from benchmarks._harness import RESULTS, Report, alternate, at_most, finish
from benchmarks._models import gpt
from benchmarks._peers import Contestant, boosted
from benchmarks.netlab import Net, foreign_load, run
from gulliver.booster import LowLevelZeroPlugin
from gulliver.comm import all_reduce, init_world, shutdown

SIZES_MB = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 2
    rates: tuple[str, ...] = ("400mbit", "1250mbit", "4gbit")
    """Of each rank's link."""
    stage: int = 2
    rounds: int = 3
    steps: int = 2
    """Steps of each turn."""
    width: int = 384
    depth: int = 6
    batch: int = 4
    keep: bool = False
    """Write benchmarks/results."""


def measure(options: Options, cache: str) -> dict[str, Any]:
    """One rank's part on one link."""
    os.environ["GULLIVER_CACHE"] = cache
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    world = init_world()
    task = gpt(options.width, options.depth, options.batch)
    plugin = LowLevelZeroPlugin(options.stage, chunk_mb="again", verbose=False)
    tuned = boosted("tuned", task, plugin)
    while tuned.optimizer.tuner.stage.name != "DONE":
        turn(tuned, 1, world.size, world.rank)
    tuning = tuned.optimizer.tuner.result
    contestants = [tuned] + [
        boosted(
            f"{size:g} MiB", task, LowLevelZeroPlugin(options.stage, chunk_mb=size, verbose=False)
        )
        for size in SIZES_MB
    ]
    found = alternate(
        {c.name: lambda c=c: turn(c, options.steps, world.size, world.rank) for c in contestants},
        options.rounds,
    )
    shutdown()
    return {
        "times": {name: spread.median for name, spread in found.items()},
        "chosen": tuning.chosen,
        "predicted": tuning.predicted,
        "link": tuning.link,
    }


def turn(contestant: Contestant, steps: int, size: int, rank: int) -> float:
    """A few steps; seconds per step of the slowest rank."""
    import time

    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        contestant.loss = contestant.step(contestant.steps * size + rank)
        contestant.steps += 1
    seconds = torch.tensor([(time.perf_counter() - begun) / steps])
    all_reduce(seconds, "max")
    return float(seconds)


def main() -> None:
    """Measures every link."""
    options = tyro.cli(Options, description=__doc__)
    report = Report(
        "tuner",
        f"step by size of chunks, ZeRO {options.stage}, {options.ranks} ranks, ms",
        ("link", *(f"{size:g} MiB" for size in SIZES_MB), "tuned", "chosen MiB", "predicted"),
    )
    load = foreign_load()
    curves: dict[str, Any] = {}
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as cache, Net(options.ranks, rate) as net:
            found = run(measure, net, options, cache)[0]
        curves[rate] = found
        add(report, rate, found)
    report.notes = [
        f"GPT {options.width}x{options.depth}, batch {options.batch}, one thread per rank; medians "
        f"of {options.rounds} turns of {options.steps} steps.",
        f"Foreign load before the run: {load:.1f} cores.",
    ]
    if options.keep:
        picture(curves, RESULTS / "tuner.png")
        report.notes.append("![step by size of chunks](tuner.png)")
    finish(report, options.keep)


def add(report: Report, rate: str, found: dict[str, Any]) -> None:
    """A link's row and bars."""
    times, chosen = found["times"], found["chosen"]
    swept = {name: took for name, took in times.items() if name != "tuned"}
    expected = found["predicted"][chosen]
    took = (
        times[f"{chosen / 2**20:g} MiB"] if f"{chosen / 2**20:g} MiB" in times else times["tuned"]
    )
    report.rows.append(
        (
            rate,
            *(f"{1e3 * t:.0f}" for t in swept.values()),
            f"{1e3 * times['tuned']:.0f}",
            f"{chosen / 2**20:g}",
            f"{1e3 * expected:.0f}",
        )
    )
    report.figures[rate] = found
    report.bars += [
        at_most(
            f"{rate}: tuned step to the best of the sweep",
            times["tuned"] / min(swept.values()),
            1.05,
        ),
        at_most(f"{rate}: error of the predicted step", abs(expected / took - 1), 0.15),
    ]


def picture(curves: dict[str, Any], path: Path) -> None:
    """Measured and predicted steps over the size of chunks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.5))
    for axes, (rate, found) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        times = [1e3 * found["times"][f"{size:g} MiB"] for size in SIZES_MB]
        axes.plot(SIZES_MB, times, "s-", label="measured")
        predicted = {s / 2**20: 1e3 * t for s, t in found["predicted"].items()}
        inside = [s for s in sorted(predicted) if s <= SIZES_MB[-1]]
        axes.plot(inside, [predicted[s] for s in inside], "o--", label="predicted")
        axes.axvline(found["chosen"] / 2**20, linestyle=":", color="gray", label="chosen")
        axes.set(xscale="log", xlabel="size of a chunk, MiB", ylabel="step, ms", title=rate)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
