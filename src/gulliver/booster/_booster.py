"""The one call: an ordinary model and loop become the planned run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gulliver.booster._plugins import Plugin, TorchDDPPlugin
from gulliver.checkpoint import (
    join_state,
    read_json,
    read_tensors,
    split_state,
    write_json,
    write_tensors,
)
from gulliver.comm import any_rank, barrier, init_world
from gulliver.errors import GulliverError, nearest
from gulliver.parallel import BoostedOptimizer
from gulliver.plan import Plan

PRECISIONS = {"bf16": torch.bfloat16}
LISTED = 4
"""Names shown of a list that does not match."""


class Booster:
    """Boosts models as a plugin plans it.

    Args:
        plugin: how the ranks share the work; None for torch's DDP.
        mixed_precision: ``bf16`` runs the forward under autocast, parameters and reductions stay in
            their own dtype; None leaves the model as it is.

    Raises:
        GulliverError: a precision that is not supported.

    Example:
        >>> booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
        >>> model, optimizer, *_ = booster.boost(model, optimizer)
        >>> booster.backward(loss, optimizer)
    """

    def __init__(self, plugin: Plugin | None = None, mixed_precision: str | None = None) -> None:
        if mixed_precision is not None and mixed_precision not in PRECISIONS:
            raise GulliverError(
                f"mixed_precision={mixed_precision!r} is not supported: "
                f"{nearest(mixed_precision, PRECISIONS)} (or None)"
            )
        if plugin is not None and not isinstance(plugin, Plugin):
            raise GulliverError(
                f"plugin is a {type(plugin).__name__}: pass LowLevelZeroPlugin(...) or TorchDDPPlugin(...)"
            )
        self.plugin = plugin or TorchDDPPlugin()
        self.mixed_precision = mixed_precision
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """How the model runs; there once it is boosted."""
        if self._plan is None:
            raise GulliverError("there is no plan yet: call boost first")
        return self._plan

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, BoostedOptimizer, Any, Any, Any]:
        """Turns a model and its optimizer into the planned run.

        Every rank calls it with the same model; values of rank 0 are taken. Criterion, data loader
        and scheduler are given back as they came, so that a call reads like others of its kind; the
        scheduler goes on steering the boosted optimizer.

        Returns:
            model, optimizer, criterion, dataloader, lr_scheduler.

        Raises:
            GulliverError: there is nothing to train; the optimizer cannot be run so; the model is on
                another device than this rank.
        """
        world = init_world()
        if isinstance(optimizer, BoostedOptimizer):
            raise GulliverError("the optimizer is boosted already: boost each model once")
        for name, parameter in model.named_parameters():
            if parameter.device.type != world.device.type:
                raise GulliverError(
                    f"parameter {name!r} is on {parameter.device}, this rank runs on {world.device}: "
                    "move the model there before boost and before its optimizer is made"
                )
        precision = self.mixed_precision or "none"
        boosted, wrapped, self._plan = self.plugin.configure(model, optimizer, world, precision)
        if self.mixed_precision:
            _autocast(model, world.device.type, PRECISIONS[self.mixed_precision])
        if world.is_main and getattr(self.plugin, "verbose", False):
            print(self._plan.summary(), file=sys.stderr)
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Backward of this rank's loss; gradients are averaged over the ranks."""
        optimizer.backward(loss)

    def no_sync(
        self, model: nn.Module, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[Any]:
        """Accumulates gradients without exchanging them.

        Args:
            model: boosted.
            optimizer: boosted; needed with ZeRO.
        """
        if optimizer is not None:
            return optimizer.no_sync()
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        raise GulliverError(
            "no_sync needs the optimizer as well: booster.no_sync(model, optimizer)"
        )

    def save_model(self, model: nn.Module, path: Path | str) -> None:
        """Writes the model's state dict, whole and under its own names, as one safetensors file.

        Every rank calls it; rank 0 writes. Any world size and any safetensors reader loads it.
        """
        state = _unwrapped(model).state_dict()
        _on_main(lambda: write_tensors(Path(path), state))

    def load_model(self, model: nn.Module, path: Path | str, strict: bool = True) -> list[str]:
        """Reads a state dict into the model in place; every rank calls it.

        Args:
            model: boosted or not.
            path: a safetensors file.
            strict: refuse names that are missing or left over.

        Returns:
            The names that were missing or left over.

        Raises:
            GulliverError: the file is missing or broken; names or shapes differ.
        """
        plain = _unwrapped(model)
        state, own = read_tensors(Path(path)), plain.state_dict()
        mismatched = [n for n in own if n in state and own[n].shape != state[n].shape]
        if mismatched:
            name = mismatched[0]
            raise GulliverError(
                f"{path} is of another model: {len(mismatched)} shapes differ, such as {name} "
                f"({tuple(state[name].shape)} in the file, {tuple(own[name].shape)} here)"
            )
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if strict and (missing or extra):
            raise GulliverError(
                f"{path} is of another model: {_listed('missing', missing)}; {_listed('left over', extra)}"
            )
        plain.load_state_dict(state, strict=False)
        return missing + extra

    def save_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Writes the whole optimizer state by parameter name to a folder; every rank calls it.

        It loads at any world size, stage and chunk size, and with any plugin.
        """
        state = optimizer.export_state()
        groups = [
            {"names": names, "options": {k: v for k, v in group.items() if k != "params"}}
            for names, group in zip(optimizer.group_names(), optimizer.param_groups, strict=True)
        ]

        def write() -> None:
            folder = Path(path)
            tensors, skeleton = split_state({"state": state, "groups": groups})
            write_tensors(folder / "state.safetensors", tensors)
            content = {"optimizer": type(optimizer.inner).__name__, "state": skeleton}
            write_json(folder / "state.json", content)

        _on_main(write)

    def load_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Reads what `save_optimizer` wrote; every rank calls it.

        Raises:
            GulliverError: missing, broken, of another optimizer or other parameters.
        """
        folder = Path(path)
        content = read_json(folder / "state.json")
        if not isinstance(content, Mapping) or "optimizer" not in content:
            raise GulliverError(f"{folder} holds no optimizer state")
        ours = type(optimizer.inner).__name__
        if content["optimizer"] != ours:
            raise GulliverError(f"{folder} is of {content['optimizer']}, the optimizer is {ours}")
        saved = join_state(read_tensors(folder / "state.safetensors"), content["state"])
        names = optimizer.group_names()
        if [group["names"] for group in saved["groups"]] != names:
            raise GulliverError(
                f"{folder} is of other parameters: {len(saved['groups'])} groups of "
                f"{[len(g['names']) for g in saved['groups']]} in it, {[len(n) for n in names]} here"
            )
        optimizer.import_state(saved["state"])
        for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(entry["options"])

    def save_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Writes a scheduler's numbers as JSON; every rank calls it, rank 0 writes."""
        state = {
            key: value for key, value in lr_scheduler.state_dict().items() if not _is_code(value)
        }
        _, skeleton = split_state(state)
        _on_main(lambda: write_json(Path(path), skeleton))

    def load_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Reads what `save_lr_scheduler` wrote."""
        state = {**lr_scheduler.state_dict(), **join_state({}, read_json(Path(path)))}
        lr_scheduler.load_state_dict(state)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _is_code(value: Any) -> bool:
    """Whether a scheduler's entry holds functions, which are the program's, not the state's."""
    return callable(value) or (
        isinstance(value, list) and any(item is None or callable(item) for item in value)
    )


def _on_main(write: Any) -> None:
    """Lets rank 0 write, and every rank know whether it could."""
    world = init_world()
    failure: Exception | None = None
    if world.is_main:
        try:
            write()
        except Exception as error:
            failure = error
    failed = any_rank(failure is not None, world.device)
    if failure is not None:
        raise failure
    if failed:
        raise GulliverError("rank 0 could not write: see its error")
    barrier()


def _listed(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")


def _autocast(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Lets the model's own forward run under autocast, whoever calls it."""
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return forward(*args, **kwargs)

    model.forward = run
