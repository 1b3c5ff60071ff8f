"""Weak scaling of ZeRO: real ranks on shaped links, and the simulation up to 1,024 ranks.

`python -m benchmarks.scaling` (root, Linux) trains a small Llama on 1, 2 and 4 ranks with the same
batch on each. Products of matrices sleep, as in `benchmarks.planner`, so that the cores are free
for messages. Constants of one rank (launches, memory) and of two (latency and bandwidth) go into
`gulliver.planner.search.simulate`, which predicts the same steps, and those of up to 1,024 ranks.
Then it simulates Llama 3 8B on described H100s, and measures how the simulation of every rank
itself grows.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks._every_rank import simulate_every_rank
from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._planner_ranks import Slowed, _batch, _collectives, _seconds, calibrated
from benchmarks._tensor_models import Sizes
from benchmarks.netlab import LoadMeter, Net, run
from benchmarks.planner import LARGE, tokens
from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import barrier, init_world, make_axes
from gulliver.hardware.cluster import Along, Axis, Cluster, Device, Link
from gulliver.hardware.links import probe_collectives, probe_links, with_collectives
from gulliver.hardware.probe import named_cluster
from gulliver.planner.search.facts import Axes, Facts, Grid, facts_of
from gulliver.planner.search.score import Scorer
from gulliver.planner.search.simulate import fastest, simulate_step, weak_scaling

SIZES = Sizes(256, 1024, 4, 256, 4, 64)
PUBLISHED = 0.95
"""PowerAI DDL (Cho et al. 2017, arXiv 1708.02188): Caffe on 256 GPUs, over multi-ring messages."""
PROBED = (1 << 12, 1 << 18, 1 << 22)
GROWN = (64, 256, 1024)
MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: tuple[int, ...] = (1, 2, 4)  # Measured; without any, only Llama 3 8B is simulated
    rate: str = "1gbit"  # Of each rank's link
    flops: float = 6e9  # Of the device that is slept
    stages: tuple[int, ...] = (1, 3)
    chunks: tuple[int, ...] = (1, 4)  # MiB
    steps: int = 5
    jitter: float = 0.02  # Of each computation, where every rank is simulated
    measured: Path | None = None
    """File with measurements of an earlier run; without the file, measures and writes it, alone."""
    keep: bool = False  # Write benchmarks/results


@dataclass
class Measured:
    """Measurements with a number of ranks."""

    launch_s: float = 0.0
    memory_rate: float = 0.0
    link: Link | None = None
    # Seconds of a step, and their spread, by stage and MiB of a chunk.
    steps: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)


def measured(options: Options) -> tuple[dict[int, Measured], float]:
    """Measurements by number of ranks, and the cores that others used meanwhile."""
    # Ranks that sleep wake up in time, as in `benchmarks.torus`.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    meter, found = LoadMeter(), dict[int, Measured]()
    for ranks in options.ranks:  # before this process computes: its ranks are forked
        net = Net(ranks, options.rate) if ranks > 1 else nullcontext()
        with net as place:
            found[ranks] = run(measure, place, options, ranks=ranks)[0]
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return found, meter.cores()


def device_of(flops: float) -> Device:
    known = named_cluster("cpux1").device
    return replace(known, matmul={"float32": flops}, matmul_curves={}, overlap=1.0)


def measure(options: Options) -> Measured:
    """One rank's part."""
    world = init_world()
    torch.set_num_threads(1)
    found, device = Measured(), device_of(options.flops)
    with Slowed(options.flops):
        if world.size > 1:
            found.link = _link(world.size)
        facts = _calibrated(device)
        found.launch_s, found.memory_rate = facts.device.launch_s, facts.device.memory_rate
        for stage in options.stages:
            for chunk in options.chunks:
                found.steps[stage, chunk] = _steps(stage, chunk, options.steps)
    barrier()
    return found


def _link(ranks: int) -> Link:
    pairs = probe_links()
    slowest = max(pairs.values(), key=lambda link: link.alpha_s + MIB / link.bandwidth)
    named = make_axes({"data": ranks})
    made = _collectives(named.torus(), named.rank_group("data"))
    made = {name: made[name] for name in ("reduce_scatter", "all_gather")}
    along = Along(ranks, probe_collectives(made, ranks, turns=3, sizes=PROBED))
    return with_collectives(replace(slowest, messages=None), [along])


def _calibrated(device: Device) -> Facts:
    model, sample = SIZES.model(), _batch(SIZES, 0, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    facts = facts_of(model, inner, sample, device, "fp32", True)
    works: dict[int, list[Any]] = {}
    cluster = Cluster("one rank", device)
    for samples in (1, SIZES.batch) * 2:
        part = {name: value[:samples] for name, value in sample.items()}
        plan = LowLevelZeroPlugin(1, verbose=False).make_plan(model, inner, cluster, part)
        works.setdefault(samples, []).append(plan.work)
    return calibrated(facts, works)


def _steps(stage: int, chunk: int, steps: int) -> tuple[float, float]:
    model = SIZES.model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    booster = Booster(LowLevelZeroPlugin(stage, chunk_mb=chunk, verbose=False))
    boosted, optimizer, *_ = booster.boost(model, inner)
    # The same batch on each rank: the gradients' values do not matter.
    batch = _batch(SIZES, 0, 1)

    def step() -> None:
        booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return _seconds(step, steps)


def simulated(options: Options, one: Measured, link: Link) -> Scorer:
    """The scorer of the small Llama with measured constants, on 1,024 ranks."""
    device = replace(
        device_of(options.flops),
        launch_s=one.launch_s,
        memory_rate=one.memory_rate,
        memory_curve=None,
    )
    model, batch = SIZES.model(), _batch(SIZES, 0, 1)
    facts = facts_of(model, torch.optim.AdamW(model.parameters()), batch, device, "fp32", True)
    cluster = Cluster("shaped links", device, (Axis("data", GROWN[-1], link),))
    return Scorer(facts, cluster, SIZES.batch * GROWN[-1], "cpu", 1.0)


def add_small(report: Report, options: Options, found: dict[int, Measured]) -> None:
    """Rows of the small Llama, measured and simulated."""
    two, four = (found[n].link for n in (2, 4))
    assert two is not None
    assert four is not None
    # Two ranks send one message each; what further ones take is known from four.
    link = replace(two, along=(), message_s=four.message_s)
    scorer = simulated(options, found[1], link)
    for stage in options.stages:
        grid = Grid(Axes(data=GROWN[-1]), stage)
        points = {p.grid.axes.data: p for p in weak_scaling(scorer, grid)}
        curve, first = {}, points[1].seconds
        alone = min(found[1].steps[stage, chunk][0] for chunk in options.chunks)
        for ranks, point in points.items():
            real = found.get(ranks)
            seconds, chosen = None, point.grid.chunk_mb
            if real is not None:
                chunk = min(options.chunks, key=lambda c, r=real: r.steps[stage, c][0])
                seconds = real.steps[stage, chunk][0]
                own = scorer.resized(ranks, SIZES.batch * ranks)
                same = replace(point.grid, chunk_mb=chunk)
                told = simulate_step(own, same) if ranks > 1 else first
                report.figures[f"ZeRO {stage}, {ranks} ranks: error"] = told / seconds - 1
            measured = f"{1e3 * seconds:.0f} ms, {alone / seconds:.1%}" if seconds else ""
            report.rows.append(
                (
                    f"small Llama, ZeRO {stage}",
                    f"{ranks:,}",
                    f"{1e3 * point.seconds:.0f} ms",
                    f"{point.efficiency:.1%}",
                    measured,
                    f"{chosen} MiB" if chosen else "",
                    " x ".join(map(str, point.torus)) or "flat",
                )
            )
            curve[ranks] = (point.efficiency, alone / seconds if seconds else None)
        report.figures[f"small Llama, ZeRO {stage}"] = curve
        worst = max(
            abs(report.figures[f"ZeRO {stage}, {n} ranks: error"]) for n in options.ranks if n > 1
        )
        report.bars += [
            at_most(f"ZeRO {stage}: error of the simulated step, 2 and 4 ranks", worst, 0.15)
        ]
    report.figures["constants"] = {
        "launch_s": found[1].launch_s,
        "memory_rate": found[1].memory_rate,
        "alpha_s": link.alpha_s,
        "bandwidth": link.bandwidth,
        "message_s": link.message_s,
    }
    report.notes.append(
        f"Constants: {1e6 * link.alpha_s:.0f} us and {link.bandwidth / 1e6:.0f} MB/s for a message "
        f"between two ranks, {1e6 * link.message_s:.0f} us for each further one at once (from "
        f"four), {1e6 * found[1].launch_s:.0f} us for launching an operator."
    )


def add_large(report: Report) -> None:
    """Rows of Llama 3 8B on described H100s."""
    scorer = large_scorer(GROWN[-1])
    for stage in (1, 3):
        grid = Grid(Axes(data=GROWN[-1]), stage, recomputed=32)
        curve = {}
        for point in weak_scaling(scorer, grid):
            ranks = point.grid.axes.size
            report.rows.append(
                (
                    f"Llama 3 8B on H100, ZeRO {stage}",
                    f"{ranks:,}",
                    f"{1e3 * point.seconds:.0f} ms",
                    f"{point.efficiency:.1%}",
                    "",
                    f"{point.grid.chunk_mb} MiB" if point.grid.chunk_mb else "",
                    " x ".join(map(str, point.torus)) or "flat",
                )
            )
            curve[ranks] = (point.efficiency, None)
        report.figures[f"Llama 3 8B on H100, ZeRO {stage}"] = curve
        report.bars.append(
            at_least(
                f"Llama 3 8B, ZeRO {stage}, 1,024 ranks: efficiency", curve[1024][0], PUBLISHED
            )
        )


def large_scorer(ranks: int) -> Scorer:
    width, wide, blocks, heads, *_ = LARGE["8 B"]
    from benchmarks._models import llama

    with torch.device("meta"):
        model = llama(128256, width, wide, blocks, heads, 8, 8192, use_cache=False)
    cluster = named_cluster(f"h100x{ranks}")
    optimizer = torch.optim.AdamW(model.parameters())
    return Scorer(
        facts_of(model, optimizer, tokens(8192), cluster.device), cluster, ranks, "cuda", 1.0
    )


def grow(ranks: int, jitter: float) -> None:
    """Simulates every rank of Llama 3 8B; prints CPU seconds, bytes and what was found."""
    scorer = large_scorer(ranks)
    grid = Grid(Axes(data=ranks), 1, recomputed=32)
    point = fastest(scorer, grid)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    every = simulate_every_rank(scorer, point.grid, point.torus)
    took = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    uneven = simulate_every_rank(scorer, point.grid, point.torus, jitter)
    values = {
        "cpu_s": took,
        "MiB": (most - before) / 1024,
        "process MiB": most / 1024,
        "step_s": every,
        "one_rank_s": point.seconds,
        "with_jitter_s": uneven,
    }
    print(json.dumps(values))


def add_growth(report: Report, jitter: float) -> None:
    found = {}
    for ranks in GROWN:
        command = [sys.executable, "-m", "benchmarks.scaling", "--grow", str(ranks), str(jitter)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[ranks] = values = json.loads(done.stdout.splitlines()[-1])
        report.rows.append(
            (
                "simulation of every rank",
                f"{ranks:,}",
                f"{1e3 * values['step_s']:.0f} ms",
                "",
                f"{values['cpu_s']:.2f} CPU s, {values['process MiB']:.0f} MiB",
                f"{values['with_jitter_s'] / values['step_s'] - 1:+.1%}",
                "",
            )
        )
        same = abs(values["step_s"] / values["one_rank_s"] - 1)
        report.bars.append(at_most(f"{ranks:,} ranks: all beside one of each kind", same, 1e-9))
    report.figures["growth"] = found
    few, many = (found[n] for n in (GROWN[0], GROWN[-1]))
    times = GROWN[-1] / GROWN[0]
    report.bars += [
        at_most("CPU seconds per rank, 1,024 over 64", many["cpu_s"] / few["cpu_s"] / times, 1.2),
        at_most(
            "MiB of the process, 1,024 over 64", many["process MiB"] / few["process MiB"], times
        ),
    ]
    report.notes.append(
        f"Where every rank is simulated, the last column but one tells how much longer a step "
        f"takes if each computation varies by {jitter:.0%}."
    )


def main() -> None:
    if sys.argv[1:2] == ["--grow"]:
        grow(int(sys.argv[2]), float(sys.argv[3]))
        return
    options = tyro.cli(Options, description=__doc__)
    report = Report(
        "scaling",
        "Weak scaling: steps simulated and measured, with the same batch on each rank",
        ("", "ranks", "simulated", "efficiency", "measured", "chunk", "torus"),
    )
    if options.measured is not None and options.measured.exists():
        found, foreign = pickle.loads(options.measured.read_bytes())
    else:
        found, foreign = measured(options)
        if options.measured is not None:
            options.measured.write_bytes(pickle.dumps((found, foreign)))
            return
    if found:
        add_small(report, options, found)
    add_large(report)
    add_growth(report, options.jitter)
    report.figures["published"] = PUBLISHED
    report.figures["measured"] = {
        n: {f"ZeRO {stage}, {chunk} MiB": took for (stage, chunk), took in one.steps.items()}
        for n, one in found.items()
    }
    report.notes += [
        f"{PUBLISHED:.0%} is published by PowerAI DDL (Cho et al. 2017) for Caffe on 256 GPUs.",
        f"Small Llama: width {SIZES.hidden}, {SIZES.blocks} blocks, {SIZES.batch} samples of "
        f"{SIZES.length} tokens on each rank, {options.rate} for each rank.",
        f"Other processes used {foreign:.1f} cores meanwhile.",
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
