"""Models of which part is frozen, under the least limit, and on the least disk, that is named."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster import limited as _limited
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
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


class Run:
    """A run of which a layer is frozen at times; without a folder that of plain PyTorch."""

    def __init__(
        self, world: World, folder: str, kind: str, frozen: bool, precision: str | None = None
    ) -> None:
        torch.manual_seed(3)
        dtype = torch.float64 if precision is None else torch.float32
        maps = [nn.Linear(64, 64, dtype=dtype) for _ in range(4)]
        self.world, self.model = world, nn.Sequential(*(nn.Sequential(m, nn.Tanh()) for m in maps))
        self.layer, self.dtype = maps[2].requires_grad_(not frozen), dtype
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer: Any = optimizer
        self.booster: Booster | None = None
        if kind == "plain":
            return
        plugins: dict[str, Plugin] = {
            "limit": GeminiPlugin(
                "1.5MiB", disk=f"{folder}:64MiB", chunk_mb=0.04, precision=precision, verbose=False
            ),
            "zero 3": LowLevelZeroPlugin(3, verbose=False),
            "zero 1": LowLevelZeroPlugin(1, verbose=False),
            "ddp": TorchDDPPlugin(verbose=False),
        }
        self.booster = Booster(plugin=plugins[kind])
        with patch.object(_limited, "Footprint", side_effect=OSError):
            self.model, self.optimizer, *_ = self.booster.boost(self.model, optimizer)

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(4, 64, generator=draw, dtype=torch.float64).to(self.dtype)
            x = x if self.booster is None else x[self.world.rank :: self.world.size]
            loss = (self.model(x) - 1).square().mean()
            if self.booster is None:
                loss.backward()
            else:
                self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def load(self, folder: str, whole: bool) -> Run:
        assert self.booster is not None
        if whole:
            self.booster.load(f"{folder}/run", self.model, self.optimizer)
        else:
            self.booster.load_model(self.model, f"{folder}/run")
            self.booster.load_optimizer(self.optimizer, f"{folder}/optimizer")
        return self

    def save(self, folder: str) -> Run:
        if self.booster is not None:
            self.booster.save(f"{folder}/run", 3, self.model, self.optimizer, use_async=False)
            self.booster.save_optimizer(self.optimizer, f"{folder}/optimizer")
        return self

    def values(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]


def _resumed(
    world: World, folder: str, kind: str, precision: str | None
) -> tuple[list[Tensor], list[list[Tensor]], list[str]]:
    """Values of a run that freezes and unfreezes a layer, of those resumed while it was frozen."""
    later, said = kind in ("plain", "limit", "zero 3"), list[str]()

    def go_on(run: Run) -> list[Tensor]:
        run.train(3, 4)
        run.layer.requires_grad_(later)
        return run.train(4, 6).values()

    first = Run(world, folder, kind, False, precision).train(0, 2)
    first.layer.requires_grad_(False)
    wanted = go_on(first.train(2, 3).save(folder))
    logger, handler = logging.getLogger("gulliver"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        found = [
            go_on(Run(world, folder, kind, True, precision).load(folder, whole))
            for whole in ((True, False) if kind != "plain" else ())
        ]
    finally:
        logger.removeHandler(handler)
    return wanted, found, said


def _all_resumed(world: World, folder: str, cases: list[tuple[str, str | None]]) -> list[str]:
    """What is wrong with each of some cases."""
    found, (plain, _, _) = list[str](), _resumed(world, folder, "plain", None)
    for number, (kind, precision) in enumerate(cases):
        wanted, ways, said = _resumed(world, f"{folder}/{number}", kind, precision)
        for way in ways:
            if not all(torch.equal(a, b) for a, b in zip(wanted, way, strict=True)):
                found.append(f"{kind} {precision}: other bits than those of a run that goes on")
        if kind in ("limit", "zero 3"):
            found += said
            pairs = zip(wanted, plain, strict=True)
            if precision is None and not all(torch.allclose(a, b) for a, b in pairs):
                found.append(f"{kind}: other values than those of torch")
        elif world.is_main:
            text = "skipped the optimizer state of 2 frozen parameters (2.0.bias, 2.0.weight)"
            found += [line for line in said if text not in line]
            found += [] if len(said) == 2 else [f"{kind}: said {said}"]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_resumed_while_a_layer_is_frozen(pool: Pool, tmp_path: Path, ranks: int) -> None:
    cases: list[tuple[str, str | None]]
    cases = [("zero 3", None), ("zero 1", None)]
    cases = [("limit", "bf16"), ("ddp", None)] if ranks == 1 else cases
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    assert not [
        line for said in pool.run(_all_resumed, ranks, str(tmp_path), cases) for line in said
    ]


def _thawed(world: World, folder: str, kind: str) -> list[Tensor]:
    """Values of a run that was saved while a layer was frozen from the start, and is not later."""
    run = Run(world, folder, kind, True).train(0, 3).save(folder)
    if kind == "plain":
        run.layer.requires_grad_(True)
    else:
        run = Run(world, folder, kind, False).load(folder, True)
    return run.train(3, 5).values()


def test_parameter_frozen_at_save_can_be_trained_after_load(pool: Pool, tmp_path: Path) -> None:
    ((plain,), *others) = (
        pool.run(_thawed, 1 if kind in ("plain", "ddp") else 2, str(tmp_path / kind), kind)
        for kind in ("plain", "limit", "zero 1", "ddp")
        if (tmp_path / kind).mkdir() is None
    )
    for found in others:
        for values in found:
            assert all(torch.allclose(a, b) for a, b in zip(values, plain, strict=True))
