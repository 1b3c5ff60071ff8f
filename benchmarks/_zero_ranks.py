"""What each rank does in `benchmarks.zero`: lets the contestants take turns, and measures.

[Note: a turn] A step may leave gathers under way that the next one waits for. So each turn begins
with a step that is not timed, and ends by waiting for what is left, which is not timed either: what
is timed begins and ends in the middle of training.

Read `measure`. It does not know what the figures are held against.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks._harness import Spread, alternate, slowest_rank
from benchmarks._models import Task, gpt, stdit
from benchmarks._peers import IN_BACKWARD, Contestant, build, make
from benchmarks.netlab import wire_bytes
from gulliver.booster import LowLevelZeroPlugin
from gulliver.cli.probe import measured_cluster
from gulliver.comm import World, all_gather, barrier, gather_objects, init_world, reduce_scatter
from gulliver.comm import shutdown as leave
from gulliver.planner.measure import measure_work

COMMUNICATION = "communication"
COMPUTE = "compute"
PIECE = 1 << 20  # Elements that communication alone sends at once
MOST_SETTLING = 200
PEERS = (
    *("DDP", "DDP 5", "DDP ZeRO 1", "FSDP2", "FSDP2 keep"),
    *("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3"),
)
"""DDP with smaller buckets too: our chunks are tuned, so it shall not stay at its default."""
OURS = (*(f"ZeRO {stage}" for stage in range(4)), *(f"ZeRO {s} {IN_BACKWARD}" for s in (1, 2, 3)))


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    model: Literal["gpt", "stdit"] = "gpt"  # A GPT, or the demonstration's video transformer
    ranks: int = 2
    networks: tuple[str, ...] = ("loopback", "1")
    """Rates such as 1gbit, or communication as a multiple of compute; they need root."""
    contestants: tuple[str, ...] = (*PEERS, *OURS)
    rounds: int = 3
    steps: int = 1  # Timed steps of each turn
    batch: int = 0
    """Sequences or clips on each rank; 0: 16 clips, 2 sequences, with more ranks as many as those.

    Sending costs time of the processors too: ranks that share them need more to compute.
    """
    width: int = 384  # Of the GPT
    depth: int = 8  # Blocks of the GPT
    length: int = 128  # Tokens of a sequence
    chunk_mb: str = "auto"  # Size of our chunks in MiB, or auto
    keep: bool = False  # Write benchmarks/results

    def task(self) -> Task:
        """Model and batches that are trained."""
        if self.model == "stdit":
            return stdit(self.batch or 16)
        return gpt(self.width, self.depth, self.batch or max(2, self.ranks), self.length)

    def chunk(self) -> float | str:
        """The size of our chunks, as the plugin takes it."""
        return self.chunk_mb if self.chunk_mb.isalpha() else float(self.chunk_mb)


@dataclass(frozen=True)
class Entry:
    """Measurements of a contestant."""

    step: Spread  # seconds of a step, of the slowest rank
    # bytes that this rank sent in a step; None where they cannot be counted
    wire: float | None = None
    held: int = 0  # bytes of model state between steps
    peak: int = 0  # and at most
    planned: int | None = None  # what had been predicted of that
    predicted_s: float | None = None  # seconds of a step, as the plan has them
    losses: tuple[float, ...] = ()  # of this rank's steps
    chunk_mb: float | None = None  # of ours, as tuned
    passes: tuple[float, ...] = ()  # median seconds of forward, backward and update, of this rank


@dataclass(frozen=True)
class Found:
    """Measurements of a rank on one network."""

    entries: dict[str, Entry]  # by contestant, with `COMPUTE`
    communication: Spread  # seconds of a reduce-scatter and an all-gather of all parameters, alone
    parameter_bytes: int  # of the whole model
    absent: list[str] = field(default_factory=list)  # contestants that are not installed


def measure(options: Options, names: Sequence[str], shaped: bool, cache: str) -> Found:
    """One rank's part on one network."""
    os.environ["GULLIVER_CACHE"] = cache
    cores = sorted(os.sched_getaffinity(0))
    # Before there are threads: they stay on the core of their rank.
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    world, task = init_world(), options.task()
    predicted = _predicted(task, names, world)
    built = {name: build(name, task, options.chunk()) for name in (COMPUTE, *names)}
    contestants = [c for c in built.values() if c is not None]
    peaks = {c.name: _settle(c, world) for c in contestants}
    wire: dict[str, list[float]] = {c.name: [] for c in contestants}
    count = sum(p.numel() for p in task.model().parameters())
    turns: dict[str, Callable[[], float]] = {
        c.name: lambda c=c: _turn(c, options.steps, world, wire[c.name] if shaped else None)
        for c in contestants
    }
    turns[COMMUNICATION] = _communication(count, world)
    times = alternate(turns, options.rounds, warm_up=0)  # all have settled
    entries = {
        c.name: _entry(options, c, times[c.name], wire[c.name], peaks[c.name], predicted)
        for c in contestants
    }
    leave()
    absent = [name for name, contestant in built.items() if contestant is None]
    return Found(entries, times[COMMUNICATION], 4 * count, absent)


class _Loss(nn.Module):
    """A model whose result is its loss on the batch of a seed."""

    def __init__(self, task: Task, net: nn.Module) -> None:
        super().__init__()
        self.task, self.net = task, net

    def forward(self, seed: Tensor) -> Any:
        return SimpleNamespace(loss=self.task.loss(self.net, int(seed)))


def _predicted(task: Task, names: Sequence[str], world: World) -> dict[str, float]:
    """Seconds of a step by name, of links and passes measured on all ranks at once."""
    cluster = measured_cluster(world)
    net, optimizer = make(task)
    barrier()
    own = measure_work(_Loss(task, net), optimizer, torch.zeros(1), None, (), None)
    work = max(gather_objects(own), key=lambda w: w.forward_s + w.backward_s)
    found = {}
    for name in names:
        kind, _, stage = name.partition(" ")
        if kind == "ZeRO" and stage.isdigit():
            plugin = LowLevelZeroPlugin(int(stage), verbose=False)
            plan = plugin.make_plan(net, optimizer, cluster, work=work)
            found[name] = plan.predicted.seconds.step
    return found


def _settle(contestant: Contestant, world: World) -> int:
    """Steps until it runs as it will; returns the most bytes that it holds from then on."""
    for _ in range(MOST_SETTLING):
        if contestant.settled:
            break
        contestant.advance(world.rank, world.size)
    return contestant.peak_bytes(world.rank, world.size)


def _turn(contestant: Contestant, steps: int, world: World, wire: list[float] | None) -> float:
    """A few steps in the middle of training; seconds per step of the slowest rank."""
    barrier()
    sent = wire_bytes()[0] if wire is not None else 0
    contestant.advance(world.rank, world.size)
    started = time.perf_counter()
    for _ in range(steps):
        contestant.advance(world.rank, world.size)
    seconds = (time.perf_counter() - started) / steps
    contestant.finish()
    barrier()
    if wire is not None:
        wire.append((wire_bytes()[0] - sent) / (steps + 1))
    return slowest_rank(seconds)


def _communication(count: int, world: World) -> Callable[[], float]:
    """A reduce-scatter and an all-gather of so many elements, in pieces one after another."""
    size = min(PIECE, count) // world.size
    pieces = -(-count // (size * world.size))
    whole = [torch.zeros(size * world.size) for _ in range(pieces)]
    parts = [torch.zeros(size) for _ in range(pieces)]

    def once() -> None:
        pairs = list(zip(whole, parts, strict=True))
        handles = [reduce_scatter(part, w, "sum", async_op=True) for w, part in pairs]
        for handle in handles:
            handle.wait()
        handles = [all_gather(w, part, async_op=True) for w, part in pairs]
        for handle in handles:
            handle.wait()

    def turn() -> float:
        if world.size == 1:
            return 0.0
        once()  # connections that have been idle start slowly
        started = time.perf_counter()
        once()
        return slowest_rank(time.perf_counter() - started)

    return turn


def _entry(
    options: Options,
    contestant: Contestant,
    step: Spread,
    wire: list[float],
    peak: int,
    predicted: dict[str, float],
) -> Entry:
    measured = contestant.passes[-options.rounds * (options.steps + 1) :]
    return Entry(
        step,
        sorted(wire)[len(wire) // 2] if wire else None,
        contestant.bytes(),
        peak,
        contestant.planned() if contestant.planned is not None else None,
        predicted.get(contestant.name),
        tuple(contestant.losses),
        contestant.chunk_mb,
        tuple(statistics.median(seconds) for seconds in zip(*measured, strict=True)),
    )
