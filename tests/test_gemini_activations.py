"""Activations under a memory limit: kept, recomputed, off-loaded, or chosen; beside plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver import Booster, GeminiPlugin, GulliverError, LowLevelZeroPlugin, Plan
from gulliver.booster import _limited
from gulliver.comm import World
from gulliver.memory import ACTIVATIONS
from tests.pool import Pool

STEPS, WIDTH, BATCH = 3, 64, 256
STATE = 1 << 20
"""Bytes of a budget that holds little of the model's activations."""


class Block(nn.Module):
    """Attention-free block with a parameter of its own, dropout, and a checkpointed part."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop, self.nested = nn.Dropout(0.1), nested

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.nested else self.inner(x)
        return x + self.drop(self.scale * y)


def stack(depth: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nested=number % 3 == 1) for number in range(depth)))


def flow(compiled: bool = False) -> nn.Module:
    """Blocks in a list of a model with layers around them, compiled one by one."""
    torch.manual_seed(0)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(Block(nested=False) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.enter(x))
            for block in self.blocks:
                x = block(x)
            return self.leave(x)

    model = Flow()
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    return model


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def plain(make: Callable[[], nn.Module]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, the gradient of an input among them, and values after some steps: by torch alone."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = list[Tensor]()
    for step in range(STEPS):
        torch.manual_seed(step)
        x = batch(step).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.state_dict())


def trained(booster: Booster, make: Callable[[], nn.Module]) -> tuple[Any, ...]:
    model = make()
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = list[Tensor]()
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            model(batch(step))
        model.train()
        torch.manual_seed(step)
        x = batch(step).requires_grad_()
        loss = model(x).square().mean()
        booster.backward(loss, optimizer)
        assert x.grad is not None
        found += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return found, values, model, optimizer


def same(found: Any, wanted: Any) -> bool:
    losses = all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    return losses and all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


def _modes(world: World, folder: str) -> dict[str, tuple[bool, int, int]]:
    """Whether values are those of torch, bytes of activations that left, and most held at once."""
    found = dict[str, tuple[bool, int, int]]()
    options = {"disk": f"{folder}:64MiB", "chunk_mb": 0.05, "verbose": False}
    for name, make, more in (
        ("keep", stack, {"activations": "keep"}),
        ("recompute", stack, {"activations": "recompute"}),
        ("offload", stack, {"activations": "offload"}),
        ("early", stack, {"activations": "offload", "step_in_backward": True}),
        ("compiled", lambda: flow(compiled=True), {"activations": "offload"}),
    ):
        plugin = GeminiPlugin("3MiB", **{**options, **more})  # type: ignore[arg-type]
        got = trained(Booster(plugin=plugin), make)
        manager = got[3].shards.manager
        most = manager.counter.fullest.get(ACTIVATIONS, 0)
        wanted = plain(make if name != "compiled" else flow)
        found[name] = same(got, wanted), manager.stats()["bytes_out"], most
        average = copy.deepcopy(got[2])  # calls of a copy are its own
        for parameter in average.parameters():
            parameter.data.zero_()
        found[f"copy of {name}"] = bool((average.eval()(batch(0)) == batch(0)).all()), 0, 0
    return found


def test_what_becomes_of_activations_changes_no_value(pool: Pool, tmp_path: Path) -> None:
    (found,) = pool.run(_modes, 1, str(tmp_path))
    assert found["offload"][2] > 0 == found["keep"][2] == found["recompute"][2]
    for name, (equal, *_) in found.items():
        assert equal or name == "copy of compiled", name
