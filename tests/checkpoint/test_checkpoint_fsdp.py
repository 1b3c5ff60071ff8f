"""Models of torch's FSDP2 (`fully_shard`), and their optimizers, without a Booster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.checkpoint.loading import step_folder
from gulliver.checkpoint.reader import StepReader
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.pool import Pool

STEPS, SAVED_AT = 6, 3


class Net(nn.Module):
    """Rows that do not divide, and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


class Run:
    """A model, sharded in a way, and its optimizer; every rank sees the same batches."""

    def __init__(self, way: str, kind: type = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = Net().double()
        if way != "plain":
            self._shard(way)
        options: dict[str, Any] = {"amsgrad": True} if kind is torch.optim.AdamW else {}
        self.optimizer = kind(self.model.parameters(), lr=0.05, **options)

    def _shard(self, way: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard

        size = dist.get_world_size()
        shape = (2, size // 2) if way == "replicas" else (size,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        last = (lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None) if way == "columns" else None
        for module in (self.model.first, self.model):
            fully_shard(module, mesh=mesh, shard_placement_fn=last)

    def train(self, begin: int, end: int) -> dict[str, Tensor]:
        for step in range(begin, end):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(6, 4, generator=draw, dtype=torch.float64)
            self.optimizer.zero_grad()
            self.model(x).square().sum().backward()
            self.optimizer.step()
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
            for name, value in self.model.state_dict().items()
        }

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def train_and_save(world: World, way: str, folder: Path) -> dict[str, Tensor]:
    run = Run(way)
    run.train(0, SAVED_AT)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(SAVED_AT, run.state)
        # What is being copied is what it was, although training goes on.
        return run.train(SAVED_AT, STEPS)


def resume(world: World, way: str, folder: Path) -> tuple[dict[str, Tensor], str]:
    run = Run(way)
    # Root modules stay whole after a forward; what is filled are the shards.
    run.model(torch.zeros(1, 4, dtype=torch.float64))
    for parameter in run.model.parameters():
        parameter.data.zero_()
    loaded = load(folder, run.state)
    assert loaded.step == SAVED_AT
    return run.train(SAVED_AT, STEPS), str(loaded)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-12), name


def test_fsdp_models_load_into_fsdp_and_plain_models_at_other_numbers_of_ranks(
    pool: Pool, tmp_path: Path
) -> None:
    wanted = Run("plain").train(0, STEPS)
    runs = {
        (4, "rows"): [(4, "replicas"), (2, "columns"), (1, "plain")],
        (4, "replicas"): [(2, "rows")],
        (2, "columns"): [(3, "rows")],
        (1, "plain"): [(2, "rows")],
    }
    for (ranks, way), targets in runs.items():
        folder = tmp_path / way
        for found in pool.run(train_and_save, ranks, way, folder):
            same(found, wanted)
        for other, target in targets:
            for found, told in pool.run(resume, other, target, folder):
                same(found, wanted)
                assert told == "everything matched"
    # What replicas have alike is written once.
    with StepReader(step_folder(tmp_path / "replicas")) as reader:
        for tensors in (reader.tensors("model"), reader.tensors("optimizer")):
            for entry in tensors.values():
                filled = [part for part in entry.parts if part.stop > part.start]
                assert sum(part.stop - part.start for part in filled) == entry.numel


class Factored(torch.optim.Optimizer):
    """Keeps a number for each row."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.grad.full_tensor().square().sum(-1)


def save_and_load_factored(world: World, folder: Path) -> list[str]:
    run = Run("rows", Factored)
    run.train(0, 2)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, run.state)
    said = []
    for other in (Run("rows", Factored), Run("rows", torch.optim.SGD)):
        parameters: list[Any] = list(other.model.parameters())
        before = [p.to_local().clone() for p in parameters]
        with pytest.raises(GulliverError) as caught:
            load(folder, other.state)
        said.append(str(caught.value))
        after = [p.to_local() for p in parameters]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return said


def test_unshardable_state_is_rejected_before_loading(pool: Pool, tmp_path: Path) -> None:
    for factored, other in pool.run(save_and_load_factored, 2, tmp_path):
        assert "of the same shape" in factored
        assert "is the state of Factored, not of SGD" in other
