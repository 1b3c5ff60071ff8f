"""A memory limit: the model's state is larger, lies on the disk, and comes when it is needed.

    python examples/train_larger_than_memory.py
    torchrun --nproc-per-node 2 examples/train_larger_than_memory.py

State (parameters, gradients, AdamW's moments) takes 64 MiB, the limit leaves it about 14. It prints
what the plan says and what the last step has moved; the losses are those of a run without a limit.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from gulliver.comm.world import init_world

WIDTH, LAYERS, BATCH = 512, 16, 16


def main(steps: int = 6, limit: str = "32MiB") -> list[float]:
    """Trains a deep network to be another one; returns this rank's losses."""
    world = init_world()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    plugin = GeminiPlugin(
        memory_limit=limit,  # for state and activations, on each rank
        disk=f"{Path(tempfile.gettempdir())}:1GiB",  # what lies there leaves nothing behind
        step_in_backward=True,  # gradients are used up as soon as they are there
        verbose=False,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    if world.is_main:
        print(booster.plan.summary())

    losses = []
    target = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)).to(world.device)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, WIDTH, generator=draw)[world.rank :: world.size].to(world.device)
        loss = F.mse_loss(model(x), torch.tanh(x * target))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.is_main:
            print(f"step {step}  loss {losses[-1]:.4f}")
    if world.is_main:
        print(booster.compare())
    return losses


if __name__ == "__main__":
    main()
