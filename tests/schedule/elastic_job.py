"""A job for tests of the scheduler: a small network, exact in float64.

Its steps last as long as `--sample-seconds` and `--step-seconds` say: they sleep, as a host does
while a device computes, so that slots need not be cores. It writes which samples each rank drew.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

from gulliver._compat import COMPILER
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.schedule import elastic
from gulliver.schedule.live.training import Elastic

PRELOADED = COMPILER in sys.modules
"""Whether this process began with what takes seconds to import."""


@dataclass(frozen=True)
class Options:
    """Options of the job."""

    steps: int = 40
    """Number of steps."""
    every: int = 10
    """Steps between two checkpoints."""
    sample_seconds: float = 0.0
    """Seconds of a sample."""
    step_seconds: float = 0.0
    """Seconds of a step besides."""
    stage: int = 2
    """Stage of ZeRO."""
    batch: int = 16
    """Batch size without a scheduler."""
    drawn: Path | None = None
    """Folder for the samples that each rank drew."""
    noise: bool = False
    """Measure the gradient noise scale."""


def samples_of(step: int, batch: int) -> tuple[Tensor, Tensor]:
    """Inputs [batch, 8] and targets [batch, 1] of a step: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 8, generator=generator, dtype=torch.float64)
    return x, x.square().mean(1, keepdim=True).sin()


def plain_losses(steps: int, batch: int) -> list[float]:
    """Losses of the same training in one process of plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x, y = samples_of(step, batch)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(options: Options, job: Elastic) -> None:
    """Trains to the end, or until the scheduler wants the slots."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plugin = LowLevelZeroPlugin(stage=options.stage, verbose=False)
    booster = Booster(plugin=plugin, gradient_noise=options.noise)
    model, optimizer, *_ = booster.boost(model, optimizer)
    first = booster.load(job.checkpoints, model, optimizer).step + 1 if job.resumes else 0
    for step in job.steps(first, options.steps):
        begun = time.monotonic()
        mine = job.share()
        x, y = (part[mine.start : mine.stop] for part in samples_of(step, job.batch))
        loss = nn.functional.mse_loss(model(x), y)
        booster.backward(loss * job.weight(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        known = booster.noise_scale(job.batch) if options.noise else None
        note(options, job, step, mine)
        lasts = options.step_seconds + options.sample_seconds * len(mine)
        time.sleep(max(0.0, begun + lasts - time.monotonic()))
        noise = None if known is None else known.scale
        if job.report(loss, noise=noise) or step % options.every == options.every - 1:
            booster.save(job.checkpoints, step, model, optimizer)
    print("saved", time.time())
    booster.close()
    print("closed", time.time())


def note(options: Options, job: Elastic, step: int, mine: range) -> None:
    """Writes which samples of a step this rank drew."""
    if options.drawn is not None:
        from gulliver.comm import current_world

        line = {"step": step, "attempt": job.attempt, "samples": [mine.start, mine.stop]}
        line["pid"] = os.getpid()
        line["preloaded"] = PRELOADED
        with open(options.drawn / f"rank-{current_world().rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Runs the job."""
    options = tyro.cli(Options)
    train(options, elastic(batch=options.batch))


if __name__ == "__main__":
    main()
