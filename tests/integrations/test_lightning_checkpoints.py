"""Checkpoints of Lightning's Trainer under Gulliver's strategies: files and folders, any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint

from gulliver.checkpoint import load
from gulliver.comm import World
from gulliver.integrations.lightning import GulliverStrategy, to_lightning
from tests.integrations.lightning_models import Autoencoder, Gan, Recording, trainer_of
from tests.pool import Pool

MODELS = {"autoencoder": Autoencoder, "gan": Gan}
KINDS: dict[str, dict[str, Any]] = {
    "file": {"stage": 2},
    "async": {"stage": 3, "use_async": True},
    "gemini": {"memory_limit": "256MiB"},
    "fp16": {"precision": "fp16"},
}


def fit(
    world: World, strategy: Any, model: str, epochs: int, folder: str = "", start: str | None = None
) -> list[float]:
    """Losses of a fit of so many epochs, which keeps the checkpoint of the last one."""
    module: Recording = MODELS[model]()
    callbacks = [ModelCheckpoint(folder, filename="epoch-{epoch}", save_top_k=-1)] if folder else []
    options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(folder)}
    trainer = trainer_of(world, strategy, max_epochs=epochs, num_sanity_val_steps=0, **options)
    trainer.fit(module, ckpt_path=start)
    return module.losses


def saved_runs(world: World, folder: str) -> dict[str, list[float]]:
    """Runs of three epochs, with a checkpoint of each epoch, by kind."""
    found = {}
    for kind, options in KINDS.items():
        strategy = GulliverStrategy(**options)
        found[kind] = fit(world, strategy, "autoencoder", 3, f"{folder}/{kind}")
    found["gan"] = fit(world, GulliverStrategy(checkpoint="folder"), "gan", 3, f"{folder}/gan")
    found["ddp"] = fit(world, "ddp", "autoencoder", 3, f"{folder}/ddp")
    return found


def resumed_runs(world: World, folder: str, names: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Losses after the second epoch's checkpoint, of strategies that take up others' checkpoints.

    Args:
        names: kind of the strategy, and of the checkpoint.
    """
    found = {}
    for kind, of in names:
        strategy = "ddp" if kind == "ddp" else GulliverStrategy(**KINDS.get(kind, {"stage": 1}))
        start = next(str(path) for path in Path(folder, of).iterdir() if "epoch=1" in path.name)
        model = "gan" if of == "gan" else "autoencoder"
        found[f"{kind} from {of}"] = fit(world, strategy, model, 3, start=start)
    return found


def close(found: list[float], expected: list[float]) -> bool:
    return torch.allclose(torch.tensor(found), torch.tensor(expected[-len(found) :]), atol=2e-6)


def test_checkpoints_resume_anywhere_with_equal_losses(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    went_on = pool.run(saved_runs, 2, folder, deadline_s=120)[0]
    names = [(kind, kind) for kind in KINDS]
    others = [("gan", "gan"), ("file", "ddp"), ("ddp", "file")]
    others += [("gemini", "async")]
    for name, found in pool.run(resumed_runs, 2, folder, [*names, *others])[0].items():
        expected = went_on[name.split(" from ")[1]]
        assert len(found) * 3 == len(expected), name
        assert close(found, expected), name

    # On one rank, which has other batches: what ddp makes of its checkpoint there.
    for path in (tmp_path / "gemini", tmp_path / "async", tmp_path / "gan"):
        (saved,) = (p for p in path.iterdir() if "epoch=1" in p.name)
        path.with_name(f"{path.name}-file").mkdir()
        to_lightning(saved, path.with_name(f"{path.name}-file") / saved.name)
    names = [("ddp", "ddp"), ("async", "async"), ("file", "file"), ("gemini", "gemini")]
    names += [("ddp", "gemini-file"), ("gemini", "async-file")]
    expected, *every = pool.run(resumed_runs, 1, folder, names)[0].items()
    for name, found in every:
        assert close(found, expected[1]), name

    module = Autoencoder.load_from_checkpoint(
        next((tmp_path / "gemini-file").iterdir()), width=16, map_location="cpu"
    )
    plain = torch.load(next(p for p in (tmp_path / "ddp").iterdir() if "epoch=1" in p.name))
    for name, value in module.state_dict().items():
        assert torch.allclose(value, plain["state_dict"][name], atol=1e-6), name
    states = torch.load(next((tmp_path / "gemini-file").iterdir()))["optimizer_states"][0]
    assert states.keys() == {"state", "param_groups"}
    for number, state in plain["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            assert torch.allclose(states["state"][number][key], value, atol=1e-6)
    filled, (folder_of_one,) = (
        Autoencoder(),
        (path for path in (tmp_path / "async").iterdir() if "epoch=1" in path.name),
    )
    load(folder_of_one, {"model": filled})  # without Lightning
    assert all(torch.allclose(filled.state_dict()[n], v) for n, v in plain["state_dict"].items())
    gan = torch.load(next((tmp_path / "gan-file").iterdir()))
    assert [len(state["state"]) for state in gan["optimizer_states"]] == [4, 4]
