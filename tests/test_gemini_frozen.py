"""Models of which part is frozen, under the least limit, and on the least disk, that is named."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver import Booster, GeminiPlugin, GulliverError
from gulliver.booster import _limited
from gulliver.comm import World
from tests.pool import Pool

WIDTH, LAYERS, ROWS, STEPS = 200, 8, 8, 3


class Adapted(nn.Module):
    """A frozen linear map with an adapter of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, WIDTH, dtype=base.weight.dtype) / 50)
        self.up = nn.Parameter(torch.zeros(WIDTH, 4, dtype=base.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def _model(kind: str) -> nn.Module:
    torch.manual_seed(1)
    maps = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
    for number, linear in enumerate(maps):
        first, last = number < LAYERS // 2, number > 0
        linear.requires_grad_(not {"head": first, "tail": last}.get(kind, False))
    return nn.Sequential(
        *(nn.Sequential(Adapted(m) if kind == "adapted" else m, nn.Tanh()) for m in maps)
    )


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _loss(model: nn.Module, step: int, part: slice) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)[part]
    return (model(x) - x.sin()).square().mean()


def _named(text: str, model: nn.Module, **options: object) -> str:
    """What the refusal of a limit or a disk names."""
    plugin = GeminiPlugin(verbose=False, **options)  # type: ignore[arg-type]
    with pytest.raises(GulliverError) as refused:
        plugin.make_plan(model, _optimizer(model))
    found = re.search(rf"{text} ([0-9.]+[KMG]iB)", str(refused.value))
    assert found, refused.value
    return found[1]


def _run(world: World, folder: str, kind: str, early: bool) -> list[tuple[Tensor, Tensor]]:
    """Values under the least limit, on the least disk, and of plain PyTorch."""
    model = _model(kind)
    reference = copy.deepcopy(model)
    options = {"step_in_backward": early, "chunk_mb": 0.3}
    limit = _named("that works is", model, memory_limit="1MiB", disk=f"{folder}:1GiB", **options)
    size = _named("give it", model, memory_limit=limit, disk=f"{folder}:64KiB", **options)
    plugin = GeminiPlugin(limit, disk=f"{folder}:{size}", verbose=False, **options)  # type: ignore[arg-type]
    booster = Booster(plugin=plugin, verbose=False)
    plain = _optimizer(reference)
    # What else a process of tests holds, and gives back, is no business of this model.
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, _optimizer(model))
    for step in range(STEPS):
        booster.backward(_loss(model, step, slice(world.rank, None, world.size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        _loss(reference, step, slice(None)).backward()
        plain.step()
        plain.zero_grad()
    state = model.state_dict()
    booster.close()
    return [(state[name], value) for name, value in reference.state_dict().items()]


class Scaled(nn.Module):
    """A frozen scale, which autograd saves as it is, beside what learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64), requires_grad=False)
        self.map = Adapted(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
        nn.init.normal_(self.map.up, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.map((x * self.scale).tanh()).tanh()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Sequential(Scaled(), Scaled()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


def _recomputed(world: World, folder: str) -> list[tuple[Tensor, Tensor]]:
    """Gradients of blocks that are recomputed under a limit, and those of plain PyTorch."""
    model = Recomputed()
    reference = copy.deepcopy(model)
    plugin = GeminiPlugin("6MiB", disk=f"{folder}:1GiB", chunk_mb=0.3, verbose=False)
    booster = Booster(plugin=plugin)
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, _optimizer(model))
    booster.backward(_loss(model, 0, slice(None)), optimizer)
    found = optimizer.full_gradients()
    _loss(reference, 0, slice(None)).backward()
    trained = [(n, p.grad) for n, p in reference.named_parameters() if p.grad is not None]
    return [(found[name], grad) for name, grad in trained]


def test_frozen_parameters_of_recomputed_blocks_are_what_they_were(
    pool: Pool, tmp_path: Path
) -> None:
    (found,) = pool.run(_recomputed, 1, str(tmp_path))
    assert len(found) == 16
    assert all(torch.equal(value, wanted) for value, wanted in found)


def test_frozen_parts_train_at_the_least_limit_and_on_the_least_disk_that_are_named(
    pool: Pool, tmp_path: Path
) -> None:
    for kind, early in (("adapted", False), ("adapted", True), ("head", False), ("tail", True)):
        (found,) = pool.run(_run, 1, str(tmp_path), kind, early)
        assert all(torch.equal(value, wanted) for value, wanted in found), (kind, early)
