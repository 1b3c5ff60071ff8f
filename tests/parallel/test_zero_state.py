"""Optimizer state is saved whole, by name; it loads at any world size, stage and chunk size."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.checkpoint import load
from gulliver.checkpoint.files import read_tensors, write_tensors
from gulliver.comm import World
from gulliver.comm.world import adopt_world
from gulliver.errors import GulliverError
from tests.pool import Pool

GLOBAL_BATCH = 12
STEP = "optimizer/step-00000000"


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt_world(World(0, 1, 0, torch.device("cpu")))
    yield
    adopt_world(None)


def build(make: str = "AdamW", width: int = 7, double: bool = True) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    model = model.double() if double else model
    model[0].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight], "lr": 1e-2},
        {"params": [model[0].bias, *model[2].parameters()], "lr": 3e-3},
    ]
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
        "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
        "Adagrad": torch.optim.Adagrad,
    }
    return model, kinds[make](groups)


def plugin(stage: int, chunk_mb: float = 0.0003) -> Plugin:
    if stage == 0:
        return TorchDDPPlugin(verbose=False)
    return LowLevelZeroPlugin(stage=stage, chunk_mb=chunk_mb, verbose=False)


def batch(step: int, world: World) -> Tensor:
    whole = torch.randn(GLOBAL_BATCH, 5, generator=torch.Generator().manual_seed(step)).double()
    return whole.chunk(world.size)[world.rank]


class Job:
    """A model in training, made anew as a restarted program would."""

    def __init__(self, world: World, stage: int, chunk_mb: float = 0.0003, make: str = "AdamW"):
        model, inner = build(make)
        self.plain, self.world = model, world
        self.booster = Booster(plugin(stage, chunk_mb))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        self.model, self.optimizer, *_ = self.booster.boost(model, inner)

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        for step in range(first, last):
            loss = self.model(batch(step, self.world)).square().mean()
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return {n: p.detach().clone() for n, p in self.plain.named_parameters()}

    def save(self, folder: Path) -> None:
        self.booster.save_model(self.model, folder / "model.safetensors")
        self.booster.save_optimizer(self.optimizer, folder / "optimizer")
        self.booster.save_lr_scheduler(self.scheduler, folder / "scheduler.json")

    def load(self, folder: Path) -> None:
        self.booster.load_model(self.model, folder / "model.safetensors")
        self.booster.load_optimizer(self.optimizer, folder / "optimizer")
        self.booster.load_lr_scheduler(self.scheduler, folder / "scheduler.json")


def run_and_save(world: World, folder: Path, stage: int, make: str) -> dict[str, Tensor]:
    job = Job(world, stage, make=make)
    job.steps(0, 4)
    job.save(folder)
    return job.steps(4, 8)


def load_and_run(
    world: World, folder: Path, stage: int, chunk_mb: float, make: str
) -> dict[str, Tensor]:
    job = Job(world, stage, chunk_mb, make)
    job.load(folder)
    return job.steps(4, 8)


@pytest.mark.parametrize("make", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_saved_by_two_ranks_continues_at_any_world_size_and_chunk_size(
    pool: Pool, tmp_path: Path, stage: int, make: str
) -> None:
    expected = pool.run(run_and_save, 2, tmp_path, stage, make)[0]
    for size, other, chunk_mb in ((1, 1, 1.0), (2, 1, 0.0001), (3, 2, 0.0002), (4, 0, 1.0)):
        for found in pool.run(load_and_run, size, tmp_path, other, chunk_mb, make):
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    pool: Pool, tmp_path: Path, stage: int
) -> None:
    expected = pool.run(run_and_save, 2, tmp_path, stage, "AdamW")
    resumed = pool.run(load_and_run, 2, tmp_path, stage, 0.0003, "AdamW")
    for before, after in zip(expected, resumed, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_saved_state_is_that_of_a_plain_optimizer(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_and_save, 2, tmp_path, 2, "AdamW")
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        model(batch(step, World(0, 1, 0, torch.device("cpu")))).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    saved = load(tmp_path / "optimizer").values["optimizer"]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for key, value in optimizer.state[parameter].items():
                found = saved["state"][name][key]
                found = found if isinstance(found, Tensor) else torch.tensor(found["value"])
                torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-16)
    assert saved["groups"][1]["options"]["lr"] == optimizer.param_groups[1]["lr"]


def _saved(folder: Path, stage: int = 1, steps: int = 2) -> tuple[Booster, Any]:
    job = Job(World(0, 1, 0, torch.device("cpu")), stage)
    job.steps(0, steps)
    job.save(folder)
    return job.booster, job.optimizer


def _load(folder: Path, changes: dict[str, Any], booster: Booster, optimizer: Any) -> None:
    if changes:
        model, inner = build(**changes)
        booster = Booster(plugin(1))
        _, optimizer, *_ = booster.boost(model, inner)
    booster.load_optimizer(optimizer, folder / "optimizer")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _mix(folder: Path) -> None:
    (folder / "again").mkdir()
    _saved(folder / "again", steps=3)
    shutil.copy(
        folder / "again/optimizer/step-00000000/state.json",
        folder / "optimizer/step-00000000/state.json",
    )


@pytest.mark.parametrize(
    ("spoil", "changes", "message"),
    [
        (lambda f: shutil.rmtree(f / "optimizer"), {}, "does not exist"),
        (lambda f: (f / STEP / "manifest.json").unlink(), {}, "contains no"),
        (
            lambda f: (f / STEP / "optimizer.safetensors").unlink(),
            {},
            "does not exist",
        ),
        (lambda f: _truncate(f / STEP / "optimizer.safetensors"), {}, "truncated"),
        (lambda f: _truncate(f / STEP / "state.json"), {}, "truncated"),
        (_mix, {}, "or another file"),
        (lambda f: None, {"make": "SGD"}, "state of AdamW, but the optimizer is SGD"),
        (lambda f: None, {"width": 9}, r"does not match.*\(7, 5\).*\(9, 5\)"),
        (lambda f: None, {"double": False}, "does not match.*float64.*float32"),
    ],
)
def test_a_wrong_checkpoint_is_one_clear_line_and_changes_nothing(
    spoil: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    booster, optimizer = _saved(tmp_path)
    before = optimizer.export_state()
    spoil(tmp_path)
    with pytest.raises(GulliverError, match=message) as caught:
        _load(tmp_path, changes, booster, optimizer)
    assert "\n" not in str(caught.value)
    for name, entries in optimizer.export_state().items():
        assert all(torch.equal(before[name][key], value) for key, value in entries.items())


class PerTensor(torch.optim.SGD):
    """Keeps a state that is neither element-wise nor one number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(2)


def export_odd_state(world: World) -> str:
    model = nn.Linear(3, 3)
    booster = Booster(LowLevelZeroPlugin(assume_elementwise=True, verbose=False))
    _, optimizer, *_ = booster.boost(model, PerTensor(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
    optimizer.step()
    with pytest.raises(GulliverError) as caught:
        optimizer.export_state()
    return str(caught.value)


def test_non_elementwise_state_is_rejected_on_save(pool: Pool) -> None:
    for said in pool.run(export_odd_state, 2):
        assert "'rows'" in said
        assert "not element-wise" in said


def test_numbers_in_the_state_are_saved_too(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1

    for goes_on in (False, True):
        model = nn.Linear(3, 3)
        booster = Booster(LowLevelZeroPlugin(assume_elementwise=True, verbose=False))
        _, optimizer, *_ = booster.boost(model, Counting(model.parameters(), lr=0.1, momentum=0.9))
        if goes_on:
            booster.load_optimizer(optimizer, tmp_path)
        booster.backward(model(torch.ones(1, 3)).sum(), optimizer)
        optimizer.step()
        booster.save_optimizer(optimizer, tmp_path)
    assert {entries["count"] for entries in optimizer.export_state().values()} == {2}


def test_the_state_folder_holds_plain_safetensors_and_no_pickle(tmp_path: Path) -> None:
    _saved(tmp_path)
    names = {path.name for path in (tmp_path / STEP).iterdir()}
    assert names == {"manifest.json", "optimizer.safetensors", "state.json"}
    write_tensors(tmp_path / "copy.safetensors", read_tensors(tmp_path / "model.safetensors"))
