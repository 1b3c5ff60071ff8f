"""Files of a model under a memory limit: saved and loaded piece by piece, and exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.booster import (
    Booster,
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    lazy_parameters,
)
from gulliver.booster import limited as _limited
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.pool import Pool

WIDTH, LAYERS = 256, 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def _batch(step: int, world: World) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    whole = torch.rand(12, WIDTH, generator=draw)
    return whole[world.rank :: world.size]


class Job:
    """A training run, under a limit or not."""

    def __init__(self, world: World, disk: Path | None, limit: str = "4.5MiB") -> None:
        plugin: Any = TorchDDPPlugin(verbose=False)
        if disk is not None:
            plugin = GeminiPlugin(limit, disk=f"{disk}:64MiB", chunk_mb=0.5, verbose=False)
        self.world, self.booster, model = world, Booster(plugin=plugin), _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)

    def train(self, first: int, last: int, folder: Path | None = None) -> None:
        for step in range(first, last):
            loss = self.model(_batch(step, self.world)).square().mean()
            self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if folder is not None:
                self.booster.save(folder, step, self.model, self.optimizer)

    def weights(self, folder: Path) -> dict[str, Tensor]:
        self.booster.save_model(self.model, folder / "weights.safetensors")
        return load_file(folder / "weights.safetensors")


def _save(world: World, text: str) -> None:
    folder = Path(text)
    job = Job(world, folder)
    job.train(0, 3, folder / "run")
    # Training goes on while everything is written.
    job.booster.save_model(job.model, folder / "async.safetensors", use_async=True)
    job.train(3, 5)
    job.booster.wait()
    job.booster.save_huggingface(job.model, folder / "hf")
    job.booster.save_huggingface(job.model, folder / "hf-async", use_async=True)
    job.booster.save_optimizer(job.optimizer, folder / "optimizer")
    job.train(5, 6)
    job.booster.wait()
    checkpointer = job.booster._checkpointers[str((folder / "run").absolute())]
    assert checkpointer.memory_limit is not None
    assert "a ring of 8 MiB" in checkpointer.held
    job.booster.close()


def _plain(world: World, text: str, steps: int) -> dict[str, Tensor]:
    job = Job(world, None)
    job.train(0, steps)
    return {n: p.detach().clone() for n, p in job.model.named_parameters()}


def _load(world: World, text: str, limited: bool, ways: str) -> dict[str, Tensor] | None:
    folder = Path(text)
    job = Job(world, folder if limited else None)
    job.train(7, 8)
    if ways == "step":
        assert job.booster.load(folder / "run", job.model, job.optimizer).step == 2
        job.train(3, 5)
    else:
        job.booster.load_model(job.model, folder / "hf" / "model.safetensors")
        job.booster.load_optimizer(job.optimizer, folder / "optimizer")
    job.train(5, 6)
    found = job.weights(folder)
    job.booster.close()
    return found if world.rank == 0 else None


def test_files_under_a_limit_are_those_of_a_run_without_one(pool: Pool, tmp_path: Path) -> None:
    (three, five, six) = (
        {n.removeprefix("module."): v for n, v in pool.run(_plain, 1, str(tmp_path), n)[0].items()}
        for n in (3, 5, 6)
    )
    pool.run(_save, 1, str(tmp_path))
    for file, wanted in (
        ("async.safetensors", three),
        ("hf/model.safetensors", five),
        ("hf-async/model.safetensors", five),
    ):
        _assert_close(load_file(tmp_path / file), wanted)
    for ranks, limited, ways in ((1, True, "step"), (1, True, "files"), (2, False, "files")):
        _assert_close(pool.run(_load, ranks, str(tmp_path), limited, ways)[0], six)


def _resume(world: World, text: str, limit: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a run, and of one that goes on from the middle of it after a fresh boost."""
    folder, found = Path(text), list[dict[str, Tensor]]()
    for first in (0, 2):
        # What else a process of tests holds, and gives back, is no business of this model.
        with patch.object(_limited, "Footprint", side_effect=OSError):
            job = Job(world, folder, limit)
        if first:
            job.booster.load(folder / "run", job.model, job.optimizer, step=1)
        else:
            job.train(0, 2, folder / "run")
        job.train(2, 4)
        found.append(job.weights(folder))
        job.booster.close()
    return found[0], found[1]


def test_a_run_is_resumed_at_the_least_limit(pool: Pool, tmp_path: Path) -> None:
    model = _model()
    plugin = GeminiPlugin("1MiB", disk=f"{tmp_path}:64MiB", chunk_mb=0.5, verbose=False)
    with pytest.raises(GulliverError, match="the smallest limit that works is") as refused:
        plugin.make_plan(model, torch.optim.AdamW(model.parameters()))
    least = str(refused.value).rpartition(" ")[2]
    for limit in (least, "23MiB"):
        ((whole, resumed),) = pool.run(_resume, 1, str(tmp_path), limit)
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def _beyond(world: World, text: str) -> list[str]:
    """What is said of a value that fp16 does not have, on its ways into a model."""
    folder, said = Path(text), list[str]()

    def boosted(model: nn.Module, plugin: Any = None, **options: Any) -> tuple[Any, ...]:
        limit = {"disk": f"{folder}:64MiB", "chunk_mb": 0.5, "verbose": False}
        plugin = plugin or GeminiPlugin("16MiB", precision="fp16", **limit, **options)
        booster = Booster(plugin=plugin)
        return booster, *booster.boost(model, torch.optim.AdamW(model.parameters()))[:2]

    def tell(call: Callable[[], object]) -> None:
        with pytest.raises(GulliverError) as caught:
            call()
        said.append(str(caught.value))

    large: Any = _model()
    with torch.no_grad():
        large[2].bias[3] = 1e6
    tell(lambda: boosted(large))
    assert large[2].bias.dtype is torch.float32, "nothing was done"
    booster, model, optimizer = boosted(large, LowLevelZeroPlugin(1, verbose=False))
    booster.save(folder / "run", 0, model, optimizer, use_async=False)
    booster.save_huggingface(model, folder / "hf")
    with lazy_parameters():
        empty: Any = _model()
    tell(lambda: boosted(empty, weights=folder / "hf"))
    assert empty[2].bias.is_meta, "nothing was done"
    booster, model, optimizer = boosted(_model())
    before = model.state_dict()
    tell(lambda: booster.load(folder / "run", model, optimizer))
    tell(lambda: booster.load_model(model, folder / "hf"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return said


def test_fp16_overflow_is_rejected_by_all_exports(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(_beyond, 2, str(tmp_path)):
        assert all("2.bias" in line and "\n" not in line for line in said), said
        assert all("1000000.0" in line for line in said), said


def _assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
