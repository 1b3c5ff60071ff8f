"""Optimizers that keep more than tensors of the parameters' shapes: saved and loaded under DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.pool import Pool

STEPS, SAVED_AT = 6, 3


class Preconditioned(torch.optim.Optimizer):
    """As Shampoo and SOAP: lists of matrices in another dtype, None, text, and what is shared."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        shared = self.state["shared"]  # type: ignore[index]
        shared.setdefault("norms", torch.zeros(2, dtype=torch.float64)).add_(1)
        shared["calls"] = shared.get("calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    eyes = [torch.eye(size, dtype=torch.float64) for size in p.shape]
                    state.update(steps=0, factors=eyes, basis=None, kind="full")
                    state["more"] = {"seen": torch.zeros(3, dtype=torch.int64), "at": (1, None)}
                assert state["basis"] is None
                assert state["more"]["at"] == (1, None)
                state["steps"] += 1
                state["more"]["seen"] += 1
                step = p.grad.double()
                for dim, factor in enumerate(state["factors"]):
                    rows = step.movedim(dim, 0).reshape(len(factor), -1)
                    factor += rows @ rows.T
                    step = torch.tensordot(factor.inverse(), step.movedim(dim, 0), 1)
                    step = step.movedim(0, dim)
                scale = group["lr"] * state["steps"] / shared["calls"] * shared["norms"][0]
                p -= (scale * step).to(p.dtype)


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "Preconditioned": Preconditioned,
}


class Run:
    """A boosted model."""

    def __init__(self, kind: str, width: int = 3, plugin: Plugin | None = None) -> None:
        kind, _, stage = kind.partition(", ZeRO ")
        if stage:
            plugin = LowLevelZeroPlugin(stage=int(stage), verbose=False)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).bfloat16()
        self.booster = Booster(plugin or TorchDDPPlugin(verbose=False))
        self.model, self.optimizer, *_ = self.booster.boost(model, MAKE[kind](model.parameters()))

    def train(self, begin: int, end: int) -> list[Tensor]:
        for step in range(begin, end):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(4, 4, generator=draw).bfloat16()
            self.optimizer.zero_grad()
            self.booster.backward(self.model(x).square().sum(), self.optimizer)
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


def train_and_save(world: World, kind: str, folder: Path) -> list[Tensor]:
    run = Run(kind)
    run.train(0, SAVED_AT)
    run.booster.save(folder, SAVED_AT, run.model, run.optimizer)
    run.booster.save_model(run.model, folder / "model.safetensors")
    run.booster.save_optimizer(run.optimizer, folder / "optimizer")
    found = run.train(SAVED_AT, STEPS)
    run.booster.close()
    return found


def resume(world: World, kind: str, folder: Path) -> list[list[Tensor]]:
    found = []
    for whole in (True, False):
        run = Run(kind)
        if whole:
            assert str(run.booster.load(folder, run.model, run.optimizer)) == "everything matched"
        else:
            run.booster.load_model(run.model, folder / "model.safetensors")
            run.booster.load_optimizer(run.optimizer, folder / "optimizer")
        found.append(run.train(SAVED_AT, STEPS))
    return found


def load_another(world: World, kind: str, folder: Path) -> list[str]:
    run, said = Run(kind, width=5), []
    for call in (
        lambda: run.booster.load(folder, optimizer=run.optimizer),
        lambda: run.booster.load_optimizer(run.optimizer, folder / "optimizer"),
    ):
        with pytest.raises(GulliverError) as caught:
            call()
        said.append(str(caught.value))
        assert not run.optimizer.state
    return said


@pytest.mark.parametrize("kind", [*MAKE, "Adafactor, ZeRO 0"])
def test_state_of_any_kind_is_resumed_to_the_bit(pool: Pool, tmp_path: Path, kind: str) -> None:
    # Sums of two equal gradients halve exactly, so that one rank does what two do.
    (wanted, other) = pool.run(train_and_save, 2, kind, tmp_path)
    assert all(map(torch.equal, wanted, other))
    for ranks in (1, 2):
        for ways in pool.run(resume, ranks, kind, tmp_path):
            for found in ways:
                assert all(map(torch.equal, found, wanted)), ranks
    for said in pool.run(load_another, 2, kind, tmp_path)[0]:
        assert "the optimizer state of '0.weight' does not match" in said
        assert "(3, 4)" in said
        assert "(5, 4)" in said


def save_with_zero(world: World, folder: Path) -> str:
    plugin = LowLevelZeroPlugin(stage=1, assume_elementwise=True, verbose=False)
    run = Run("Preconditioned", plugin=plugin)
    run.optimizer.inner.state["shared"] = {"calls": 3}  # type: ignore[index]
    with pytest.raises(GulliverError) as caught:
        run.booster.save(folder, 0, run.model, run.optimizer)
    return str(caught.value)


def test_optimizer_wide_state_is_not_lost_silently(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(save_with_zero, 2, tmp_path):
        assert "Preconditioned keeps 'shared' for all parameters" in said
