"""A model that is larger than its limit from the start: built on meta, filled chunk by chunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import apply as _apply
from gulliver.booster import lazy_parameters
from gulliver.booster import limited as _limited
from gulliver.booster.apply import fill_boosted
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin
from gulliver.checkpoint import save_huggingface
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.parallel import ZeroOptimizer
from tests.pool import Pool

WIDTH, DEPTH, STEPS = 256, 20, 2


class Net(nn.Module):
    """Tied weights, if asked for, a norm, a frozen layer."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.layers[-1].requires_grad_(False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(self.norm(x))


def _batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _plain(folder: str, loaded: bool) -> list[dict[str, Tensor]]:
    """Values when torch has initialised the model, and when it was trained."""
    with torch.device("meta"):
        model = Net(tied=loaded)
    model.to_empty(device="cpu")
    if loaded:
        model.last.weight = model.first.weight  # which to_empty parts
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    if loaded:
        save_huggingface(model, folder)
    found, optimizer = [_values(model)], _adamw(model)
    for step in range(STEPS):
        model(_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, _values(model)]


def _streamed(world: World, folder: str, weights: str | None) -> list[Any]:
    with lazy_parameters():
        model = Net(tied=weights is not None)
    optimizer = _adamw(model)
    plugin = GeminiPlugin(
        f"{12 + 6 * world.size}MiB",
        disk=f"{folder}:64MiB",
        chunk_mb=0.3,
        verbose=False,
        weights=weights,
    )
    torch.manual_seed(5 + world.rank)  # rank 0's values are taken
    booster, most = Booster(plugin=plugin), list[int]()

    def filled(optimizer: ZeroOptimizer, *arguments: Any) -> None:
        manager = optimizer.shards.manager
        assert manager is not None
        manager.counter.restart()
        fill_boosted(optimizer, *arguments)
        most.extend((sum(manager.counter.fullest.values()), manager.budget))

    # What else a process of tests holds, and gives back, is no business of this model.
    unmeasured = patch.object(_limited, "Footprint", side_effect=OSError)
    with unmeasured, patch.object(_apply, "fill_boosted", filled):
        model, optimizer, *_ = booster.boost(model, optimizer)
    found: list[Any] = [_values(model)]
    for step in range(STEPS):
        booster.backward(model(_batch(step)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, _values(model), *most]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_on_meta_is_filled_within_its_limit(pool: Pool, tmp_path: Path, ranks: int) -> None:
    for loaded in (False, True):
        expected = _plain(str(tmp_path / "saved"), loaded)
        weights = str(tmp_path / "saved") if loaded else None
        for *found, most, budget in pool.run(_streamed, ranks, str(tmp_path), weights):
            for values, right in zip(found, expected, strict=True):
                for name, value in right.items():
                    close = 0 if ranks == 1 else 1e-5
                    torch.testing.assert_close(values[name], value, rtol=0, atol=close)
            assert most <= budget < 6 * ranks * 2**20 - 2**20


def _planned(world: World, folder: str) -> tuple[list[Any], dict[str, Tensor]]:
    """What plans of a sample say with values and on meta; the model that the latter trains."""
    options = {"disk": f"{folder}:64MiB", "chunk_mb": 0.3, "verbose": False}
    plugin = GeminiPlugin("24MiB", weights=f"{folder}/saved", **options)
    with lazy_parameters():
        model = Net(tied=True)
    optimizer, there = _adamw(model), Net(tied=True)
    plan = plugin.make_plan(model, optimizer, sample=_batch(0))
    other = plugin.make_plan(there, _adamw(there), sample=_batch(0))
    assert all(p.is_meta for p in model.parameters()), "nothing was done"
    assert plan.work.forward_s > 0
    assert plan.predicted.seconds.step > 0
    said = [
        (found.work.peak, found.work.samples, moved.needed, moved.minimum, moved.read, found.chunks)
        for found in (plan, other)
        if (moved := found.predicted.moved) is not None
    ]
    booster = Booster(plan=plan, verbose=False)
    with patch.object(_limited, "Footprint", side_effect=OSError):
        model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(STEPS):
        booster.backward(model(_batch(step)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return said, _values(model)


def test_a_plan_of_a_sample_needs_no_values(pool: Pool, tmp_path: Path) -> None:
    *_, expected = _plain(str(tmp_path / "saved"), loaded=True)
    (((one, other), values),) = pool.run(_planned, 1, str(tmp_path))
    assert one == other
    assert all(torch.equal(values[name], value) for name, value in expected.items())


class _Own(nn.Module):
    """A layer that does not say how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


def _refused(world: World, folder: str) -> list[str]:
    said = []
    for weights in (None, f"{folder}/none"):
        with lazy_parameters():
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Own())
        said.append(_said(model, folder, weights))
    with lazy_parameters():
        tied = Net(tied=True)
    said.append(_said(tied, folder, None))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return [*said, _said(model, folder, None)]


def _said(model: nn.Module, folder: str, weights: str | None) -> str:
    plugin = GeminiPlugin("24MiB", disk=f"{folder}:64MiB", verbose=False, weights=weights)
    with pytest.raises(GulliverError) as caught:
        Booster(plugin=plugin).boost(model, _adamw(model))
    assert all(p.is_meta for p in model.parameters()), "nothing was done"
    return str(caught.value)


def test_unfilled_meta_parameters_are_rejected(pool: Pool, tmp_path: Path) -> None:
    (said,) = pool.run(_refused, 1, str(tmp_path))
    parts = (
        "'1.scale'",
        "does not exist",
        "'last.weight' are tied and on meta",
        "'1.running_mean'",
    )
    for line, part in zip(said, parts, strict=True):
        assert part in line
        assert "\n" not in line
