"""Accelerate's `Accelerator`, with Gulliver instead of torch's DDP.

    from gulliver.integrations.accelerate import Accelerator    # was: from accelerate

Loaders, `gather_for_metrics`, trackers and `accumulate` are Accelerate's own. Start with
`prepare_optimizer`, which boosts the model of an optimizer; backward, clipping and checkpoints of
sharded state follow from that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary, WeakSet

import accelerate
import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import Plugin
from gulliver.comm.world import current_world, shutdown
from gulliver.errors import GulliverError
from gulliver.integrations.prepared import (
    Options,
    PreparedOptimizer,
    check_arguments,
    check_precision,
    detach_earlier,
    join_group,
    join_world,
    make_collective,
    mapped_state,
    mark_owned,
    model_of,
    owner_of,
    plugin_of,
    restore_methods,
)
from gulliver.parallel.optimizer import BoostedOptimizer

# Checkpoint folder with the sharded state.
FOLDER = "gulliver"


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` with boosted models.

    Args:
        args: arguments of `accelerate.Accelerator`.
        gulliver: `LowLevelZeroPlugin`, `GeminiPlugin`, or a dict of their arguments, such as
            ``{"stage": 3}`` or ``{"memory_limit": "6GiB"}``.
        kwargs: arguments of `accelerate.Accelerator`.

    Raises:
        GulliverError: an argument is not supported with Gulliver.
    """

    booster: Booster

    def __init__(self, *args: Any, gulliver: Options = None, **kwargs: Any) -> None:
        plugin = plugin_of(gulliver)
        bound = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs)
        check_arguments(bound.arguments)
        join_world(bound.arguments)
        if current_world().device.type == "cpu":
            # Otherwise it does not detect the other ranks.
            bound.arguments["cpu"] = True
        super().__init__(*bound.args[1:], **bound.kwargs)
        self._begin(plugin)

    @classmethod
    def taking_over(cls, made: accelerate.Accelerator, gulliver: Options) -> Self:
        """Converts an accelerator that a framework has created to this class."""
        plugin = plugin_of(gulliver)
        check_precision(made.mixed_precision)
        join_group(made.device)
        made.__class__ = cls
        assert isinstance(made, cls)
        made._begin(plugin)
        return made

    def _begin(self, plugin: Plugin) -> None:
        world = current_world()
        if world.size != self.num_processes:
            raise GulliverError(
                f"there are {world.size} ranks, but accelerate was started with "
                f"{self.num_processes}; on CPUs pass cpu=True (TrainingArguments: use_cpu=True), "
                "and do not create other accelerate objects first"
            )
        self._choices = plugin.choices(world.size)
        self._check_ddp(plugin)
        if self._compiles and (self._choices.stage == 3 or self._dynamo.use_regional_compilation):
            raise GulliverError(
                "torch_compile compiles the whole model, which needs all parameters at once; with "
                "stage 3 and memory limits omit it and compile the blocks with block.compile()"
            )
        self.booster = Booster(plugin)
        self._boosted: WeakKeyDictionary[nn.Module, BoostedOptimizer] = WeakKeyDictionary()
        self._untrained: WeakSet[nn.Module] = WeakSet()
        self._ended: WeakSet[nn.Module] = WeakSet()
        self.holds_back = False
        self._saving_state = False

    def _check_ddp(self, plugin: Any) -> None:
        """Raises an error for DDP options that would change results."""
        handler = self.ddp_handler
        if handler is None:
            return
        if getattr(handler.comm_hook, "value", "no") != "no":
            raise GulliverError(
                f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}) only applies to "
                "DDP; omit it, or use precision='bf16' for 16-bit gradients"
            )
        if not handler.broadcast_buffers and plugin.broadcast_buffers:
            raise GulliverError(
                "broadcast_buffers=False is an option of DDP; use gulliver={'broadcast_buffers': "
                "False}"
            )

    @property
    def _compiles(self) -> bool:
        return self._dynamo.backend != DynamoBackend.NO

    @property
    def _dynamo(self) -> Any:
        return self.state.dynamo_plugin

    # Preparing.

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers, in any order."""
        # An optimizer boosts its model, which has to be on its device by then.
        order = sorted(range(len(args)), key=lambda n: not isinstance(args[n], nn.Module))
        places = device_placement
        if places is not None and len(places) == len(args):
            places = [places[n] for n in order]
        found = super().prepare(*(args[n] for n in order), device_placement=places)
        by_place = dict(zip(order, found if len(args) > 1 else (found,), strict=True))
        result = tuple(by_place[n] for n in range(len(args)))
        return result[0] if len(result) == 1 else result

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Moves a model to its device, and adds autocast and compilation; it is boosted later."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise GulliverError("the model is wrapped by DDP; prepare the unwrapped model")
        if any(p.is_meta for p in model.parameters()) or owner_of(model) is not None:
            device_placement = False  # on meta, or already on its device
        trained = any(p.requires_grad for p in model.parameters()) and not evaluation_mode
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if trained and self._plain(model) not in self._boosted:
            self._untrained.add(self._plain(model))
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Boosts an optimizer and its model, which is prepared before or in the same call."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            boosted = getattr(optimizer, "boosted", None)
            if boosted is not None and all(o is not boosted for o in self._boosted.values()):
                raise GulliverError(
                    "the optimizer's model was freed or belongs to another accelerator; create a "
                    "new optimizer (a new Trainer)"
                )
            return super().prepare_optimizer(optimizer, device_placement)
        if any(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
            raise GulliverError(
                f"{type(optimizer).__name__} changes parameters outside of step() (in train() and "
                "eval()), which is not supported; use AdamW"
            )
        model = model_of(optimizer, [self._plain(model) for model in self._models])
        detach_earlier(model, optimizer, self)
        _, boosted, *_ = self.booster.boost(model, optimizer)
        self._boosted[model] = boosted
        mark_owned(model, self)
        self._untrained.discard(model)
        if boosted.gives_back and self.num_processes > 1:
            make_collective(model)
        prepared = PreparedOptimizer(boosted, self)
        self._optimizers.append(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> list[Any]:
        """Releases prepared objects; a passed model may then get another optimizer."""
        models = [self._plain(o) for o in objects if isinstance(o, nn.Module)]
        optimizers = [o.boosted for o in objects if isinstance(o, PreparedOptimizer)]
        for model, boosted in self._boosted.items():
            if any(o is boosted for o in optimizers) or any(m is model for m in models):
                self._ended.add(model)
        return super().free_memory(*objects)

    def has_ended(self, model: nn.Module) -> bool:
        return model in self._ended

    def release(self, model: nn.Module) -> None:
        """Restores full parameters of a boosted model (collective)."""
        boosted = self._boosted.pop(model)
        self.booster.close()
        self.booster.release(model, boosted)
        self._optimizers = [o for o in self._optimizers if getattr(o, "boosted", 0) is not boosted]
        self._ended.discard(model)
        mark_owned(model, None)
        restore_methods(model)

    def _plain(self, model: nn.Module) -> nn.Module:
        return self.unwrap_model(model, keep_torch_compile=False)

    # Training step.

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs backward for this rank's loss divided by the number of accumulated batches."""
        if self._untrained:
            name = type(next(iter(self._untrained))).__name__
            raise GulliverError(
                f"{name} is prepared but its optimizer is not; prepare both, or call "
                "requires_grad_(False) on a frozen model"
            )
        live = self._live()
        if not live:
            super().backward(loss, **kwargs)
            return
        if kwargs:
            raise GulliverError(f"backward only accepts a loss, not {', '.join(kwargs)}")
        loss = loss / self.gradient_accumulation_steps
        if len(live) == 1:
            self.booster.backward(loss, live[0])
        else:
            # It is unknown which of the models a loss uses: gradients are reduced in their steps.
            loss.backward()

    def _live(self) -> list[BoostedOptimizer]:
        found = [o.boosted for o in self._optimizers if isinstance(o, PreparedOptimizer)]
        scaled = [o for o in found if getattr(o, "scaler", None) is not None]
        if len(found) > 1 and scaled:
            raise GulliverError("precision='fp16' does not support several models; use bf16")
        return found

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulates gradients; they are reduced in the next backward outside the context."""
        plain, before = self._plain(model), self.holds_back
        holder = self._boosted.get(plain)
        self.holds_back = holder is not None or before
        try:
            with self.booster.no_sync(plain, holder) if holder is not None else nullcontext():
                yield
        finally:
            self.holds_back = before

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: Any = 2
    ) -> Tensor | None:
        """Clips the gradients of a model to a global norm of `max_norm`."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        holder = self._holder_of(parameters, "clip_grad_norm_")
        if holder is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return holder.clip_grad_by_norm(max_norm, float(norm_type)).to(torch.float32)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clips every element of a model's gradients to ``[-clip_value, clip_value]``."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        holder = self._holder_of(parameters, "clip_grad_value_")
        if holder is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            holder.clip_grad_by_value(clip_value)

    def _holder_of(self, parameters: list[Tensor], what: str) -> BoostedOptimizer | None:
        """Returns the optimizer of exactly these parameters; None if none of them is boosted."""
        given = {id(p) for p in parameters}
        found = [o for o in self._live() if any(id(p) in given for p in o.names)]
        if not found:
            return None
        if len(found) > 1 or not all(id(p) in given for p in found[0].names):
            raise GulliverError(
                f"{what} only supports all parameters of one model; pass model.parameters()"
            )
        if not self.sync_gradients:
            raise GulliverError(
                f"{what} was called between accumulated batches; only call it if "
                "accelerator.sync_gradients is set"
            )
        return found[0]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: plugins scale losses themselves."""

    @contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Does nothing, but raises an error unless all ranks are given equal numbers of batches."""
        even = self.even_batches if even_batches is None else even_batches
        if not even and self.num_processes > 1:
            raise GulliverError(
                "join_uneven_inputs only applies to DDP; use even_batches=True for equal numbers "
                "of batches"
            )
        yield

    # Checkpoints.

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, folder: Path | None = None
    ) -> dict[str, Any]:
        """Returns the full state dict of a model (collective).

        With stage 3 or a memory limit only rank 0 gets it, mapped from an unlinked file on the disk
        of `folder`; other ranks get an empty one, as with FSDP. Otherwise all ranks get it.
        """
        plain = self._plain(model)
        if self._saving_state and plain in self._boosted:
            return {}
        holder, owned = self._boosted.get(plain), owner_of(plain)
        if owned is not None and owned[1] is not self:
            return owned[1].get_state_dict(model, unwrap, folder)
        if holder is None or not holder.gives_back:
            return super().get_state_dict(model, unwrap)
        return mapped_state(self.booster, plain, folder)

    def save_boosted(self, folder: Path, frozen: bool = True) -> None:
        """Saves the sharded state of all boosted models and optimizers; a collective call."""
        for number, (model, optimizer) in enumerate(self._pairs()):
            place = folder / (f"{FOLDER}_{number}" if number else FOLDER)
            self.booster.save(place, 0, model, optimizer, use_async=False, frozen=frozen)
        self.booster.close()

    def load_boosted(self, folder: Path, frozen: bool = True, optimizers: bool = True) -> None:
        """Loads the state saved by `save_boosted`, on any number of ranks; a collective call."""
        for number, (model, optimizer) in enumerate(self._pairs()):
            place = folder / (f"{FOLDER}_{number}" if number else FOLDER)
            given = optimizer if optimizers else None
            self.booster.load(place, model, given, random=False, frozen=frozen)

    def _pairs(self) -> list[tuple[nn.Module, BoostedOptimizer]]:
        plain = [self._plain(model) for model in self._models]
        return [(model, self._boosted[model]) for model in plain if model in self._boosted]

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Saves models, optimizers, schedulers, generators and registered objects.

        Each rank saves its shard of models and optimizers to the subfolder ``gulliver``.
        """

        def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            self.save_boosted(Path(folder))
            # Earlier hooks may have removed some; empty entries are boosted models.
            weights[:] = [state for state in weights if state]

        handle = self.register_save_state_pre_hook(save)
        optimizers, self._optimizers = self._optimizers, []
        self._saving_state = True
        try:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            handle.remove()
            self._optimizers, self._saving_state = optimizers, False

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads the state saved by `save_state`, on any number of ranks."""

        def load(models: list[nn.Module], folder: str) -> None:
            self.load_boosted(Path(folder))
            models[:] = [model for model in models if self._plain(model) not in self._boosted]

        handle = self.register_load_state_pre_hook(load)
        optimizers, self._optimizers = self._optimizers, []
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            handle.remove()
            self._optimizers = optimizers

    def end_training(self) -> None:
        """Ends trackers and shuts down the distributed world."""
        self.booster.close()
        shutdown()
        super().end_training()
