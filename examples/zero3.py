"""ZeRO-3: no rank has the whole model; parameters come together when a layer needs them.

    python examples/zero3.py
    torchrun --nproc-per-node 2 examples/zero3.py       # half of the state on each rank

The loop is that of one process. It prints what the plan predicts for each rank, what a rank holds
between two steps, and losses that are the same however many ranks there are.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.comm.world import init_world

WIDTH, LAYERS, BATCH = 256, 8, 32
MIB = 2**20


def main(steps: int = 20) -> list[float]:
    """Trains a deep network to be another one; returns this rank's losses."""
    world = init_world()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = sum(p.nbytes for p in model.parameters())

    plugin = LowLevelZeroPlugin(
        stage=3,
        chunk_mb=0.5,  # parameters that are gathered at once: here about two layers
        gather_ahead=1,  # chunks that travel while the one before is used
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
        batch = torch.randn(BATCH, WIDTH, generator=draw)[world.rank :: world.size]
        x = batch.to(world.device)
        loss = F.mse_loss(model(x), torch.tanh(x * target))
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if world.is_main and step % 5 == 0:
            print(f"step {step:2}  loss {losses[-1]:.4f}")

    state = sum(
        value.nbytes
        for entries in optimizer.state.values()
        for value in entries.values()
        if torch.is_tensor(value)
    )
    if world.is_main:
        print(
            f"AdamW's state: {state / MIB:.2f} MiB on this rank, "
            f"{2 * whole / MIB:.2f} MiB in one process"
        )
    return losses


if __name__ == "__main__":
    main()
