"""Presents a boosted optimizer to Lightning, and saves and loads its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.booster.booster import Booster
from gulliver.checkpoint.files import read_tensors
from gulliver.checkpoint.folder import CheckpointFolder
from gulliver.checkpoint.loading import load, step_folder
from gulliver.comm.collectives import barrier
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError
from gulliver.io.files import PARTIAL, finish_folder, remove_all
from gulliver.parallel.optimizer import BoostedOptimizer


# [Note: whose parameters the groups have] The groups of a boosted optimizer hold this rank's
# shards. Lightning and its callbacks look there for the model's parameters, for instance to disable
# ``requires_grad`` for those of other optimizers. So the groups show the module's own parameters;
# every other entry is read from and written to the actual group, which learning rate schedulers
# modify as well.
class SteppedOptimizer(torch.optim.Optimizer):
    """Wraps a boosted optimizer: exposes the module's parameters; `step` updates their shards."""

    def __init__(self, boosted: BoostedOptimizer, members: list[list[nn.Parameter]]) -> None:
        # Deliberately without super().__init__: groups and state are the boosted optimizer's.
        self.boosted, self.members = boosted, members
        groups = zip(boosted.param_groups, members, strict=True)
        self._groups = [_Group(group, whole) for group, whole in groups]
        # Callbacks log under the class name, and look up the user's optimizer of a schedule.
        self.__class__ = type(type(boosted.inner).__name__, (SteppedOptimizer,), {})  # type: ignore

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.boosted.inner

    def __hash__(self) -> int:
        return hash(self.boosted.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("boosted", "members", "_groups"):
            raise AttributeError(name)
        return getattr(self.boosted, name)

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.boosted.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.boosted.defaults

    def __repr__(self) -> str:
        return f"SteppedOptimizer({self.boosted!r})"

    def step(self, closure: Callable[[], Any] | None = None, **others: Any) -> Any:  # type: ignore[override]
        """Runs the closure once, then takes a step."""
        if others:
            raise GulliverError(
                f"step only accepts a closure, not {', '.join(others)}; set options in param_groups"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.boosted.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.boosted.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an error: groups are fixed when the fit begins."""
        raise GulliverError(
            "parameters cannot be added during a fit; pass all of them in configure_optimizers, "
            "including frozen ones"
        )

    def state_dict(self) -> dict[str, Any]:
        """Raises an error: each rank has only a shard of the state; use checkpoints."""
        raise GulliverError(
            "the optimizer's state is sharded; save it with trainer.save_checkpoint(path)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise GulliverError(
            "the optimizer's state is sharded; load it with trainer.fit(ckpt_path=path)"
        )

    def whole_state(self, keep: bool) -> dict[str, Any]:
        """Returns the full state in torch's format (collective); empty unless `keep`."""
        state = self.boosted.export_state(keep)
        if not keep:
            return {}
        return torch_state(
            state,
            [dict(group, params=None) for group in self.boosted.param_groups],
            [[self.boosted.names.get(p) for p in members] for members in self.members],
        )


def torch_state(
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    names: list[list[str | None]],
) -> dict[str, Any]:
    """Converts state keyed by name to torch's numbering."""
    numbered, found, number = list[dict[str, Any]](), dict[int, Any](), 0
    for group, members in zip(groups, names, strict=True):
        numbered.append({**group, "params": list(range(number, number + len(members)))})
        for name in members:
            if name in state:
                found[number] = state[name]
            number += 1
    return {"state": found, "param_groups": numbered}


class _Group(MutableMapping[str, Any]):
    """A parameter group of a boosted optimizer, with the module's parameters."""

    def __init__(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        self._group, self._members = group, members

    def __getitem__(self, key: str) -> Any:
        return self._members if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise GulliverError("parameters of a group are fixed when the fit begins")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def __repr__(self) -> str:
        return repr(dict(self))


# Lightning checkpoints as folders: each rank writes its part, in Gulliver's format.
#
# With one optimizer the folder is a run with one step (`Booster.save`), optionally written
# asynchronously. With several it has a model and a folder for each optimizer. Lightning's own part
# (loops, callbacks, schedules, hyperparameters) is in ``lightning.ckpt``.


REST = "lightning.ckpt"
MODEL = "model.safetensors"
# Entry of Lightning's part: names of each optimizer's parameters by group, in the user's order.
NAMES = "gulliver_names"


def lightning_part_of(path: Path) -> Path | None:
    """Returns Lightning's part of a folder; None if `path` is a file or does not exist."""
    if not path.is_dir():
        return None
    if (path / REST).is_file():
        return path / REST
    found = _rest_of_step(path, step_folder(path).name)
    if not found.is_file():
        raise GulliverError(
            f"{path} was not saved by a Trainer; load its weights with gulliver.checkpoint.load"
        )
    return found


def _rest_of_step(path: Path, step: str) -> Path:
    return path / f"{step}.{REST}"


class Folders:
    """Saves and loads checkpoints as folders."""

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
        self._booster.close()  # earlier saves are complete, and their memory is freed
        trains = "optimizer_states" in checkpoint
        rest = {**checkpoint, NAMES: [_names(optimizer) for optimizer in optimizers]}
        step = int(checkpoint["global_step"])
        if len(optimizers) > 1 or not is_boosted:
            self._save_files(path, rest, model, optimizers if trains else [])
            return
        if self._main:
            if path.is_file() or (path / REST).is_file():
                remove_all(path)
            for old in path.glob(f"*.{REST}"):  # of deleted steps
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
        """Writes model and optimizers to a temporary folder, which is renamed at the end."""
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
        count = len(rest.get(NAMES, ()))
        if optimizers and count != len(optimizers):
            raise GulliverError(
                f"{path} has {count} optimizers, but configure_optimizers returned "
                f"{len(optimizers)}; resume with the same optimizers"
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
    """Converts a folder to a file in Lightning's own format; called in one process."""
    # It can be read by ``LightningModule.load_from_checkpoint``, ``Trainer.fit(ckpt_path=)`` with
    # any strategy, and ``torch.load``.
    folder, file = Path(folder), Path(file)
    found = lightning_part_of(folder)
    if found is None:
        raise GulliverError(f"{folder} is not a folder; files are already in Lightning's format")
    if file.exists():
        raise GulliverError(f"{file} already exists; choose another name")
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
    state = {
        name: {key: _plain(value) for key, value in entries.items()}
        for name, entries in saved["state"].items()
    }
    return torch_state(state, [dict(group["options"]) for group in saved["groups"]], names)


def _plain(value: Any) -> Any:
    """Converts a saved counter to a number or a 0-dim tensor; returns other values unchanged."""
    if not (isinstance(value, dict) and set(value) == {"value", "dtype"}):
        return value
    dtype = value["dtype"]
    return value["value"] if dtype is None else torch.tensor(value["value"], dtype=dtype)
