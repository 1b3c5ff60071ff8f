"""Training with host memory and a disk behind it, on a CPU: ranks, activations, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from gulliver.booster import limited as _limited
from gulliver.booster import plugins as _plan_plugin
from gulliver.booster import plugins as _plugins
from gulliver.booster.booster import Booster
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.memory.host import HostDiskStore
from gulliver.memory.stores import DiskStore
from gulliver.plan.plan import Plan
from tests.memory.test_gemini import _batch, _model, _trained
from tests.memory.test_memory_stores import LateCopier
from tests.pool import Pool


def _store(capacity: int, disk: DiskStore, device: torch.device) -> HostDiskStore:
    return HostDiskStore(capacity, disk, device, LateCopier())


def _in_three_tiers(world: World, folder: str, activations: str) -> list[Any]:
    """Values with all state on the device, and in three tiers; bytes that the disk has read."""
    plain = Booster(plugin=LowLevelZeroPlugin(3, chunk_mb=0.3, verbose=False))
    wanted, _ = _trained(plain, world)
    model = _model()
    options: dict[str, Any] = {"activations": activations, "chunk_mb": 0.3, "verbose": False}
    plan = GeminiPlugin("64MiB", disk=f"{folder}:64MiB", **options).make_plan(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), sample=_batch(0)
    )
    text = plan.to_yaml().replace("limit: 67108864", "limit: 8 MiB")
    text = text.replace("host: 0", "host: 1 MiB")
    with (
        patch.object(_limited, "Footprint", side_effect=OSError),
        patch.object(_limited, "HostDiskStore", _store),
        patch.object(_plan_plugin, "check_plan"),  # refuses what is for GPUs on a CPU
        patch.object(_plugins, "check_plan"),
    ):
        booster = Booster(plan=Plan.from_yaml(text), verbose=False)
        values, optimizer = _trained(booster, world)
        booster.save_optimizer(optimizer, f"{folder}/saved")
        read = optimizer.shards.manager.stats()["behind"]["bytes_in"]
        other, model = Booster(plan=Plan.from_yaml(text), verbose=False), _model()
        _, loaded, *_ = other.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        other.load_optimizer(loaded, f"{folder}/saved")
        other.save_optimizer(loaded, f"{folder}/again")
    return [wanted, values, read]


@pytest.mark.parametrize(("ranks", "activations"), [(1, "offload"), (2, "keep")])
def test_three_tiers_change_no_value_and_pass_through_a_checkpoint(
    pool: Pool, tmp_path: Path, ranks: int, activations: str
) -> None:
    for wanted, values, read in pool.run(_in_three_tiers, ranks, str(tmp_path), activations):
        assert all(torch.equal(values[name], value) for name, value in wanted.items())
        assert read > 0
    files = [sorted((tmp_path / name).rglob("*.safetensors")) for name in ("saved", "again")]
    assert files[0]
    for saved, again in zip(*files, strict=True):
        first, second = load_file(saved), load_file(again)
        assert first.keys() == second.keys()
        assert all(torch.equal(second[name], value) for name, value in first.items())
