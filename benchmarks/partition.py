"""Layers over unequal devices: the partition that is solved beside the even cut.

`python -m benchmarks.partition` has two parts. One is measured: 4 ranks, two of them slowed 2 and 4
times, a row of 24 equal blocks, 1 and 8 micro-batches through our pipeline with the even cut and
with the one that `gulliver.solve.place_layers` finds; what is predicted stands beside it. A block
computes a little and sleeps until its time is over, on slowed ranks so many times longer, so that
4 ranks do not fight for fewer cores.

The other is a simulation, of the setting for which Sky Computing (arXiv 2202.11836) reports 55 %
less time: 64 devices, a BERT of 160 layers, slow-downs drawn with the seeds of its public code. (It
cuts each layer in three; whole layers are placed here.) It says how much of that comes from
balance, how much from using fast devices more, and how much of it the drawn devices allow at all.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from benchmarks._pipeline_ranks import _turn as turn
from benchmarks.netlab import NetlabError, run
from gulliver.comm import RankGroup, init_world
from gulliver.comm import shutdown as leave
from gulliver.errors import GulliverError
from gulliver.parallel.pipeline import Pipeline, cut, deal, make_stage, stack_of
from gulliver.solve import Fleet, Placement, makespan, place_layers

TIMEOUT_S = 600.0
OFF, SOLVED, EVEN = 0.15, "solved", "even cut"
CLAIMED = 0.55
"""Less training time than with the even cut, as the paper's abstract says."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    slow: tuple[float, ...] = (1.0, 1.0, 2.0, 4.0)
    """Slow-downs of the ranks."""
    blocks: int = 24
    micro_batches: tuple[int, ...] = (1, 8)
    most: int = 10
    """Blocks that a rank can hold; with one micro-batch and no limit one rank would take all."""
    block_s: float = 4e-3
    """Seconds of a block on a rank that is not slowed, forward; backward takes twice as long."""
    rounds: int = 5
    measured: bool = True
    """Run the part that is measured."""
    simulated: bool = True
    """Run the part that is simulated."""
    keep: bool = False
    """Write benchmarks/results."""


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: float, seconds: float) -> Tensor:
        _until(begun + seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        _until(time.perf_counter() + 2 * ctx.seconds)
        return grad_outputs[0], None, None


def _until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


class Slept(nn.Module):
    """A residual layer whose forward and backward take a given time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(32, 32), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Adds to ``x`` [..., 32]."""
        begun = time.perf_counter()
        return _Waited.apply(x + torch.tanh(self.layer(x)), begun, self.seconds)  # type: ignore[return-value]


def loss_of(outputs: Tensor, given: Any) -> Tensor:
    """A number that needs no labels."""
    return outputs.square().mean()


@dataclass(frozen=True)
class Found:
    """Findings of a rank: seconds of a step and the loss by contestant, and of a block alone."""

    steps: dict[str, Spread]
    losses: dict[str, float]
    block_s: float


def measure(
    options: Options, plans: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]
) -> Found:
    """One rank's part.

    Args:
        options: sizes.
        plans: by contestant: device of each stage, blocks of each stage, micro-batches.
    """
    world = init_world()
    torch.set_num_threads(1)
    group, turns, losses = RankGroup(tuple(range(world.size)), world.rank), {}, dict[str, float]()
    for name, (devices, sizes, count) in plans.items():
        torch.manual_seed(1)
        mine = options.slow[devices[world.rank]] * options.block_s
        whole = nn.Sequential(*(Slept(mine) for _ in range(options.blocks)))
        numbers, stack = deal("1f1b", world.size, 1), stack_of(whole)
        stage = make_stage(whole, stack, cut(whole, stack, world.size, at=sizes), group, numbers)
        # 1F1B wants as many micro-batches as ranks.
        pipe = Pipeline(stage, "1f1b" if count >= world.size else "gpipe", count)
        batch = torch.randn((8, 4, 32), generator=torch.Generator().manual_seed(2))

        def step(pipe: Pipeline = pipe, whole: nn.Module = whole, batch: Tensor = batch) -> float:
            whole.zero_grad()
            return float(pipe.run(batch, loss_of)["loss"])

        turns[name] = lambda step=step, name=name: turn(step, name, losses)
    alone = _alone(options)
    steps = alternate(turns, options.rounds)
    dist.barrier()
    leave()
    return Found(steps, losses, alone)


def _alone(options: Options) -> float:
    """Seconds of a block that is not slowed, forward and backward."""
    block, found = Slept(options.block_s), list[float]()
    for _ in range(9):
        x = torch.randn(1, 4, 32, requires_grad=True)
        begun = time.perf_counter()
        block(x).sum().backward()
        found.append(time.perf_counter() - begun)
    return Spread(tuple(found)).median


def _even(fleet: Fleet, count: float) -> Placement:
    """Deals the layers evenly to the devices, in their order."""
    bounds = tuple(fleet.layers * n // fleet.devices for n in range(fleet.devices + 1))
    servers = fleet.servers(range(fleet.devices), bounds)
    seconds = makespan(servers, count)
    return Placement(tuple(range(fleet.devices)), bounds, seconds, 0.0, servers, False)


def measured_part(made: Report, options: Options) -> None:
    """The pipelines, measured beside what is predicted."""
    seconds = np.outer(options.slow, np.ones(options.blocks))
    limits = [options.most] * len(options.slow)
    fleet = Fleet(seconds, memory=[1.0] * options.blocks, limits=limits, every=True)
    placed = {
        f"{name}, {count} micro-batches": (find(fleet, count), count)
        for count in options.micro_batches
        for name, find in ((EVEN, _even), (SOLVED, place_layers))
    }
    plans = {name: (p.devices, p.sizes, count) for name, (p, count) in placed.items()}
    found = run(measure, None, options, plans, ranks=len(options.slow), timeout_s=TIMEOUT_S)
    block = sum(f.block_s for f in found) / len(found)
    steps = found[0].steps
    for name, (placement, count) in placed.items():
        even = steps[f"{EVEN}, {count} micro-batches"].median
        foretold, step = block * placement.seconds, steps[name].median
        speeds = "+".join(
            f"{n} at {options.slow[d]:g}x"
            for d, n in zip(placement.devices, placement.sizes, strict=True)
        )
        made.rows.append(
            (name, speeds, f"{1e3 * step:.0f}", f"{1e3 * foretold:.0f}", f"{1 - step / even:.0%}")
        )
        made.figures[name] = {"step_s": step, "predicted_s": foretold, "gain": 1 - step / even}
        made.bars.append(at_most(f"{name}: off", abs(step / foretold - 1), OFF))
        if name.startswith(SOLVED):
            made.bars.append(at_least(f"{name}: gain", 1 - step / even, 0.0))
    losses = [v for f in found[:1] for v in f.losses.values()]
    made.bars.append(at_most("losses apart", max(losses) / min(losses) - 1, 1e-4))


def simulated_part(made: Report) -> None:
    """The paper's setting, with both objectives."""
    for name, slow, limited in settings():
        work = np.array([0.05, *([1.0] * 160), 0.05])
        # Bytes in layers: a device of the fewest holds twice what the even cut gives it.
        memory, spread = np.ones(len(work)), 1 + 2 * np.random.default_rng(22).random(65)[1:]
        limits = 2 * len(work) / 64 * 3 / spread if limited else None
        fleet = Fleet(np.outer(slow, work), memory=memory if limited else None, limits=limits)
        placed = {count: place_layers(fleet, count, tries=4) for count in (1, 16, math.inf)}
        for count, best in placed.items():
            even, balanced = _even(fleet, count), makespan(placed[math.inf].servers, count)
            parts = [1 - v / even.seconds for v in (best.seconds, balanced)]
            told = f"{name}, {'endless' if count == math.inf else count} micro-batches"
            made.rows.append(
                (told, f"{len(best.devices)} of 64 devices", "-", f"gap {best.gap:.1%}",
                 f"{parts[0]:.0%}, by balance alone {parts[1]:.0%}")
            )  # fmt: skip
            made.figures[told] = {"gain": parts[0], "balanced": parts[1], "gap": best.gap}
            made.bars.append(at_most(f"{told}: gap", best.gap, 0.05))


def settings() -> Sequence[tuple[str, np.ndarray, bool]]:
    """Names, slow-downs of 64 devices, and whether memory is limited."""
    draws = np.random.default_rng(32).random(65)[1:]
    integers = np.random.default_rng(35).integers(1, 7, 65)[1:].astype(float)
    return (
        ("slow-downs 1 to 2 (code)", 1 + draws, True),
        ("slow-downs 1 to 4 (comment)", 1 + 3 * draws, True),
        ("slow-downs 1 to 6 (older configuration)", integers, True),
        ("slow-downs 1 to 4, no limit of memory", 1 + 3 * draws, False),
    )


def report(options: Options) -> Report:
    """The table, with its bars."""
    slowed = ", ".join(f"{s:g}" for s in options.slow)
    made = Report(
        "partition",
        "; ".join(
            title
            for title, wanted in (
                (f"{options.blocks} blocks on ranks slowed {slowed}", options.measured),
                ("162 layers on 64 devices, simulated", options.simulated),
            )
            if wanted
        ),
        (
            "setting",
            "layers or devices",
            "step ms",
            "predicted ms or gap",
            "less than the even cut",
        ),
    )
    if options.measured:
        measured_part(made, options)
    if options.simulated:
        simulated_part(made)
    if options.measured:
        made.notes.append(
            "Blocks sleep: a rank's time is its own, whatever the cores do. Each rank holds at "
            f"most {options.most} blocks, and each holds one."
        )
    if options.simulated:
        made.notes.append(_SPLIT)
    return made


_SPLIT = (
    f"The paper says {CLAIMED:.0%} less. Its runner has no micro-batches: a step is the sum of all "
    "stages, so what it can win comes from leaving layers to fast devices as far as their memory "
    "goes. Its solver looks for balance alone: the last column says how much of that sum it wins. "
    "The bound of gaps takes whole runs of layers, which may overlap."
)


def main() -> None:
    """Measures what the options say."""
    try:
        options = tyro.cli(Options, description=__doc__)
        made = report(options)
        finish(made, options.keep)
    except (NetlabError, GulliverError) as error:
        sys.exit(f"benchmarks.partition: {error}")


if __name__ == "__main__":
    main()
