"""Saves and loads models, optimizers and runs.

Every rank writes its shards in the format of a full step. A separately saved optimizer is a run
with a single step and entry, which also has the float32 master weights (a full step saves them as
the model) and the parameters' shapes and dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from gulliver.booster.checkpoint import (
    OPTIMIZER,
    RANDOM,
    LoadPlan,
    OptimizerEntry,
    boosted_state,
    check_whole,
    names_of_all,
    on_main,
    optimizer_entry,
    read_scheduler,
    restore_random,
    whole_model,
    write_scheduler,
)
from gulliver.booster.running import Running
from gulliver.checkpoint.files import write_tensors
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.checkpoint.interchange import (
    adapter_names,
    has_adapters,
    write_adapters,
    write_untied,
)
from gulliver.checkpoint.loading import Loaded, step_folder
from gulliver.checkpoint.manifest import Mismatch
from gulliver.checkpoint.reader import StepReader
from gulliver.checkpoint.saving import AsyncCheckpointer
from gulliver.checkpoint.weights import MemoryWeights, Weights
from gulliver.checkpoint.writing import PartsSaver, refuse_existing, write_single
from gulliver.comm.collectives import broadcast_object, gather_objects, raise_on_any_rank
from gulliver.comm.world import init_world
from gulliver.errors import GulliverError, nearest
from gulliver.memory.parts import whole_shape
from gulliver.parallel.optimizer import BoostedOptimizer, boosted_only
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.plan.plan import Plan
from gulliver.planner.model import dtypes_of, narrow_dtypes, unwrapped


def write_optimizer(optimizer: BoostedOptimizer, folder: Path, plan: Plan | None) -> None:
    """Writes an optimizer as the only step of a run (collective)."""
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.take_writes()
    content = optimizer_entry(optimizer, _state_of(optimizer))
    content["parameters"] = stepped(optimizer)
    about = {} if plan is None else {"plan": plan.to_values()}
    limit = optimizer.checkpoint.copy_limit
    with AsyncCheckpointer(folder, 1, mode="ring", memory_limit=limit, about=about) as checkpointer:
        checkpointer.save(0, {OPTIMIZER: content})


def _state_of(optimizer: BoostedOptimizer) -> Any:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.checkpoint.export_leaves()
    return optimizer.checkpoint.state_leaves()


def stepped(optimizer: BoostedOptimizer) -> dict[str, Any]:
    """Full shapes of the parameters by name, and dtypes of their state."""
    return {
        name: [list(whole_shape(p)), optimizer.checkpoint.state_dtype(p)]
        for p, name in optimizer.checkpoint.trainable.items()
    }


def read_optimizer(optimizer: BoostedOptimizer, reader: StepReader) -> None:
    """Loads an optimizer on any number of ranks (collective)."""
    entry = OptimizerEntry.of(reader, optimizer)

    def match() -> None:
        reader.check_files()
        entry.match()
        _check_stepped(optimizer, entry.content, reader.folder)

    raise_on_any_rank(match)
    entry.unfreeze()
    if isinstance(optimizer, ZeroOptimizer):
        # Otherwise values that the user wrote to parameters would replace the loaded master shards.
        optimizer.shards.take_writes()
    raise_on_any_rank(entry.fill)
    if isinstance(optimizer, ZeroOptimizer):
        optimizer.shards.publish_masters()


def _check_stepped(optimizer: BoostedOptimizer, content: Mapping[str, Any], folder: Path) -> None:
    theirs = content.get("parameters", {})
    for name, ours in stepped(optimizer).items():
        there = theirs.get(name, ours)
        if there != ours:
            raise GulliverError(
                f"{folder} does not match: the optimizer state of {name!r} is for "
                f"{tuple(there[0])} {there[1]}, but the parameter is {tuple(ours[0])} {ours[1]}"
            )


# Files with full models of which ranks may hold only parts. All functions here are collective.

Write = Callable[[Weights], object]


def write_file(model: nn.Module, path: Path) -> Write:
    """Returns a function that writes a model to one file, keeping its names and dtypes."""
    dtypes = _of_all(dtypes_of(model))
    return lambda weights: write_single(weights, {n: n for n in weights.infos}, path, dtypes)


def write_folder(
    holder: BoostedOptimizer, model: nn.Module, folder: Path, **options: Any
) -> tuple[Write, set[str] | None]:
    """Returns a function that writes a Hugging Face folder, and the names it reads (None: all)."""
    raise_on_any_rank(lambda: refuse_existing(folder))
    dtype = options.pop("dtype", None) or _of_all(dtypes_of(model))
    if has_adapters(model):
        names = _of_all({0: adapter_names(model)})[0]
        wanted = {source for sources in names.values() for source in sources.values()}
        return lambda weights: write_adapters(weights, model, folder, dtype, names=names), wanted
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        options.setdefault("config", config.to_dict())
    aliases = _of_all(holder.checkpoint.canonical_names(model))
    return lambda w: write_untied(w, folder, dtype=dtype, aliases=aliases, **options), None


def _of_all(mine: dict[Any, Any]) -> dict[Any, Any]:
    return {name: value for found in gather_objects(mine) for name, value in found.items()}


def read_sharded(
    holder: BoostedOptimizer, model: nn.Module, path: Path, strict: bool, checked: bool = False
) -> list[str]:
    """Fills a model from a file or a Hugging Face folder; each rank reads only its shards."""
    leaves, elsewhere = holder.checkpoint.load_leaves(model), names_of_all(model, holder)
    aliases = holder.checkpoint.canonical_names(model)
    narrow = {} if checked else narrow_dtypes(model)

    def read(strict: bool, **options: Any) -> Mismatch:
        return load_huggingface(leaves, path, strict, "", elsewhere, aliases, model, **options)

    odd = raise_on_any_rank(lambda: read(strict, dtypes=narrow, fill=False))
    holder.checkpoint.before_model_load()
    # Mismatches were found and reported above.
    raise_on_any_rank(lambda: read(strict=False, check=False))
    holder.checkpoint.after_model_load()
    every = gather_objects(odd.missing + odd.unexpected)
    return list(dict.fromkeys(name for names in every for name in names))


# Files of a `Booster`: steps, models, optimizers and schedulers. Read `CheckpointIO.save`.


class CheckpointIO:
    """Saves and loads boosted models, optimizers and runs."""

    _last: Running | None
    plugin: Any

    def __init__(self) -> None:
        self._saving: PartsSaver | None = None
        self._checkpointers: dict[str, AsyncCheckpointer] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._optimizers: WeakKeyDictionary[nn.Module, BoostedOptimizer] = WeakKeyDictionary()
        self._several: WeakSet[nn.Module] = WeakSet()

    def _running(self) -> Running:
        if self._last is None:
            raise GulliverError("the booster has no plan; call boost first")
        return self._last

    def save(
        self,
        folder: Path | str,
        step: int,
        model: nn.Module,
        optimizer: BoostedOptimizer | None = None,
        lr_scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        use_async: bool = True,
        frozen: bool = True,
        **options: Any,
    ) -> bool:
        """Saves a step as one checkpoint while training continues (collective).

        Each rank writes its part of the state; nothing is gathered. The checkpoint can be loaded
        with any number of ranks, stage, chunk size and plugin.

        Args:
            folder: folder of the run's checkpoints.
            step: number of the step.
            model: model to save, boosted or not.
            optimizer: optimizer that `boost` returned; None saves the model without one.
            lr_scheduler: scheduler to save, or None.
            state: additional entries, such as averaged weights, the loader's position or numbers;
                see `gulliver.checkpoint.AsyncCheckpointer.save`.
            use_async: False returns when the step is complete.
            frozen: whether to save frozen parameters; a checkpoint without them is loaded with
                ``frozen=False`` into a model that already has them.
            options: arguments of `gulliver.checkpoint.AsyncCheckpointer`; a folder's first save
                sets them for all later ones.

        Returns:
            Whether the save was started; False if it was skipped, because of ``when_busy``.

        Raises:
            GulliverError: the previous save failed, or this one cannot be written.
        """
        if optimizer is not None:
            boosted_only(optimizer)
        self._check_single(model)
        holder = self._optimizers.get(model, optimizer)
        if model not in self._optimizers:
            check_whole(model)
        content = boosted_state(model, optimizer, holder, lr_scheduler, state, frozen)
        limit = None if holder is None else holder.checkpoint.copy_limit
        # The memory limit also applies to the copy that is written in the background.
        checkpointer = self._checkpointer(Path(folder), options, limit)
        if self._last is not None:
            checkpointer.about["plan"] = self._running().plan.to_values()
        begun = checkpointer.save(step, content)
        first = begun and checkpointer.saves == 1 and checkpointer.rank == 0
        limited = limit is not None or checkpointer.when_busy != "wait"
        if first and limited and self.plugin.verbose:
            print(f"checkpoints in {folder} use {checkpointer.held}", flush=True)
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
        frozen: bool = True,
    ) -> Loaded:
        """Loads a checkpoint written by `save`, on any number of ranks (collective).

        Args:
            folder: folder of the run's checkpoints, or of one step.
            model: model to fill in place; None skips it, as for the following arguments.
            optimizer: optimizer to fill in place.
            lr_scheduler: scheduler to fill in place.
            state: additional entries to load; see `gulliver.checkpoint.load`.
            step: number of the step; None for the complete step that was saved last.
            strict: raise on mismatches before anything is changed; otherwise report them.
            prefix: prefix of the model's names in the checkpoint.
            random: also restore the random generators, if an optimizer is loaded and the checkpoint
                has this rank's state.
            frozen: whether to load frozen parameters.

        Returns:
            The step, the values of `state`, and the mismatches.

        Raises:
            GulliverError: the step does not exist, something does not match, or a file is corrupt.
        """
        self._check_single(model)
        holder = optimizer if model is None else self._optimizers.get(model, optimizer)
        with self._open_step(Path(folder), step) as reader:
            loaded = LoadPlan(
                reader, model, optimizer, holder, lr_scheduler, state or {}, strict, prefix, frozen
            ).load()
            if random and optimizer is not None and not restore_random(reader):
                loaded.absent.append(RANDOM)
        return loaded

    @staticmethod
    def _open_step(folder: Path, step: int | None) -> StepReader:
        """Opens the step that rank 0 finds; other ranks might already see a newer one."""
        found = raise_on_any_rank(lambda: step_folder(folder, step))
        where = found.parent / broadcast_object(found.name)
        return raise_on_any_rank(lambda: StepReader(where))

    def _check_single(self, model: nn.Module | None) -> None:
        if model in self._several:
            raise GulliverError(
                "the model has several optimizers, but a checkpoint step stores only one; use "
                "save_model, and save_optimizer for each"
            )

    @property
    def saves(self) -> int:
        """Number of checkpoints started."""
        return sum(checkpointer.saves for checkpointer in self._checkpointers.values())

    @property
    def stall_s(self) -> float:
        """Total seconds for which saving has stalled training."""
        return sum(checkpointer.stall_s for checkpointer in self._checkpointers.values())

    def wait_copied(self) -> None:
        """Waits until the state may be modified; see `save`."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait_copied()

    def wait(self) -> None:
        """Waits until all pending saves are complete (collective)."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait()
        self._await_model()

    def close(self) -> None:
        """Waits for pending saves, then frees the buffers used for saving."""
        with ExitStack() as stack:
            # Whatever fails, all other folders are released.
            while self._checkpointers:
                stack.callback(self._checkpointers.popitem()[1].close)
            self._await_model()

    def abandon(self) -> None:
        """Finishes this rank's writes and unlocks the folders; used if other ranks may be dead."""
        while self._checkpointers:
            self._checkpointers.popitem()[1].abandon()

    def _checkpointer(
        self, folder: Path, options: Mapping[str, Any], limit: int | None
    ) -> AsyncCheckpointer:
        known_names = inspect.signature(AsyncCheckpointer).parameters
        for name in options:
            if name not in known_names:
                raise GulliverError(f"save has no option {name!r}: {nearest(name, known_names)}")
        key = str(folder.absolute())
        known = self._options.setdefault(key, dict(options))
        if options and known != options:
            raise GulliverError(
                f"{folder} is being saved with {known or 'the defaults'}; options cannot change "
                "after the first save"
            )
        if key not in self._checkpointers:
            given = {"memory_limit": limit, **options}
            self._checkpointers[key] = AsyncCheckpointer(folder, **given)
        return self._checkpointers[key]

    def _write(
        self,
        holder: BoostedOptimizer,
        model: nn.Module,
        target: Path,
        write: Write,
        names: set[str] | None,
        use_async: bool,
    ) -> None:
        """Writes a model's files, from memory if a rank has the full model, else from shards."""
        if not use_async and not _is_spread(holder):
            state = _whole_state(holder, model)
            state = state if names is None else {name: state[name] for name in names}
            tied = holder.checkpoint.canonical_names(model)
            on_main(lambda: write(MemoryWeights(state, tied)))
            return
        every = holder.checkpoint.model_leaves(model).items()
        leaves = {name: leaf for name, leaf in every if names is None or name in names}
        self._saving = PartsSaver(target, write, leaves, holder.checkpoint.copy_limit)
        if not use_async:
            self._await_model()

    def save_model(self, model: nn.Module, path: Path | str, use_async: bool = False) -> None:
        """Writes the model's full state dict, under its own names, as one safetensors file.

        Must be called on all ranks; rank 0 writes, including its buffers. The file can be loaded at
        any world size and by any safetensors reader.

        Args:
            model: boosted or not.
            path: path of the file.
            use_async: write a boosted model while training continues; `wait`, or the next save of a
                model, raises if writing failed. Each rank writes its shards, and rank 0 merges them
                into the file; until then the disk holds the model twice.
        """
        plain, place = unwrapped(model), Path(path)
        self._await_model()
        holder = self._optimizers.get(model)
        if holder is not None and (use_async or _is_spread(holder)):
            self._write(holder, plain, place, write_file(plain, place), None, use_async)
        else:
            check_whole(plain)
            state = _whole_state(holder, plain)
            on_main(lambda: write_tensors(place, state))

    def _await_model(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.close()

    def load_model(self, model: nn.Module, path: Path | str, strict: bool = True) -> list[str]:
        """Loads a state dict into the model in place (collective).

        As in `load`, values are converted to the model's dtype if it can represent them.

        Args:
            model: boosted or not.
            path: a safetensors file, a Hugging Face folder, or a step or run with the entry
                ``model``.
            strict: raise on missing or unexpected names.

        Returns:
            The missing and unexpected names.
        """
        holder, plain = self._optimizers.get(model), unwrapped(model)
        if holder is not None:
            return read_sharded(holder, plain, Path(path), strict)
        odd = load_huggingface(plain, path, strict)
        return odd.missing + odd.unexpected

    def save_huggingface(
        self, model: nn.Module, folder: Path | str, use_async: bool = False, **options: Any
    ) -> None:
        """Writes a boosted model as a Hugging Face folder; every rank calls it, rank 0 writes.

        Sharded tensors are gathered one at a time. For a model with PEFT adapters only the adapters
        are written, in PEFT's format.

        Args:
            model: boosted by this booster.
            folder: folder to create; it must not exist.
            use_async: write it while training continues, as `save_model` does.
            options: ``max_shard_bytes``, ``config`` and ``dtype`` of
                `gulliver.checkpoint.save_huggingface`; by default, a transformers model's own
                configuration is written.
        """
        holder = self._optimizers.get(model)
        if holder is None:
            raise GulliverError("the model was not boosted by this booster; call boost first")
        self._await_model()
        plain, target = unwrapped(model), Path(folder)
        write, names = write_folder(holder, plain, target, **options)
        self._write(holder, plain, target, write, names, use_async)

    def save_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Writes the optimizer state by parameter name, and the plan, to a folder.

        Must be called on all ranks. It can be loaded at any world size, stage, chunk size and
        plugin. The folder is a run whose only step has the entry ``optimizer``, with the plan in
        its manifest; the step is written or replaced atomically.
        """
        plan = None if self._last is None else self._last.plan
        write_optimizer(boosted_only(optimizer), Path(path), plan)

    def load_optimizer(self, optimizer: BoostedOptimizer, path: Path | str) -> None:
        """Loads a folder written by `save_optimizer` (collective)."""
        optimizer = boosted_only(optimizer)
        with self._open_step(Path(path), None) as reader:
            read_optimizer(optimizer, reader)

    def save_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Writes a scheduler's state as JSON; rank 0 writes, other ranks need not call it.

        Functions in its state are not saved: create the same scheduler before loading.
        """
        write_scheduler(lr_scheduler, Path(path), init_world().is_main)

    def load_lr_scheduler(self, lr_scheduler: Any, path: Path | str) -> None:
        """Loads a file written by `save_lr_scheduler`."""
        read_scheduler(lr_scheduler, Path(path))


def _whole_state(holder: BoostedOptimizer | None, model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a model that is unsharded on every rank (collective)."""
    state = whole_model(model)
    if isinstance(holder, ZeroOptimizer):
        # If updates are packed, parameters differ from the shards that are trained.
        state |= holder.checkpoint.exact_parameters(model)
    return state


def _is_spread(holder: BoostedOptimizer) -> bool:
    """Whether a model is written tensor by tensor, because no rank may be able to hold it."""
    return not holder.checkpoint.has_whole_model or holder.checkpoint.copy_limit is not None
