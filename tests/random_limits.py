"""Random small models under random limits: never beyond the limit, the bits of torch, or refused.

``python -m tests.random_limits FILE SECONDS`` tries one after the other in this process, writes a
line for each to the file, and goes on after the last one when it is started again.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from gulliver.memory.manager import Manager

STEPS, ROWS = 3, 3
OPTIMIZERS: dict[str, list[dict[str, object]]] = {
    "AdamW": [{}, {"amsgrad": True}, {"foreach": True}],
    "Adam": [{}, {"weight_decay": 0.1}, {"fused": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}],
    "Adagrad": [{}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Rprop": [{}],
    "ASGD": [{}],
}


class Drawn(nn.Module):
    """Layers of drawn widths; some frozen, tied, unused, skipped in some steps, or called twice."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = 4 * draw.randint(1, 24)
        self.embed = nn.Embedding(draw.randint(4, 60), width)
        self.layers, self.kinds = nn.ModuleList(), list[str]()
        for _ in range(draw.randint(1, 6)):
            inner = width * draw.randint(1, 4)
            self.layers.append(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, inner, bias=draw.random() < 0.7),
                    nn.GELU(),
                    nn.Linear(inner, width),
                )
            )
            self.kinds.append(draw.choice(("", "", "", "twice", "skipped", "unused")))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        share = draw.choice((0.0, 0.0, 0.4))
        for module in self.layers:
            module.requires_grad_(draw.random() >= share)

    def forward(self, ids: Tensor, step: int) -> Tensor:
        x = self.embed(ids)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            for _ in range({"twice": 2, "unused": 0, "skipped": step % 2}.get(kind, 1)):
                x = x + layer(x)
        return self.head(self.norm(x))


@dataclass
class RandomCase:
    """A model, an optimizer, a way of training and a limit.

    Attributes:
        seed: seed that all of it is drawn from.
    """

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.draw_model = draw.randrange(2**30)
        self.optimizer = draw.choice(sorted(OPTIMIZERS))
        self.options = draw.choice(OPTIMIZERS[self.optimizer])
        self.early, self.passes = draw.random() < 0.5, draw.choice((1, 1, 2))
        self.norm = draw.choice((0.0, 0.0, 1e9))
        self.chunk_mb = draw.choice((0.004, 0.016, 0.06))
        self.more = draw.choice((0.0, 0.0, 0.1, 0.5, 1.0))

    def made(self) -> tuple[Drawn, torch.optim.Optimizer]:
        torch.manual_seed(self.draw_model)
        model = Drawn(random.Random(self.draw_model))
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        return model, getattr(torch.optim, self.optimizer)(groups, lr=1e-3, **self.options)

    def plugin(self, limit: int | str, folder: str) -> GeminiPlugin:
        return GeminiPlugin(
            limit,
            disk=f"{folder}:1GiB",
            step_in_backward=self.early,
            max_norm=self.norm,
            chunk_mb=self.chunk_mb,
            verbose=False,
        )

    def loss(self, model: nn.Module, step: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 10 * step + part)
        rows = ROWS + (step % 2)
        ids = torch.randint(4, (rows, 4), generator=generator)
        return F.cross_entropy(model(ids, step).flatten(0, 1), ids.flatten())


Backward = Callable[[Tensor, bool], None]


def _train(
    case: RandomCase, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Backward
) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        for part in range(case.passes):
            loss = case.loss(model, step, part)
            backward(loss, part < case.passes - 1)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@contextmanager
def _watched(manager: Manager) -> Iterator[list[int]]:
    """Most bytes of memory that a manager has held beyond its budget."""
    most, memory = [0], manager._traffic.memory

    def taken(size: int) -> Tensor:
        found = memory(size)
        most[0] = max(most[0], manager.held - manager.budget)
        return found

    with patch.object(manager._traffic, "memory", taken):
        yield most


def problem(case: RandomCase, folder: str) -> str:
    """What is wrong with a case; empty where nothing is."""
    model, optimizer = case.made()
    wanted = _train(case, model, optimizer, lambda loss, _: loss.backward())
    model, optimizer = case.made()
    moved = case.plugin("100GiB", folder).make_plan(model, optimizer).predicted.moved
    assert moved is not None
    least = moved.minimum
    try:
        case.plugin(least - 8192, folder).make_plan(model, optimizer)
        return "a limit below the least was not refused"
    except GulliverError as error:
        if "limit" not in str(error):
            return f"refused by {error}"
    states = sum(16 * p.numel() for p in model.parameters())
    booster = Booster(case.plugin(least + int(case.more * states), folder), verbose=False)
    # What else this process holds, and gives back, is no business of the model.
    with patch.object(_limited, "Footprint", side_effect=OSError):
        net, boosted, *_ = booster.boost(model, optimizer)
    manager = boosted.shards.manager
    manager.counter.restart()

    def backward(loss: Tensor, more: bool) -> None:
        if more:
            with booster.no_sync(net, boosted):
                booster.backward(loss, boosted)
        else:
            booster.backward(loss, boosted)

    try:
        with _watched(manager) as beyond:
            found = _train(case, net, boosted, backward)
        if beyond[0] > 0 or sum(manager.counter.fullest.values()) > manager.budget:
            return f"{beyond[0]} bytes beyond the budget"
    except GulliverError as error:
        return str(error)
    finally:
        booster.close()
    if not all(map(torch.equal, found, wanted)):
        return "other bits"
    return ""


def main(file: str, seconds: str) -> None:
    torch.set_num_threads(1)
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    path, due = Path(file), time.process_time() + float(seconds)
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seed = done[-1]["seed"] + 1 if done else 0
    with path.open("a") as lines, tempfile.TemporaryDirectory() as folder:
        while time.process_time() < due:
            found = {"seed": seed, "problem": problem(RandomCase(seed), folder)}
            lines.write(json.dumps(found) + "\n")
            lines.flush()
            seed += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
