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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
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
        ranks: number of ranks, each with a batch of its own.
    """

    seed: int
    ranks: int = 1

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.draw_model = draw.randrange(2**30)
        # Over several ranks sums differ in their last bits, which some make more of.
        known = sorted(OPTIMIZERS) if self.ranks == 1 else ["AdamW", "RMSprop", "SGD"]
        self.optimizer = draw.choice(known)
        self.options = draw.choice(OPTIMIZERS[self.optimizer])
        self.early, self.passes = draw.random() < 0.5, draw.choice((1, 1, 2))
        self.norm = draw.choice((0.0, 0.0, 1e9))
        self.chunk_mb = draw.choice((0.004, 0.016, 0.06))
        self.more = draw.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        self.evaluates = draw.random() < 0.5

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

    def loss(self, model: nn.Module, step: int, part: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 10 * step + part + 1000 * rank)
        rows = ROWS + (step % 2)
        ids = torch.randint(4, (rows, 4), generator=generator)
        return F.cross_entropy(model(ids, step).flatten(0, 1), ids.flatten())


Backward = Callable[[Tensor, bool], None]


def _train(
    case: RandomCase,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Backward,
    ranks: range,
) -> list[Tensor]:
    losses = list[Tensor]()
    for step in range(STEPS):
        if step and case.evaluates:
            with torch.no_grad():
                losses.append(case.loss(model, step, 9, 0))  # the same on each rank
        for part in range(case.passes):
            every = [case.loss(model, step, part, rank) for rank in ranks]
            loss = torch.stack(every).mean()
            backward(loss, part < case.passes - 1)
            losses += [loss.detach()] if case.ranks == 1 else []
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(value.clone() for value in model.state_dict().values())]


class Watched:
    """Notes by how much more than its budget a manager has held."""

    def __init__(self, manager: Any) -> None:
        self.over, self.manager = 0, manager
        for name in ("use", "done", "allocate_buffer", "free_buffer"):
            setattr(manager, name, self._noted(getattr(manager, name)))

    def _noted(self, call: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found = call(*args, **kwargs)
            self.over = max(self.over, self.manager.held - self.manager.budget)
            return found

        return noted


def problem(case: RandomCase, folder: str, rank: int = 0) -> str:
    """What is wrong with a case on a rank; empty where nothing is."""
    model, optimizer = case.made()
    wanted = _train(case, model, optimizer, lambda loss, _: loss.backward(), range(case.ranks))
    model, optimizer = case.made()
    moved = case.plugin("100GiB", folder).make_plan(model, optimizer).predicted.moved
    assert moved is not None
    least = moved.minimum
    if case.ranks == 1:
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

    watched = Watched(manager)
    try:
        found = _train(case, net, boosted, backward, range(rank, rank + 1))
        if watched.over > 0 or sum(manager.counter.fullest.values()) > manager.budget:
            return f"{watched.over} bytes beyond the budget"
    except GulliverError as error:
        return str(error)
    finally:
        booster.close()
    far = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
    return "" if far <= (0 if case.ranks == 1 else 1e-5) else f"off by {far}"


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
