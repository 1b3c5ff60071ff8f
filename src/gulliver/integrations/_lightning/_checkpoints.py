"""Checkpoints of Lightning as folders: each rank writes what it has, in Gulliver's format.

With one optimizer such a folder is a run with one step (`Booster.save`), written while training
goes on where that is asked for. With several it holds a model and a folder for each optimizer.
Lightning's own part (loops, callbacks, schedules, hyper-parameters) is in ``lightning.ckpt``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster import Booster
from gulliver.checkpoint import CheckpointFolder, load, read_tensors, step_folder
from gulliver.comm import barrier, current_world
from gulliver.errors import GulliverError
from gulliver.integrations._lightning._optimizer import SteppedOptimizer, torch_state
from gulliver.io import PARTIAL, finish_folder, remove_all

REST = "lightning.ckpt"
MODEL = "model.safetensors"
# Entry of Lightning's part: names of each optimizer's parameters by group, in the user's order.
NAMES = "gulliver_names"


def rest_of(path: Path) -> Path | None:
    """Finds Lightning's part of a folder; None where `path` is a file, or nothing."""
    if not path.is_dir():
        return None
    if (path / REST).is_file():
        return path / REST
    found = _rest_of_step(path, step_folder(path).name)
    if not found.is_file():
        raise GulliverError(
            f"{path} was not saved by a Trainer: load its weights with gulliver.checkpoint.load"
        )
    return found


def _rest_of_step(path: Path, step: str) -> Path:
    return path / f"{step}.{REST}"


class Folders:
    """Saves and loads checkpoints of a fit as folders."""

    def __init__(
        self, booster: Booster, write: Callable[[Any, Path], None], use_async: bool
    ) -> None:
        self._booster, self._write, self._use_async = booster, write, use_async
        self._main = current_world().is_main

    def save(
        self,
        path: Path,
        checkpoint: dict[str, Any],
        model: nn.Module,
        optimizers: Sequence[SteppedOptimizer],
        is_boosted: bool,
    ) -> None:
        """Writes a checkpoint; every rank calls it."""
        self._booster.close()  # what was begun before is complete, and its memory free
        trains = "optimizer_states" in checkpoint
        rest = {**checkpoint, NAMES: [_names(optimizer) for optimizer in optimizers]}
        step = int(checkpoint["global_step"])
        if len(optimizers) > 1 or not is_boosted:
            self._save_files(path, rest, model, optimizers if trains else [])
            return
        if self._main:
            if path.is_file() or (path / REST).is_file():
                remove_all(path)
            for old in path.glob(f"*.{REST}"):  # of steps that are gone
                if not (path / old.name.removesuffix(f".{REST}")).is_dir():
                    old.unlink()
            path.mkdir(parents=True, exist_ok=True)
            self._write(rest, _rest_of_step(path, CheckpointFolder(path).path(step).name))
        barrier()
        optimizer = optimizers[0].boosted if optimizers and trains else None
        self._booster.save(path, step, model, optimizer, use_async=self._use_async, keep=1)

    def _save_files(
        self, path: Path, rest: Any, model: nn.Module, optimizers: Sequence[SteppedOptimizer]
    ) -> None:
        """Writes model and optimizers one after the other, and gives them their name at the end."""
        partial = path.with_name(f".{path.name}{PARTIAL}")
        if self._main:
            remove_all(partial)
            partial.mkdir(parents=True)
        barrier()
        self._booster.save_model(model, partial / MODEL)
        for number, optimizer in enumerate(optimizers):
            self._booster.save_optimizer(optimizer.boosted, partial / f"optimizer-{number}")
        if self._main:
            self._write(rest, partial / REST)
            if path.is_file():
                path.unlink()
            finish_folder(partial, path)
        barrier()

    def load(
        self,
        path: Path,
        rest: dict[str, Any],
        model: nn.Module,
        optimizers: Sequence[SteppedOptimizer],
        strict: bool,
    ) -> None:
        """Fills a model and its optimizers, at any number of ranks; every rank calls it."""
        count = len(rest.get(NAMES, ()))
        if optimizers and count != len(optimizers):
            raise GulliverError(
                f"{path} has {count} optimizers, configure_optimizers returned {len(optimizers)}: "
                "resume with those that it was saved with"
            )
        if (path / REST).is_file():
            self._booster.load_model(model, path / MODEL, strict)
            for number, optimizer in enumerate(optimizers):
                self._booster.load_optimizer(optimizer.boosted, path / f"optimizer-{number}")
            return
        optimizer = optimizers[0].boosted if optimizers else None
        self._booster.load(path, model, optimizer, strict=strict, random=False)


def _names(optimizer: SteppedOptimizer) -> list[list[str | None]]:
    names = optimizer.boosted.names
    return [[names.get(parameter) for parameter in members] for members in optimizer.members]


def to_lightning(folder: Path | str, file: Path | str) -> None:
    """Makes one file of a folder, as Lightning's own strategies save them; one process calls it."""
    # ``LightningModule.load_from_checkpoint``, ``Trainer.fit(ckpt_path=)`` of any strategy and
    # ``torch.load`` read it.
    folder, file = Path(folder), Path(file)
    found = rest_of(folder)
    if found is None:
        raise GulliverError(f"{folder} is no folder: files are Lightning's own already")
    if file.exists():
        raise GulliverError(f"{file} is there already: give another name")
    rest = torch.load(found, map_location="cpu", weights_only=False)
    names = rest.pop(NAMES)
    several = (folder / REST).is_file()
    if several:
        rest["state_dict"] = read_tensors(folder / MODEL)
        values = [_optimizer_values(folder / f"optimizer-{n}") for n in range(len(names))]
    else:
        wanted = ["model", *(["optimizer"] if "optimizer_states" in rest else [])]
        loaded = load(folder, dict.fromkeys(wanted)).values
        rest["state_dict"] = loaded["model"]
        values = [loaded["optimizer"]] if "optimizer" in loaded else []
    if "optimizer_states" in rest:
        rest["optimizer_states"] = [_torch_state(v, n) for v, n in zip(values, names, strict=True)]
    partial = file.with_name(f".{file.name}{PARTIAL}")
    try:
        torch.save(rest, partial)
        partial.replace(file)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _optimizer_values(folder: Path) -> Any:
    return load(folder, {"optimizer": None}).values["optimizer"]


def _torch_state(saved: Any, names: list[list[str | None]]) -> dict[str, Any]:
    """State of a checkpoint as torch's optimizers have it."""
    state = {
        name: {key: _plain(value) for key, value in entries.items()}
        for name, entries in saved["state"].items()
    }
    return torch_state(state, [dict(group["options"]) for group in saved["groups"]], names)


def _plain(value: Any) -> Any:
    """A counter as torch has it; tensors as they are."""
    if not (isinstance(value, dict) and set(value) == {"value", "dtype"}):
        return value
    dtype = value["dtype"]
    return value["value"] if dtype is None else torch.tensor(value["value"], dtype=dtype)
