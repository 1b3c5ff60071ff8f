"""The one call: an ordinary model and loop become the planned run.

Read `Booster.boost`; what a plugin does with the model is in `_plugins.py`, how files are
written and read in `_states.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gulliver.booster._autocast import autocast_calls, check_precision
from gulliver.booster._plugins import Plugin, TorchDDPPlugin, unwrapped
from gulliver.booster._states import (
    on_main,
    read_model,
    read_optimizer,
    read_scheduler,
    write_model,
    write_optimizer,
    write_scheduler,
)
from gulliver.comm import broadcast_object, init_world
from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer
from gulliver.plan import Plan


class Booster:
    """Boosts models as a plugin plans it.

    Args:
        plugin: how the ranks share the work; None for torch's DDP.
        mixed_precision: ``bf16`` runs calls of the model under autocast, parameters and reductions
            stay in their own dtype; None leaves the model as it is.

    Raises:
        GulliverError: a precision that is not supported.

    Example:
        >>> booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
        >>> model, optimizer, *_ = booster.boost(model, optimizer)
        >>> booster.backward(loss, optimizer)
    """

    def __init__(self, plugin: Plugin | None = None, mixed_precision: str | None = None) -> None:
        check_precision(mixed_precision)
        if plugin is not None and not isinstance(plugin, Plugin):
            raise GulliverError(
                f"plugin is {plugin!r}: pass LowLevelZeroPlugin(...) or TorchDDPPlugin(...)"
            )
        self.plugin = plugin or TorchDDPPlugin()
        self.mixed_precision = mixed_precision
        self._plan: Plan | None = None
        self._optimizers: WeakKeyDictionary[nn.Module, BoostedOptimizer] = WeakKeyDictionary()

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
            GulliverError: there is nothing to train; the optimizer cannot be run so; the model
                is on another device than this rank.
        """
        world = init_world()
        if isinstance(optimizer, BoostedOptimizer):
            raise GulliverError("the optimizer is boosted already: boost each model once")
        for name, parameter in model.named_parameters():
            if parameter.device.type != world.device.type:
                raise GulliverError(
                    f"parameter {name!r} is on {parameter.device}, this rank runs on "
                    f"{world.device}: move the model there before its optimizer is made"
                )
        precision = self.mixed_precision or "none"
        boosted, wrapped, plan = self.plugin.configure(model, optimizer, world, precision)
        self._plan = broadcast_object(plan)
        wrapped.watch(model)
        self._optimizers[boosted] = wrapped
        if self.mixed_precision:
            autocast_calls(model, world.device.type, self.mixed_precision)
        if world.is_main and self.plugin.verbose:
            self.plan.show()
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Backward of this rank's loss; gradients are averaged over the ranks."""
        _boosted(optimizer).backward(loss)

    def no_sync(
        self, model: nn.Module, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[Any]:
        """Accumulates gradients; they are exchanged with the next backward outside.

        Stage 2 of ZeRO keeps no whole gradients: it exchanges them inside too and adds up shards.

        Args:
            model: boosted by this booster.
            optimizer: that boost returned with it; found by the model where it is left out.
        """
        if optimizer is None:
            if model not in self._optimizers:
                raise GulliverError("no_sync needs a model that this booster has boosted")
            optimizer = self._optimizers[model]
        return _boosted(optimizer).no_sync()

    def save_model(self, model: nn.Module, path: Path | str) -> None:
        """Writes the model's state dict, whole and under its own names, as one safetensors file.

        Every rank calls it; rank 0 writes, buffers as it has them. Any world size and any
        safetensors reader loads it.

        Raises:
            GulliverError: it cannot be written; nothing is left behind then.
        """
        on_main(lambda: write_model(unwrapped(model), Path(path)))

    def load_model(self, model: nn.Module, path: Path | str, strict: bool = True) -> list[str]:
        """Reads a state dict into the model in place; every rank calls it.

        Values are converted to the model's dtype, as `torch.nn.Module.load_state_dict` does.

        Args:
            model: boosted or not.
            path: a safetensors file.
            strict: refuse names that are missing or left over.

        Returns:
            The names that were missing or left over.

        Raises:
            GulliverError: the file is missing or broken; names or shapes differ.
        """
        return read_model(unwrapped(model), Path(path), strict)

    def save_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Writes the optimizer state by parameter name, and the plan, to a folder.

        Every rank calls it. It loads at any world size, stage and chunk size, and with any plugin.
        """
        state = _boosted(optimizer).export_state(keep=init_world().is_main)

        def write() -> None:
            write_optimizer(optimizer, state, Path(path))
            if self._plan is not None:
                self._plan.save(Path(path) / "plan.yaml")

        on_main(write)

    def load_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Reads what `save_optimizer` wrote; every rank calls it.

        Raises:
            GulliverError: missing, broken, of another optimizer or other parameters.
        """
        read_optimizer(_boosted(optimizer), Path(path))

    def save_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Writes a scheduler's numbers as JSON; rank 0 writes, the others need not call it.

        Its functions are not saved: make the same scheduler before loading.
        """
        if init_world().is_main:
            write_scheduler(lr_scheduler, Path(path))

    def load_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Reads what `save_lr_scheduler` wrote.

        Raises:
            GulliverError: missing, broken, or of another scheduler.
        """
        read_scheduler(lr_scheduler, Path(path))


def _boosted(optimizer: Any) -> BoostedOptimizer:
    if not isinstance(optimizer, BoostedOptimizer):
        raise GulliverError(
            f"{type(optimizer).__name__} is not boosted: pass the optimizer that boost returned"
        )
    return optimizer
