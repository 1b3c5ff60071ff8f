"""Bytes of a rank as the search over grids predicts them, beside those that a run holds.

`python -m benchmarks.memory_truth` trains a small Llama on every grid of `CASES`, counts all
storages of each rank from the making of the model on, and prints the most of the third step on the
fullest rank beside `Scorer.score(grid).bytes`. Grids that off-load are run under several limits,
each with what the memory manager holds in the sixth step, beside `Offloader.score(grid).bytes`.

`--random 200` draws that many of the grids that a search looks at instead, with 0 to 8 blocks
recomputed, of 4 to 8 blocks, in float32 or bfloat16.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import tyro
from torch import nn

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._live_bytes import LiveBytes
from benchmarks._models import llama
from benchmarks.netlab import run
from gulliver.booster import Booster
from gulliver.booster import limited as _limited
from gulliver.booster.auto import AutoEngine, plugin_of
from gulliver.comm import init_world
from gulliver.hardware.cluster import Disk
from gulliver.hardware.probe import named_cluster
from gulliver.parallel.pipeline import STYLES
from gulliver.planner.search.facts import Axes, Grid, axes_of, facts_of, grids_of
from gulliver.planner.search.grids import modes_of
from gulliver.planner.search.offload import Offloader
from gulliver.planner.search.score import Scored, Scorer
from gulliver.planner.tiers import OffloadTiers

CHUNK = 1 << 17  # Bytes of a chunk of ZeRO: of such small models a usual one would hold all
SAMPLES, LENGTH = 8, 64
STEPS, BLOCKS = 3, 8
TIMEOUT_S = 3600.0
SETTLED = 6  # Steps under a limit: what moves is alike from the fourth or fifth on
BEHIND = OffloadTiers(disk="a disk", disk_bytes=1 << 30)


@dataclass(frozen=True)
class Case:
    """A run."""

    grid: Grid  # way to lay the model over the ranks
    precision: str = "fp32"  # `fp32` or `bf16`
    blocks: int = BLOCKS  # number of blocks
    room: float = 0.0  # limit of a grid that off-loads, in the least that would do

    @property
    def ranks(self) -> int:
        return self.grid.axes.size

    def __str__(self) -> str:
        limit = f", limit {self.room:g} x the least" if self.room else ""
        blocks = f", {self.blocks} blocks" if self.blocks != BLOCKS else ""
        return f"{self.precision}, {self.grid}{blocks}{limit}"


def small_llama(blocks: int) -> nn.Module:
    return llama(512, 128, 384, blocks, 4, 4, LENGTH, use_cache=False).train()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _line(ranks: int, schedule: str, stage: int = 0, data: int = 1, again: int = 0) -> Grid:
    chunks = STYLES[schedule].chunks
    return Grid(Axes(data, pipeline=ranks), stage, 4, schedule, chunks, again)


GRIDS = (
    Grid(Axes()),
    Grid(Axes(), recomputed=8),
    *(Grid(Axes(data=2), stage) for stage in range(4)),
    *(Grid(Axes(data=2), stage, 2) for stage in range(4)),
    *(Grid(Axes(data=2), stage, recomputed=8) for stage in range(4)),
    Grid(Axes(data=4), 1),
    Grid(Axes(data=4), 3),
    Grid(Axes(tensor=2)),
    Grid(Axes(tensor=2), recomputed=8),
    Grid(Axes(tensor=2, mode="split_gather")),
    Grid(Axes(2, tensor=2), 1),
    Grid(Axes(2, tensor=2), 3),
    Grid(Axes(sequence=2, mode="all_to_all"), 1),
    Grid(Axes(sequence=2, mode="ring_attn"), 3),
    *(
        _line(2, schedule)
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    ),
    _line(2, "1f1b", again=8),
    _line(2, "zero_bubble", again=8),
    _line(4, "1f1b"),
    *(_line(2, "1f1b", stage, 2) for stage in (1, 2, 3)),
    Grid(Axes(tensor=2, pipeline=2), 0, 4, "1f1b"),
)
CASES = (
    *(Case(grid) for grid in GRIDS),
    *(Case(Grid(Axes(data=2), stage), "bf16") for stage in range(4)),
    Case(Grid(Axes(tensor=2)), "bf16"),
    Case(_line(2, "1f1b"), "bf16"),
    *(
        Case(Grid(Axes(), 3, recomputed=again, offload="disk"), room=room)
        for again in (0, BLOCKS)
        for room in (1.0, 1.25, 1.5)
    ),
)


def random_cases(number: int, ranks: Sequence[int], seed: int = 0) -> list[Case]:
    """Draws different grids, each mesh as likely as any other of as many ranks."""
    draw, found = random.Random(seed), dict[Case, None]()
    modes = modes_of(_scorer(Case(Grid(Axes()))).facts)
    while len(found) < number:
        blocks, count = draw.randint(4, BLOCKS), draw.choice(ranks)
        axes = draw.choice(list(axes_of(count, SAMPLES, blocks, modes)))
        grid = draw.choice(list(grids_of(axes, SAMPLES, blocks)) or [None])
        if grid is None:
            continue
        grid = replace(grid, recomputed=draw.choice((0, blocks, draw.randint(1, blocks))))
        case = Case(grid, draw.choice(("fp32", "bf16")), blocks)
        if not _scorer(case).why_unsupported(axes):
            found[case] = None
    return list(found)


@cache
def predicted(case: Case) -> dict[str, int]:
    """Bytes of the fullest rank by kind, as the search has them."""
    scorer = _scorer(case)
    scored = offloaded(case)[0] if case.room else scorer.score(case.grid)
    return {**vars(scored.memory), "working": scored.working}


def offloaded(case: Case) -> tuple[Scored, int]:
    """A grid that off-loads as the search prices it, and its limit."""
    scorer = _scorer(case)
    least = Offloader(scorer, BEHIND, 1 << 40).least(case.grid)
    assert least is not None, "off-load can run it"
    limit = int(case.room * least.bytes)
    scored = Offloader(scorer, BEHIND, limit).score(case.grid)
    assert scored is not None, "the least would do"
    return scored, limit


def _scorer(case: Case) -> Scorer:
    with torch.device("meta"):
        model = small_llama(case.blocks)
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    cluster = replace(named_cluster(f"cpux{case.ranks}"), disk=Disk(2e8, 3e8))
    batch = {"input_ids": ids, "labels": ids}
    facts = facts_of(model, adam(model), batch, cluster.device, case.precision, True)
    facts = replace(facts, chunk_bytes=0 if case.room else CHUNK)
    return Scorer(facts, cluster, SAMPLES, "cpu", 0.0)


def counted(case: Case) -> int:
    """Most bytes of this rank in the last step of a run; every rank calls it."""
    torch.manual_seed(0)
    if case.room:
        with tempfile.TemporaryDirectory() as folder:
            return _counted_behind(case, folder)
    counter = LiveBytes()
    with counter:
        step = _running(case)
        for number in range(STEPS):
            if number == STEPS - 1:
                gc.collect()
                counter.peak = counter.live
            step()
    return counter.peak


class Managed(LiveBytes):
    """Counts storages that operations make, and besides what a memory manager holds.

    Attributes:
        manager: manager of the state; None before there is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self.manager is not None:
            held = sum(self.manager.counter.live.values())
            self.most = max(self.most, self.live + held)
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Memory of the manager is no allocation of torch's: it cannot be resized.
        if storage.resizable():
            super()._count(storage)

    most = 0


def _counted_behind(case: Case, folder: str) -> int:
    """Most bytes of this rank in the last step of a run under a limit."""
    _, limit = offloaded(case)
    counter, model = Managed(), small_llama(case.blocks)
    inner = adam(model)
    scorer = _scorer(case)
    behind = replace(BEHIND, disk=folder)
    plugin = plugin_of(case.grid, case.precision, limit, behind)
    plan = plugin.make_plan(model, inner, scorer.cluster, work=scorer.work(case.grid))
    booster = Booster(plan=plan, verbose=False)
    with patch.object(_limited, "Footprint", side_effect=OSError), counter:
        boosted, optimizer, *_ = booster.boost(model, inner)
        counter.manager = optimizer.shards.manager
        engine = AutoEngine(booster, boosted, optimizer, None, case.grid, 1, SAMPLES, ())
        ids = torch.randint(512, (SAMPLES, LENGTH))
        for _ in range(SETTLED):
            gc.collect()
            counter.most = 0
            engine.run({"input_ids": ids, "labels": ids})
            optimizer.step()
            optimizer.zero_grad()
    return counter.most


def _running(case: Case) -> Any:
    """Boosts a model, and returns a step of it."""
    grid, model = case.grid, small_llama(case.blocks)
    inner = adam(model)
    plan = plugin_of(grid, case.precision).make_plan(model, inner)
    assert plan.zero is not None
    zero = replace(plan.zero, chunk_bytes=CHUNK, tuning="off", chunks=())
    # Evenly spaced, as `plan_of` chooses them.
    count, every = grid.recomputed, len(plan.recompute)
    again = tuple(plan.recompute[place * every // count] for place in range(count))
    booster = Booster(plan=replace(plan, zero=zero, recompute=again), verbose=False)
    model, optimizer, *_ = booster.boost(model, inner)
    # What a CPU keeps to use again, as the allocator of a GPU does behind all this.
    optimizer.shards.pool.kept = 0
    optimizer.shards.pool.clear()
    accumulate = 1 if grid.axes.pipeline > 1 else grid.micro_batches
    each = SAMPLES // grid.axes.data
    found: Any = None
    engine = AutoEngine(booster, model, optimizer, found, grid, accumulate, each, ())
    place, places = booster.plugin.data_place()
    ids = torch.randint(512, (SAMPLES, LENGTH)).chunk(places)[place].clone()

    def step() -> None:
        engine.run({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()

    return step


def peaks(cases: Sequence[Case]) -> list[int]:
    """Most bytes of this rank in each of some runs; every rank calls it."""
    return [counted(case) for case in cases]


def _on_rank(cases: Sequence[Case]) -> list[int]:
    init_world()
    return peaks(cases)


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: tuple[int, ...] = (1, 2, 4)
    random: int = 0  # Number of random grids; 0 runs the ones that are listed here
    seed: int = 0
    keep: bool = False  # Write benchmarks/results


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    report = Report(
        "memory_truth-random" if options.random else "memory_truth",
        "Most bytes of the fullest rank in a step: predicted by the search, counted in a run",
        ("grid", "predicted", "counted", "error"),
    )
    listed = random_cases(options.random, options.ranks, options.seed) if options.random else CASES
    chosen = sorted((c for c in listed if c.ranks in options.ranks), key=lambda case: case.ranks)
    measured = list[int]()
    for ranks, cases in groupby(chosen, key=lambda case: case.ranks):
        found = run(_on_rank, None, list(cases), ranks=ranks, timeout_s=TIMEOUT_S)
        measured += map(max, zip(*found, strict=True))
    errors = {}
    for case, real in zip(chosen, measured, strict=True):
        told = predicted(case)
        errors[case] = error = sum(told.values()) / real - 1
        sizes = (f"{n / 2**20:.2f} MiB" for n in (sum(told.values()), real))
        report.rows.append((str(case), *sizes, f"{error:+.1%}"))
        report.figures[str(case)] = {"predicted": told, "counted": real}
    least = min(errors, key=errors.__getitem__)
    size = statistics.median(abs(error) for error in errors.values())
    report.figures["median error"] = size
    report.bars = [
        at_least("configurations", len(errors), options.random or 30),
        at_most("largest under-estimate of the peak", max(0.0, -errors[least]), 0.02),
    ]
    if not options.random:
        largest = max(map(abs, errors.values()))
        report.bars.append(at_most("largest error of the peak", largest, 0.05))
    report.notes += [
        f"Median error {size:.1%}; the lowest prediction: {least}, {errors[least]:+.1%}.",
        f"Llama of {BLOCKS} blocks of width 128, {SAMPLES} samples of {LENGTH} tokens, AdamW, "
        f"chunks of {CHUNK // 1024} KiB; buffers that a CPU keeps for later are given back",
    ]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
