"""The one call: an ordinary model and loop become the planned run.

Read `Booster.boost`; how a plan is run is told by `_apply.py`, how files are written and read by
`_states.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from gulliver.booster import _spread
from gulliver.booster._alike import check_alike
from gulliver.booster._autocast import autocast_calls, check_precision
from gulliver.booster._checkpoint import (
    RANDOM,
    agreed,
    boosted_state,
    load_boosted,
    restore_random,
)
from gulliver.booster._model import unwrapped
from gulliver.booster._old_files import OldFiles, is_old
from gulliver.booster._optimizer_files import read_optimizer, write_optimizer
from gulliver.booster._pipelined import run_whole
from gulliver.booster._plugins import PlanPlugin, Plugin, TorchDDPPlugin
from gulliver.booster._running import Running
from gulliver.booster._states import (
    check_whole,
    on_main,
    read_model,
    read_scheduler,
    whole_model,
    write_scheduler,
)
from gulliver.checkpoint import (
    AsyncCheckpointer,
    FileSaver,
    Loaded,
    PartsSaver,
    StepReader,
    step_folder,
    write_tensors,
)
from gulliver.comm import World, broadcast_object, guard, init_world, release_groups
from gulliver.errors import GulliverError, nearest
from gulliver.parallel import BoostedOptimizer
from gulliver.plan import Comparison, Plan


class Booster:
    """Boosts models as a plugin plans it.

    Args:
        plugin: way to make the plan; None for torch's DDP.
        mixed_precision: ``bf16`` runs calls of the model under autocast, parameters and reductions
            stay in their own dtype; None leaves the model as it is.
        plan: plan to run as it is, instead of a plugin's: ``Plan.load("plan.yaml")``.
        verbose: print a plan when its model is boosted; a plugin says that by itself.

    Raises:
        GulliverError: a precision that is not supported; a plugin and a plan.

    Example:
        >>> booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
        >>> model, optimizer, *_ = booster.boost(model, optimizer)
        >>> booster.backward(loss, optimizer)
    """

    def __init__(
        self,
        plugin: Plugin | None = None,
        mixed_precision: str | None = None,
        plan: Plan | None = None,
        verbose: bool = True,
    ) -> None:
        check_precision(mixed_precision)
        if plugin is not None and not isinstance(plugin, Plugin):
            raise GulliverError(
                f"plugin is {plugin!r}: pass LowLevelZeroPlugin(...) or TorchDDPPlugin(...)"
            )
        if plan is not None and (plugin is not None or not isinstance(plan, Plan)):
            raise GulliverError(
                "plan is a plan by itself: pass Booster(plan=Plan.load(path)), and no plugin"
            )
        if plan is not None:
            plugin = PlanPlugin(plan, verbose)
        self.plugin = plugin or TorchDDPPlugin()
        self.mixed_precision = mixed_precision
        self._last: Running | None = None
        self._file: FileSaver | None = None
        self._parts: PartsSaver | None = None
        self._checkpointers: dict[str, AsyncCheckpointer] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._optimizers: WeakKeyDictionary[nn.Module, BoostedOptimizer] = WeakKeyDictionary()
        self._several: WeakSet[nn.Module] = WeakSet()

    @property
    def plan(self) -> Plan:
        """The plan that runs now, tuning included; there once a model is boosted."""
        return self._running().plan

    def compare(self) -> Comparison:
        """Lays what was measured beside what the plan predicts: seconds and bytes of this rank.

        Seconds are those between the steps so far, bytes those at their peak; see
        `gulliver.plan.Comparison`.
        """
        return self._running().compare()

    def _running(self) -> Running:
        if self._last is None:
            raise GulliverError("there is no plan yet: call boost first")
        return self._last

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, BoostedOptimizer, Any, Any, Any]: ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, None, Any, Any, Any]: ...

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, BoostedOptimizer | None, Any, Any, Any]:
        """Turns a model and its optimizer into the planned run.

        Every rank calls it with the same model; values of rank 0 are taken. Criterion, data loader
        and scheduler are given back as they came, so that a call reads like others of its kind; the
        scheduler goes on steering the boosted optimizer. What is wrong is refused on all ranks,
        before anything is done.

        Args:
            model: model to run; it may be boosted again, with an optimizer of other parameters.
            optimizer: optimizer of its parameters; None runs the model without training it.
            criterion: given back.
            dataloader: given back.
            lr_scheduler: given back.

        Returns:
            model, optimizer, criterion, dataloader, lr_scheduler.

        Raises:
            GulliverError: there is nothing to train; the optimizer cannot be run so; the model
                is on another device than this rank; ranks have built different models.
        """
        world, precision = init_world(), self.mixed_precision or "none"
        agreed(lambda: self._check(model, optimizer, world))
        check_alike(unwrapped(model), optimizer)
        again = next((known for known in self._optimizers if unwrapped(known) is model), model)
        boosted, wrapped, plan = self.plugin.configure(again, optimizer, world, precision)
        self._last = Running(broadcast_object(plan), wrapped, unwrapped(model))
        release_groups()
        wrapped.watch(unwrapped(model))
        if boosted in self._optimizers:
            self._several.add(boosted)
        elif plan.precision.autocast != "none":
            autocast_calls(model, world.device.type, plan.precision.autocast)
        self._optimizers[boosted] = wrapped
        if world.is_main and self.plugin.verbose:
            self._last.planned.show()
        return boosted, None if optimizer is None else wrapped, criterion, dataloader, lr_scheduler

    def _check(self, model: nn.Module, optimizer: Any, world: World) -> None:
        """Refuses what cannot be run, before anything is done."""
        if isinstance(optimizer, type):
            name = optimizer.__name__
            raise GulliverError(
                f"the optimizer is the class {name}: pass an instance, {name}(model.parameters())"
            )
        if isinstance(optimizer, BoostedOptimizer):
            raise GulliverError("the optimizer is boosted already: boost each model once")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise GulliverError(
                f"the optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or "
                "none to run the model without training it"
            )
        for name, parameter in model.named_parameters():
            if parameter.device.type not in (world.device.type, *self.plugin.takes):
                raise GulliverError(
                    f"parameter {name!r} is on {parameter.device}, this rank runs on "
                    f"{world.device}: move the model there before its optimizer is made"
                )
        self.plugin.check(unwrapped(model), optimizer, self.mixed_precision or "none")

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Backward of this rank's loss; gradients are averaged over the ranks."""
        with guard():
            _boosted(optimizer).backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor] | None = None,
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
        weight: str | Callable[[Any], float] | None = None,
    ) -> dict[str, Any]:
        """Forward and backward of the next batch through the stages of a pipeline.

        Without a pipeline it calls the model, so that one loop serves both. Gradients are there
        when it returns; `optimizer.step` follows. Every rank calls it, those of one model with the
        same batch.

        Args:
            data_iter: iterator over batches: dicts of the model's keyword arguments, or tuples.
            model: model that `boost` returned.
            criterion: the loss of a micro-batch's outputs and that micro-batch; the batch's loss is
                their mean, weighted by samples or as `weight` says. None takes the outputs' own
                ``loss``, and then tokens count alike wherever they are.
            optimizer: optimizer that `boost` returned; None, or a model in evaluation, runs forward
                only.
            return_loss: whether the loss is wanted.
            return_outputs: whether the outputs are wanted; the last stage gets them.
            weight: what a criterion is a mean over, where that differs between micro-batches:
                ``samples``, ``labels`` that are not -100, ``shifted_labels`` (without the first of
                each sample), or a function of a micro-batch that counts it.

        Returns:
            ``loss``: of the whole batch, on every stage, or None; ``outputs`` or None.

        Raises:
            GulliverError: the batch cannot be cut; ranks of one model have different batches.
            StopIteration: there is no further batch.
        """
        if not hasattr(data_iter, "__next__"):
            raise GulliverError(
                f"data_iter is a {type(data_iter).__name__}: pass iter(dataloader), made once"
            )
        if model not in self._optimizers:
            raise GulliverError("execute_pipeline needs a model that this booster has boosted")
        if optimizer is not None:
            _boosted(optimizer)
        holder, backward = self._optimizers[model], optimizer is not None and model.training
        if optimizer is not None and optimizer is not holder:
            raise GulliverError("the optimizer is of another model: pass the one boosted with it")
        batch = next(data_iter)
        with guard():
            if holder.pipeline is not None:
                return holder.run(batch, criterion, backward, return_loss, return_outputs, weight)
            return run_whole(batch, model, criterion, holder if backward else None, return_outputs)

    def no_sync(
        self, model: nn.Module, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[Any]:
        """Accumulates gradients; they are exchanged with the next backward outside.

        Stage 2 of ZeRO keeps no whole gradients: it exchanges them inside too and adds up shards.

        Args:
            model: boosted by this booster.
            optimizer: optimizer that `boost` returned with it; found by the model where it is left
                out.
        """
        if optimizer is None:
            if model not in self._optimizers:
                raise GulliverError("no_sync needs a model that this booster has boosted")
            optimizer = self._optimizers[model]
        return _boosted(optimizer).no_sync()

    def save(
        self,
        folder: Path | str,
        step: int,
        model: nn.Module,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        use_async: bool = True,
        **options: Any,
    ) -> bool:
        """Saves everything of a step as one checkpoint while training goes on; every rank calls it.

        Each rank writes what it has of the state; nothing is gathered. It loads at any number of
        ranks, stage and chunk size, and with any plugin.

        Args:
            folder: folder of the run's checkpoints.
            step: number of the step.
            model: boosted by this booster, or plain.
            optimizer: optimizer that `boost` returned; None saves the model without one.
            lr_scheduler: scheduler to save, or None.
            state: what else belongs to the run, by entry: the average of the weights, the loader's
                position, numbers; see `gulliver.checkpoint.AsyncCheckpointer.save`.
            use_async: False returns when the step is complete.
            options: arguments of `gulliver.checkpoint.AsyncCheckpointer`, for this folder; the
                first save settles them.

        Returns:
            Whether it was begun; False where one was under way and ``when_busy="skip"`` was given.

        Raises:
            GulliverError: what went wrong with the save before; it cannot be saved.
        """
        if optimizer is not None:
            _boosted(optimizer)
        self._check_single(model)
        holder = self._optimizers.get(model, optimizer)
        if model not in self._optimizers:
            check_whole(model)
        content = boosted_state(model, optimizer, holder, lr_scheduler, state)
        checkpointer = self._checkpointer(Path(folder), options)
        if self._last is not None:
            checkpointer.about["plan"] = self.plan.to_values()
        begun = checkpointer.save(step, content, unwrapped(model).buffers())
        if not use_async:
            checkpointer.wait()
        return begun

    def load(
        self,
        folder: Path | str,
        model: nn.Module | None = None,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        step: int | None = None,
        strict: bool = True,
        prefix: str = "",
        random: bool = True,
    ) -> Loaded:
        """Loads what `save` saved, at any number of ranks; every rank calls it.

        Args:
            folder: folder of the run's checkpoints, or of one step.
            model: model to fill in place; what is None is not loaded.
            optimizer: optimizer to fill in place.
            lr_scheduler: scheduler to fill in place.
            state: what else to load, by entry; see `gulliver.checkpoint.load`.
            step: number of the step; None for the newest complete one: the one saved last,
                whatever its number.
            strict: refuse what does not match, before anything is changed; else it is reported.
            prefix: prefix of the model's names in the checkpoint.
            random: take up the random generators too, where an optimizer is loaded and this rank
                has them in the checkpoint.

        Returns:
            The step, the values of `state`, and what did not match.

        Raises:
            GulliverError: there is no such step; something does not match; a file is broken.
        """
        self._check_single(model)
        holder = optimizer if model is None else self._optimizers.get(model, optimizer)
        with self._open_step(Path(folder), step) as reader:
            loaded = load_boosted(
                reader, model, optimizer, holder, lr_scheduler, strict, prefix, state
            )
            if random and optimizer is not None and not restore_random(reader):
                loaded.absent.append(RANDOM)
        return loaded

    @staticmethod
    def _open_step(folder: Path, step: int | None) -> StepReader:
        """Opens the step that rank 0 finds: beside a writer, others may find a newer one."""
        found: list[Path] = []
        agreed(lambda: found.append(step_folder(folder, step)))
        where = found[0].parent / broadcast_object(found[0].name)
        opened: list[StepReader] = []
        agreed(lambda: opened.append(StepReader(where)))
        return opened[0]

    def _check_single(self, model: nn.Module | None) -> None:
        """Refuses steps of models that several optimizers train: a step has the state of one."""
        if model in self._several:
            raise GulliverError(
                "the model has several optimizers, and a step is saved with one: use save_model, "
                "and save_optimizer for each"
            )

    @property
    def saves(self) -> int:
        """Checkpoints that were begun."""
        return sum(checkpointer.saves for checkpointer in self._checkpointers.values())

    @property
    def stall_s(self) -> float:
        """Seconds for which checkpoints have held up training so far."""
        return sum(checkpointer.stall_s for checkpointer in self._checkpointers.values())

    def wait_copied(self) -> None:
        """Waits until the state may be changed by anybody, in any way; see `save`."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait_copied()

    def wait(self) -> None:
        """Waits until every step that is being saved is complete; every rank calls it.

        Raises:
            GulliverError: one could not be saved.
        """
        for checkpointer in self._checkpointers.values():
            checkpointer.wait()
        self._await_file()

    def close(self) -> None:
        """Waits as `wait` does, and frees the memory that saving has needed."""
        self._await_file()
        while self._checkpointers:
            _, checkpointer = self._checkpointers.popitem()
            checkpointer.close()

    def _checkpointer(self, folder: Path, options: Mapping[str, Any]) -> AsyncCheckpointer:
        known_names = inspect.signature(AsyncCheckpointer).parameters
        for name in options:
            if name not in known_names:
                raise GulliverError(f"save has no option {name!r}: {nearest(name, known_names)}")
        key = str(folder.absolute())
        known = self._options.setdefault(key, dict(options))
        if options and known != options:
            raise GulliverError(
                f"{folder} is being saved with {known or 'the defaults'}: the first save settles "
                "its options"
            )
        if key not in self._checkpointers:
            self._checkpointers[key] = AsyncCheckpointer(folder, **options)
        return self._checkpointers[key]

    def save_model(self, model: nn.Module, path: Path | str, use_async: bool = False) -> None:
        """Writes the model's state dict, whole and under its own names, as one safetensors file.

        Every rank calls it; rank 0 writes, buffers as it has them. Any world size and any
        safetensors reader loads it.

        Args:
            model: boosted or not.
            path: path of the file.
            use_async: write it while training goes on; `wait`, or the next save of a model, says
                if that failed. Of a model that is sharded or cut each rank writes its parts, from
                which rank 0 then makes the file: for that time the disk holds the model twice.

        Raises:
            GulliverError: it cannot be written; nothing is left behind then.
        """
        plain, place = unwrapped(model), Path(path)
        self._await_file()
        holder = self._optimizers.get(model)
        whole = holder is None or holder.has_whole_model
        if holder is not None and use_async and (holder.gives_back or not whole):
            self._parts = _spread.begin_model(holder, plain, place)
            return
        if holder is not None and not whole:
            _spread.write_model(holder, plain, place)
            return
        if holder is None:
            check_whole(plain)
        state = whole_model(plain)
        if not use_async:
            on_main(lambda: write_tensors(place, state))
            return

        def begin() -> None:
            self._file = FileSaver(place, state)

        on_main(begin)

    def _await_file(self) -> None:
        """Lets a file of a model that is under way be finished; every rank calls it."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.close()

        def finish() -> None:
            saver, self._file = self._file, None
            if saver is not None:
                saver.wait()

        on_main(finish)

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
        holder = self._optimizers.get(model)
        if holder is not None and not holder.has_whole_model:
            return _spread.read_model(holder, unwrapped(model), Path(path), strict)
        return read_model(unwrapped(model), Path(path), strict)

    def save_huggingface(
        self, model: nn.Module, folder: Path | str, use_async: bool = False, **options: Any
    ) -> None:
        """Writes a boosted model as a Hugging Face folder; every rank calls it, rank 0 writes.

        What lies with several ranks is gathered one tensor at a time.

        Args:
            model: boosted by this booster.
            folder: folder to make; it must not exist.
            use_async: write it while training goes on, as `save_model` does.
            options: ``max_shard_bytes``, ``config`` and ``dtype``, as of
                `gulliver.checkpoint.save_huggingface`; a transformers model's own configuration is
                written where none is given.

        Raises:
            GulliverError: it cannot be written; nothing is left behind then.
        """
        holder = self._optimizers.get(model)
        if holder is None:
            raise GulliverError("the model was not boosted by this booster: boost it first")
        config = getattr(unwrapped(model), "config", None)
        if hasattr(config, "to_dict"):
            options.setdefault("config", config.to_dict())  # type: ignore[union-attr]
        self._await_file()
        if use_async:
            plain = unwrapped(model)
            self._parts = _spread.begin_folder(holder, plain, Path(folder), **options)
            return
        _spread.write_folder(holder, unwrapped(model), Path(folder), **options)

    def save_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Writes the optimizer state by parameter name, and the plan, to a folder.

        Every rank calls it. It loads at any world size, stage and chunk size, and with any plugin.
        The folder is a step of the checkpoint format with the entry ``optimizer``; it appears, or
        is replaced, whole or not at all.

        Raises:
            GulliverError: the folder holds other files, or cannot be written.
        """
        plan = None if self._last is None else self.plan
        write_optimizer(_boosted(optimizer), Path(path), plan)

    def load_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Reads what `save_optimizer` wrote; every rank calls it.

        Raises:
            GulliverError: missing, broken, of another optimizer or other parameters.
        """
        optimizer = _boosted(optimizer)
        old: list[OldFiles] = []
        agreed(lambda: old.extend([OldFiles(Path(path))] if is_old(Path(path)) else []))
        if old:
            read_optimizer(optimizer, old[0])
            return
        with self._open_step(Path(path), None) as reader:
            read_optimizer(optimizer, reader)

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
