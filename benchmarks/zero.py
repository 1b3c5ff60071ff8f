"""ZeRO stages 1 and 2 beside DDP and FSDP2: step time, and bytes of state on each rank.

`python -m benchmarks.zero` starts its own ranks over gloo on this machine, one thread each. All
contestants train the same transformer on the same batches in the same processes, taking turns, and
must arrive at the same loss.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from benchmarks._harness import Report, alternate, at_most, finish
from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.comm import World, all_reduce, init_world, launch, shutdown, under_launcher

VOCABULARY = 512


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 2
    rounds: int = 9
    steps: int = 3
    """Steps of each turn."""
    width: int = 256
    depth: int = 6
    batch: int = 8
    length: int = 64
    keep: bool = False
    """Write benchmarks/results."""


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                options.width, 4, 4 * options.width, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(options.depth)
        )
        self.head = nn.Linear(options.width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(options.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, VOCABULARY]`` of ids ``[B, T]``."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


@dataclass
class Contestant:
    """A model in training."""

    name: str
    step: Callable[[Tensor], float]
    optimizer: Any
    gradients: Callable[[], Iterable[Tensor | None]]
    """Gradient buffers that this rank holds between steps."""
    steps: int = 0
    loss: float = float("nan")


def boosted(name: str, plugin: Plugin, options: Options) -> Contestant:
    """The model through the Booster."""
    model, optimizer = _model(options)
    booster = Booster(plugin)
    net, wrapped, *_ = booster.boost(model, optimizer)

    def step(ids: Tensor) -> float:
        loss = _loss(net, ids)
        booster.backward(loss, wrapped)
        wrapped.step()
        wrapped.zero_grad()
        return loss.item()

    def gradients() -> Iterable[Tensor | None]:
        chunks = getattr(wrapped, "chunks", None)
        if chunks is None:
            return (p.grad for p in net.parameters())
        return (tensor for c in chunks for tensor in (c.chunk.gradient, c.gradient_shard))

    return Contestant(name, step, optimizer, gradients)


def fsdp2(options: Options) -> Contestant:
    """The model under torch's fully_shard, each block a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = _model(options)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor) -> float:
        loss = _loss(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Contestant("FSDP2", step, optimizer, lambda: (p.grad for p in model.parameters()))


def _model(options: Options) -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer(options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def turn(contestant: Contestant, options: Options, world: World) -> float:
    """A few steps; returns seconds per step of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(options.steps):
        seed = contestant.steps * world.size + world.rank
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (options.batch, options.length), generator=generator).sort(
            dim=1
        )[0]
        contestant.loss = contestant.step(ids)
        contestant.steps += 1
    seconds = torch.tensor([time.perf_counter() - started])
    all_reduce(seconds, "max")
    return float(seconds) / options.steps


def local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of tensors on this rank, of distributed ones their local part."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None)
    return sum(t.untyped_storage().nbytes() if t.ndim else t.nbytes for t in local)


def state_bytes(contestant: Contestant) -> int:
    """Bytes of optimizer state on this rank."""
    states = contestant.optimizer.state.values()
    return local_bytes(v for state in states for v in state.values())


def measure(options: Options) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    # The loss of the contestant changes nothing in place, which is what FSDP2 warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    world = init_world()
    contestants = [
        boosted("DDP", TorchDDPPlugin(verbose=False), options),
        fsdp2(options),
        boosted("ZeRO stage 1", LowLevelZeroPlugin(stage=1, verbose=False), options),
        boosted("ZeRO stage 2", LowLevelZeroPlugin(stage=2, verbose=False), options),
    ]
    times = alternate(
        {c.name: lambda c=c: turn(c, options, world) for c in contestants}, options.rounds
    )
    reached = torch.tensor([c.loss for c in contestants], dtype=torch.float64)
    all_reduce(reached, "mean")
    losses: list[float] = reached.tolist()
    if not world.is_main:
        shutdown()
        return
    report = Report(
        "zero",
        f"one training step, {world.size} ranks over gloo, 1 thread each",
        ("", "step ms", "quartiles", "to DDP", "optimizer MiB", "loss at the end"),
    )
    base, state = times["DDP"].median, state_bytes(contestants[0])
    for contestant, loss in zip(contestants, losses, strict=True):
        spread, held = times[contestant.name], state_bytes(contestant)
        ratio = spread.median / base
        report.rows.append(
            (
                contestant.name,
                f"{1e3 * spread.median:.1f}",
                f"{1e3 * spread.low:.1f} to {1e3 * spread.high:.1f}",
                f"{ratio:.2f}",
                f"{held / 2**20:.2f}",
                f"{loss:.6f}",
            )
        )
        key = contestant.name.lower().replace(" ", "_")
        report.figures[key] = {"step_s": spread.median, "state_bytes": held, "loss": loss}
        if contestant.name.startswith("ZeRO"):
            share = held / (state / world.size)
            report.bars += [
                at_most(f"{contestant.name}: optimizer bytes to DDP's share", share, 1.03),
                at_most(f"{contestant.name}: loss to DDP's", abs(loss / losses[0] - 1), 1e-5),
            ]
    parameters = sum(p.numel() for p in Transformer(options).parameters())
    report.notes = [
        f"{parameters:,} parameters, {options.batch} x {options.length} tokens per rank; "
        f"medians of {options.rounds} turns of {options.steps} steps, taken in turns.",
        "On loopback the wire costs processor time, so overlap can gain little here.",
    ]
    finish(report, options.keep)
    shutdown()


def main() -> None:
    """Starts the ranks, or is one."""
    options = tyro.cli(Options, description=__doc__)
    if under_launcher():
        measure(options)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    sys.exit(launch("benchmarks.zero", sys.argv[1:], options.ranks))


if __name__ == "__main__":
    main()
