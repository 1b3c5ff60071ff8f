"""What each rank does in `benchmarks.pipeline`: lets the contestants take turns, and measures.

The model is a row of residual MLPs, all equal or of very unequal widths. The peer is torch's own
pipelining, cut by hand into as many blocks for each stage; ours takes torch's schedules, too, so
what differs is the cut, the stages, and what is done before and after a step. Read `measure`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks._harness import Spread, alternate, slowest_rank
from gulliver.comm import barrier, init_world
from gulliver.comm import shutdown as leave
from gulliver.comm.groups import RankGroup
from gulliver.parallel.pipeline import Pipeline, cut, make_stage, stack_of, stages_by_rank
from gulliver.parallel.pipeline.stack import block_costs

TORCH = {"torch 1f1b": Schedule1F1B, "torch gpipe": ScheduleGPipe}
OURS = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved": ("interleaved", 2),
    "zero_bubble": ("zero_bubble", 1),
    "zbv": ("zbv", 2),
}
EVEN = "1f1b, even cut"  # Ours, cut as the peer is
CONTESTANTS = (*TORCH, EVEN, *OURS)
MODELS = ("uniform", "non-uniform")


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 4
    networks: tuple[str, ...] = ("loopback", "1gbit")
    """Loopback, or rates of shaped links, which need root."""
    models: tuple[str, ...] = MODELS
    contestants: tuple[str, ...] = CONTESTANTS
    rounds: int = 5  # Turns of a step each
    micro_batches: int = 8
    blocks: int = 16
    hidden: int = 256
    samples: int = 32
    length: int = 64  # Tokens of a sample
    keep: bool = False  # Write benchmarks/results


class Residual(nn.Module):
    """A residual MLP."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, wide), nn.Linear(wide, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def widths(model: str, options: Options) -> list[int]:
    """Widths of the MLPs; those of the non-uniform model grow fourfold, with equal work in all."""
    mean = 4 * options.hidden
    if model == "uniform":
        return [mean] * options.blocks
    steps = [1 + 3 * n / (options.blocks - 1) for n in range(options.blocks)]
    return [round(mean * s * options.blocks / sum(steps)) for s in steps]


def build(model: str, options: Options) -> nn.Sequential:
    """The same weights in every rank and contestant."""
    torch.manual_seed(1)
    return nn.Sequential(*(Residual(options.hidden, w) for w in widths(model, options)))


def loss_of(outputs: Tensor, given: Any) -> Tensor:
    """A number that needs no labels."""
    return outputs.square().mean()


@dataclass(frozen=True)
class Found:
    """Results of a rank on one network, for one model."""

    steps: dict[str, Spread]  # seconds of the slowest rank, by contestant
    forward: list[float]  # seconds of each of this rank's blocks for a micro-batch, measured alone
    backward: list[float]  # the same, backward
    cuts: dict[str, tuple[int, ...]]  # blocks of each stage, by contestant
    losses: dict[str, float]  # of the last step, by contestant; they must agree


def measure(options: Options, model: str) -> Found:
    """One rank's part on one network."""
    world = init_world()
    torch.set_num_threads(1)
    rank_group = RankGroup(tuple(range(world.size)), world.rank)
    shape = (options.samples, options.length, options.hidden)
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    forward, backward = block_seconds(build(model, options), batch, options)
    cuts: dict[str, tuple[int, ...]] = {}
    losses: dict[str, float] = {}
    turns: dict[str, Callable[[], float]] = {}
    for name in options.contestants:
        step, cuts[name] = _contestant(name, model, options, rank_group, batch)
        turns[name] = lambda step=step, name=name: _turn(step, name, losses)
    steps = alternate(turns, options.rounds)
    dist.barrier()
    leave()
    return Found(steps, forward, backward, cuts, losses)


Step = Callable[[], float]


def _contestant(
    name: str, model: str, options: Options, rank_group: RankGroup, batch: Tensor
) -> tuple[Step, tuple[int, ...]]:
    whole = build(model, options)
    if name in TORCH:
        return _torch(TORCH[name], whole, options, rank_group, batch)
    style, chunks = OURS["1f1b"] if name == EVEN else OURS[name]
    numbers = stages_by_rank(style, rank_group.size, chunks)
    stack = stack_of(whole)
    costs = [1.0] * options.blocks if name == EVEN else block_costs(whole, stack)
    found = cut(whole, stack, sum(map(len, numbers)), costs=costs)
    stage = make_stage(whole, stack, found, rank_group, numbers)
    pipe = Pipeline(stage, style, options.micro_batches)

    def step() -> float:
        whole.zero_grad()
        return float(pipe.run(batch, loss_of)["loss"])

    return step, found.sizes


def _torch(
    schedule: Any, whole: nn.Sequential, options: Options, rank_group: RankGroup, batch: Tensor
) -> tuple[Step, tuple[int, ...]]:
    """The peer: as many blocks for each stage, cut by hand."""
    bounds = [options.blocks * n // rank_group.size for n in range(rank_group.size + 1)]
    blocks = list(whole.children())[bounds[rank_group.rank] : bounds[rank_group.rank + 1]]
    mine = nn.Sequential(*blocks)
    stage = PipelineStage(mine, rank_group.rank, rank_group.size, torch.device("cpu"))
    run = schedule(stage, options.micro_batches, loss_fn=loss_of)
    last = rank_group.rank == rank_group.size - 1

    def step() -> float:
        mine.zero_grad()
        losses: list[Tensor] = []
        if rank_group.rank == 0:
            run.step(batch)
        elif last:
            run.step(target=batch, losses=losses)
        else:
            run.step()
        # Ours gives every rank the loss.
        found = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(found, rank_group.size - 1)
        return float(found)

    return step, tuple(b - a for a, b in itertools.pairwise(bounds))


def _turn(step: Step, name: str, losses: dict[str, float]) -> float:
    barrier()
    started = time.perf_counter()
    losses[name] = step()
    return slowest_rank(time.perf_counter() - started)


def block_seconds(
    whole: nn.Sequential, batch: Tensor, options: Options, turns: int = 5
) -> tuple[list[float], list[float]]:
    """Seconds of each block for a micro-batch, forward and backward, while all ranks work."""
    given = batch[: options.samples // options.micro_batches]
    forward, backward = [], []
    for block in whole.children():
        first: list[float] = []
        second: list[float] = []
        for _ in range(turns):
            x = given.clone().requires_grad_()
            started = time.perf_counter()
            out = block(x)
            first.append(time.perf_counter() - started)
            gradient = torch.ones_like(out)
            started = time.perf_counter()
            out.backward(gradient)
            second.append(time.perf_counter() - started)
        forward.append(Spread(tuple(first)).median)
        backward.append(Spread(tuple(second)).median)
    whole.zero_grad()
    return forward, backward


def stage_seconds(seconds: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Seconds of stages, by their numbers of blocks."""
    at, found = 0, []
    for size in sizes:
        found.append(sum(seconds[at : at + size]))
        at += size
    return found
