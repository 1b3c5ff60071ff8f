"""Save while training goes on, and resume on another number of ranks.

    torchrun --nproc-per-node 2 examples/resume.py        # steps 0 to 19
    python examples/resume.py                             # steps 20 to 39, on one rank
    torchrun --nproc-per-node 3 examples/resume.py        # steps 40 to 59, on three

Every call goes on where the newest complete checkpoint in the folder ends. Remove the folder to
begin anew; `gulliver checkpoint ls out/resume` lists what is in it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.checkpoint import CheckpointFolder
from gulliver.comm.world import World, init_world

WIDTH, BATCH = 32, 24


def batch(step: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's samples; the whole is the same for any number of ranks."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=draw)[world.rank :: world.size].to(world.device)
    return x, x.sort(dim=1).values


def main(steps: int = 20, folder: Path | str = "out/resume", stage: int = 2) -> list[float]:
    """Trains `steps` more steps; returns this rank's losses."""
    world = init_world()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
    model = model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, verbose=False))
    model, optimizer, *_ = booster.boost(model, optimizer)

    first = 0
    if CheckpointFolder(Path(folder)).latest() is not None:
        # `state` names what else was saved; a value that holds no tensor stands for whatever it is.
        loaded = booster.load(folder, model, optimizer, scheduler, state={"ranks": None})
        first = loaded.step + 1
        if world.is_main:
            saved = loaded.values["ranks"]
            print(f"step {loaded.step}, saved by {saved} ranks, goes on with {world.size}")

    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, world)
        loss = F.mse_loss(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            booster.save(folder, step, model, optimizer, scheduler, state={"ranks": world.size})
            if world.is_main:
                print(f"step {step:3}  loss {loss.item():.4f}, saving")
    booster.close()  # waits until the last checkpoint is on the disk
    return losses


if __name__ == "__main__":
    main()
