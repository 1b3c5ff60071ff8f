"""The chunk size that the tuner chooses, beside a sweep over all sizes.

`python -m benchmarks.tuner` trains a GPT with ZeRO on shaped links (needs root): the tuner runs
several times from scratch, and every size is timed in turns, all in the same processes and with the
same optimizer. A choice is judged by the sweep's median of its size.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import tyro

from benchmarks._harness import Report, alternate, at_most, finish, slowest_rank
from benchmarks._models import gpt
from benchmarks._peers import Contestant, boosted
from benchmarks.netlab import LoadMeter, Net, run
from gulliver.booster import LowLevelZeroPlugin
from gulliver.comm import barrier, init_world, shutdown
from gulliver.parallel.zero.checkpoint import relayout
from gulliver.parallel.zero.tuner import BucketTuner

SIZES = tuple(2**n for n in range(18, 26))
MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 2
    rates: tuple[str, ...] = ("400mbit", "1250mbit", "4gbit")  # Of each rank's link
    stage: int = 2
    tunings: int = 2
    rounds: int = 5
    steps: int = 2  # Steps of each turn
    width: int = 384
    depth: int = 6
    batch: int = 2
    keep: bool = False  # Write benchmarks/results


def measure(options: Options, cache: str) -> dict[str, Any]:
    """One rank's part on one link."""
    os.environ["GULLIVER_CACHE"] = cache
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    world = init_world()
    task = gpt(options.width, options.depth, options.batch)
    plugin = LowLevelZeroPlugin(options.stage, chunk_mb="again", verbose=False)
    contestant = boosted("tuned", task, plugin)
    optimizer, tunings = contestant.optimizer, []
    contestant.advance(world.rank, world.size)  # connections that have been idle start slowly
    for _ in range(options.tunings):
        relayout(optimizer.shards, [], 4 * MIB)
        optimizer.tune(BucketTuner(optimizer.shards, contestant.model, again=True))
        first = contestant.steps
        while optimizer.tuner.tuning:
            contestant.advance(world.rank, world.size)
        found = optimizer.tuner.result
        tunings.append((found.chosen, found.measured, contestant.steps - first))
    order = optimizer.tuner.result.order
    turns = {
        str(size): lambda size=size: _turn(contestant, size, order, options.steps) for size in SIZES
    }
    swept = alternate(turns, options.rounds, warm_up=0)
    shutdown()
    return {"tunings": tunings, "swept": {int(n): s.values for n, s in swept.items()}}


def _turn(contestant: Contestant, size: int, order: list[str], steps: int) -> float:
    """Seconds per step of the slowest rank with chunks of a size."""
    contestant.finish()
    relayout(contestant.optimizer.shards, order, size)
    world = init_world()
    contestant.advance(world.rank, world.size)
    barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        contestant.advance(world.rank, world.size)
    return slowest_rank((time.perf_counter() - begun) / steps)


def add(report: Report, rate: str, found: dict[str, Any]) -> None:
    """A link's row and bars."""
    swept = {size: statistics.median(values) for size, values in found["swept"].items()}
    best = min(swept.values())
    chosen = [size for size, *_ in found["tunings"]]
    regrets = [swept[size] / best for size in chosen]
    steps = max(steps for *_, steps in found["tunings"])
    report.rows.append(
        (
            rate,
            *(f"{1e3 * took:.0f}" for took in swept.values()),
            ", ".join(f"{size / MIB:g}" for size in chosen),
            ", ".join(f"{regret:.3f}" for regret in regrets),
            f"{steps}",
        )
    )
    report.figures[rate] = found
    report.bars += [
        at_most(f"{rate}: chosen size to the best of the sweep", max(regrets), 1.05),
        at_most(f"{rate}: steps of tuning", steps, 30),
    ]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    report = Report(
        "tuner",
        f"Step in ms by size of chunks in MiB, ZeRO {options.stage}, {options.ranks} ranks",
        ("link", *(f"{n / MIB:g}" for n in SIZES), "chosen", "over the best", "steps"),
    )
    meter = LoadMeter()
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as cache, Net(options.ranks, rate) as net:
            add(report, rate, run(measure, net, options, cache)[0])
    report.notes = [
        f"GPT {options.width}x{options.depth}, batch {options.batch}, one thread for each rank; "
        f"medians of {options.rounds} turns of {options.steps} steps.",
        f"Other processes used {meter.cores():.1f} cores meanwhile.",
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
