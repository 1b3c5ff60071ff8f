"""Strategies for ``lightning.pytorch``: ``Trainer(strategy="gulliver")``.

Lightning launches processes and runs loops, hooks, logging and samplers. Here the module is boosted
with each of its optimizers, steps are called through the module itself so that its hooks run, and
checkpoints are single files or folders. Start with `setup`, then `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.comm.world import guard, init_world, shutdown
from gulliver.errors import GulliverError
from gulliver.integrations.lightning_checkpoints import (
    Folders,
    SteppedOptimizer,
    lightning_part_of,
    to_lightning,
)
from gulliver.planner.model import unwrapped

# Names for ``Trainer(strategy=)``, with their arguments.
STRATEGIES: dict[str, dict[str, Any]] = {
    "gulliver": {},
    "gulliver_zero3": {"stage": 3},
    # Fraction of the memory of the device or of this process.
    "gulliver_gemini": {"memory_limit": "80%"},
}

# Arguments passed on to Lightning's strategies.
LIGHTNING = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "timeout", "start_method"),
)
FORMS = ("file", "folder")
# Trainer precisions that ZeRO supports: those without a gradient scaler on parameters.
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true")
HALVES = (torch.bfloat16, torch.float16)


class GulliverStrategy(DDPStrategy):
    """Runs a LightningModule with a Gulliver plugin.

    Args:
        plugin: `LowLevelZeroPlugin`, `GeminiPlugin` or `TorchDDPPlugin`; None creates one from the
            other arguments.
        stage: ZeRO stage; default: 1.
        memory_limit: memory per rank for state and activations, as for `GeminiPlugin`.
        checkpoint: format of checkpoints: ``file``, like Lightning's own, or ``folder``, to which
            each rank writes its shard; None selects files below stage 3, and folders for stage 3
            and 16-bit parameters.
        use_async: whether folders are written asynchronously.
        options: further arguments of the plugin, such as ``disk``, ``precision``, ``chunk_mb`` and
            ``activations``, and those of `DDPStrategy` that are listed in `LIGHTNING`.

    Raises:
        GulliverError: an argument is unknown to the plugin, or contradicts another.
    """

    def __init__(
        self,
        plugin: Plugin | None = None,
        *,
        stage: int | None = None,
        memory_limit: int | float | str | None = None,
        checkpoint: str | None = None,
        use_async: bool = False,
        **options: Any,
    ) -> None:
        if checkpoint not in (None, *FORMS):
            raise GulliverError(f"checkpoint={checkpoint!r} is unknown; use 'file' or 'folder'")
        if use_async and checkpoint == "file":
            raise GulliverError("use_async=True needs folders; omit checkpoint='file'")
        own = {name: options.pop(name) for name in LIGHTNING if name in options}
        self._plugin = choose_plugin(plugin, stage, memory_limit, options)
        super().__init__(**own)
        self._form = "folder" if use_async else checkpoint
        self._use_async = use_async
        self._booster: Booster | None = None
        self._boosted: nn.Module | None = None
        self._resumed: _Resumed | None = None
        self._failed = False

    # Setup and teardown.

    def _get_process_group_backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"

    def setup_distributed(self) -> None:
        """Initializes torch.distributed like Lightning, and Gulliver's world on top."""
        super().setup_distributed()
        world = init_world(device=self.root_device)
        if (world.size, world.device) != (self.world_size, self.root_device):
            shutdown_alone(world.size)
            world = init_world(device=self.root_device)
        if world.size != self.world_size:
            raise GulliverError(
                f"this process is one of {world.size} ranks, but the Trainer expects "
                f"{self.world_size}; use devices={world.size}, or start another process"
            )

    def setup(self, trainer: Any) -> None:
        """Boosts the module with its optimizers, and resumes from a checkpoint."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits, self._failed = trainer.state.fn == "fit", False
        if self._boosted is not None:
            self._set_up_again(fits)
            return
        self._check_precision()
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self._module)
        self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
            if self._resumed is not None:
                self._resumed.fill_plain(self.optimizers, self._sixteen_bits())
        self._boost(fits)
        self.setup_precision_plugin()
        self._clip_shards()
        self._fill(fits)

    def _set_up_again(self, fits: bool) -> None:
        """Continues with a module that a stage 3 fit left sharded."""
        boosted = self._boosted
        assert boosted is not None, "it was boosted before"
        if fits or unwrapped(boosted) is not self._module:
            raise GulliverError(
                "stage 3 leaves a module sharded after its first run; fit a new module from a "
                "checkpoint of this one (ckpt_path=) with a new Trainer"
            )
        self.model = boosted
        self._clip_shards()
        self._fill(False)

    def _boost(self, fits: bool) -> None:
        self._booster, model = Booster(plugin=self._plugin), self._module
        given, stepped = self.optimizers if fits else [], list[Any]()
        if fits:
            self.optimizers = stepped  # set early, in case the second one raises an error
        for optimizer in given:
            if type(optimizer).__name__ == "_MockOptimizer":  # the module had none
                stepped.append(optimizer)
                continue
            members = [list(group["params"]) for group in optimizer.param_groups]
            model, boosted, *_ = self._booster.boost(model, optimizer)
            stepped.append(SteppedOptimizer(boosted, members))
            self._boosted = model
        if not any(isinstance(o, SteppedOptimizer) for o in stepped) and self._has_parameters():
            model, *_ = self._booster.boost(model)
        self.model = self._boosted = model
        self._choose_form()
        if self._stays:
            forbid_moves(self._module, self._told)

    def _choose_form(self) -> None:
        sixteen, limited = self._sixteen_bits(), getattr(self._plugin, "memory", None) is not None
        self._saves = self._form or ("folder" if self._stays or sixteen else "file")
        if self._saves == "file" and (limited or sixteen):
            why = (
                "a memory limit cannot hold the whole model"
                if limited
                else "float32 master weights"
            )
            raise GulliverError(
                f"checkpoint='file' is not supported here ({why}); omit it, and convert the "
                "folder to a file with gulliver.integrations.lightning.to_lightning"
            )
        assert self._booster is not None

        def write(rest: Any, path: Path) -> None:
            self.checkpoint_io.save_checkpoint(rest, str(path))

        self._folders = Folders(self._booster, write, self._use_async)

    def teardown(self) -> None:
        """Restores the plain module, unless it stays sharded."""
        # Below stage 3 parameters become whole again, so that any other Trainer can train them.
        # With stage 3 they may not fit on a rank: the module stays sharded, and this Trainer
        # validates, tests, predicts and saves with it.
        booster, optimizers, module = self._booster, self._optimizers, self._lightning_module
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        # After an error other ranks may have failed, and this would wait for them.
        if booster is not None and not (self._failed and self.world_size > 1):
            booster.close()
            if not self._stays and self._boosted is not None:
                booster.release(self._boosted, *(o.boosted for o in self._stepped))
                self._boosted = None
        if module is not None and self._boosted is not None and self._stays:
            forbid_moves(module, self._told, AFTER)
        self.model = module
        self._optimizers = []  # sharded state stays on its device
        on_meta = module is not None and any(p.is_meta for p in module.parameters())
        if self._boosted is not None or on_meta:
            self._lightning_module = None  # and so does a module that is still sharded
        try:
            super().teardown()
        finally:
            self._optimizers, self._lightning_module = optimizers, module

    def on_exception(self, exception: BaseException) -> None:
        """Records that ranks may be out of sync."""
        self._failed = True
        super().on_exception(exception)
        if self._booster is not None and self.world_size > 1:
            self._booster.abandon()

    def model_to_device(self) -> None:
        """Moves the module to this rank's device; meta parameters are filled when it is boosted."""
        if not any(p.is_meta for p in self._module.parameters()):
            super().model_to_device()
            return
        for tensor in [*self._module.parameters(), *self._module.buffers()]:
            if not tensor.is_meta:
                tensor.data = tensor.data.to(self.root_device)

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's training step via `module(...)`, so that hooks run."""
        with self.precision_plugin.train_step_context():
            return self._called("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._called("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._called("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._called("predict_step", *args, **kwargs)

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step in place of the module's `forward`, so that module hooks run."""
        assert self.model is not None
        return self._forward_redirection(self.model, self._module, name, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Calls Lightning's backward; gradients are reduced to shards."""
        self.pre_backward(closure_loss)
        plugin, module = self.precision_plugin, self._module
        loss, scale = plugin.pre_backward(closure_loss, module), 1.0
        with guard(), ExitStack() as stack:
            for stepped in self._stepped:
                # Parameters of other optimizers have no gradients: nothing to reduce.
                if any(p.requires_grad for members in stepped.members for p in members):
                    scale = stack.enter_context(stepped.boosted.backward_pass())
            scaled = loss if scale == 1.0 else loss * scale
            plugin.backward(scaled, module, optimizer, *args, **kwargs)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates gradients without reducing them while Lightning accumulates."""
        with ExitStack() as stack:
            for stepped in self._stepped:
                stack.enter_context(stepped.boosted.no_sync())
            yield

    def _clip_shards(self) -> None:
        """Replaces Lightning's clipping with clipping of the sharded gradients."""
        clips = {
            "clip_grad_by_norm": lambda o, limit: o.clip_grad_by_norm(float(limit)),
            "clip_grad_by_value": lambda o, limit: o.clip_grad_by_value(float(limit)),
        }
        if self._stepped:
            vars(self.precision_plugin).update(clips)

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's full state on rank 0; empty for folders, which all ranks write."""
        if self._saves == "folder":
            return {}
        state = self._module.state_dict()  # called on all ranks, because stage 3 gathers
        if not self.is_global_zero:
            return {}
        # Parameters are views of chunks, which would be saved as a whole.
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's full state on rank 0; empty for folders, which all ranks write."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(plain, SteppedOptimizer):
            return plain.state_dict()
        return {} if self._saves == "folder" else plain.whole_state(self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes a file, or a folder to which each rank writes its shard (collective)."""
        if self._saves == "file":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None or "://" in str(filepath):
            raise GulliverError(
                f"{filepath}: folders need local paths without storage_options; use "
                "checkpoint='file' for other targets"
            )
        model = self._boosted if self._boosted is not None else self._module
        path = Path(self.broadcast(str(filepath)))
        is_boosted = self._boosted is not None
        self._folders.save(path, checkpoint, model, self._stepped, is_boosted)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a file, or Lightning's part of a folder; the rest is loaded after boosting."""
        path = Path(checkpoint_path)
        rest = lightning_part_of(path)
        if self._boosted is not None and self._booster is not None:
            self._booster.wait()
        read = super().load_checkpoint(rest or checkpoint_path, *args, **kwargs)
        self._resumed = _Resumed(None if rest is None else path, read)
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the module from a file; folders are loaded after boosting."""
        assert self._resumed is not None
        self._resumed.strict = strict
        if self._resumed.folder is not None:
            if self._boosted is not None:  # during a run
                self._fill(bool(self._stepped))
            return
        on_meta = any(p.is_meta for p in self._module.parameters())
        self._module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=on_meta)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `setup` loads the optimizers before or during boosting."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.folder is None and not resumed.filled:
            raise GulliverError(
                "a running fit can only load folders, not files; use "
                "GulliverStrategy(checkpoint='folder')"
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a file or a folder after pending writes finish."""
        if self._booster is not None:
            self._booster.wait()
        super().remove_checkpoint(filepath)

    def _fill(self, fits: bool) -> None:
        """Loads the boosted model, and during `fit` also its optimizers, from a folder."""
        resumed, model = self._resumed, self._boosted
        if resumed is None or resumed.folder is None or model is None:
            return
        trains = fits and "optimizer_states" in resumed.checkpoint
        optimizers = self._stepped if trains else []
        rest = resumed.checkpoint
        self._folders.load(resumed.folder, rest, model, optimizers, resumed.strict)

    # Queries.

    @property
    def _module(self) -> Any:
        assert self._lightning_module is not None
        return self._lightning_module

    @property
    def _stepped(self) -> list[SteppedOptimizer]:
        return [o for o in self._optimizers if isinstance(o, SteppedOptimizer)]

    @property
    def _stays(self) -> bool:
        """Whether the module stays sharded after a run because it may not fit on one rank."""
        return getattr(self._plugin, "takes", ()) == ("meta",)

    @property
    def _told(self) -> str:
        limited = getattr(self._plugin, "memory", None) is not None
        return f"{type(self).__name__} with {'a memory limit' if limited else 'stage 3'}"

    def _has_parameters(self) -> bool:
        return next(self._module.parameters(), None) is not None

    def _sixteen_bits(self) -> bool:
        """Whether the parameters are 16-bit and have float32 master weights."""
        if isinstance(self._plugin, TorchDDPPlugin):
            return False
        halved = getattr(self._plugin, "precision", None) is not None
        return halved or any(p.dtype in HALVES for p in self._module.parameters())

    def _check_precision(self) -> None:
        plugin, precision = self.precision_plugin, str(self.precision_plugin.precision)
        if isinstance(self._plugin, TorchDDPPlugin):
            return
        if getattr(plugin, "scaler", None) is not None:
            raise GulliverError(
                f"precision={precision!r} scales gradients of full parameters; use 'bf16-mixed', "
                "plugin=TorchDDPPlugin(), or GulliverStrategy(precision='fp16'), which scales "
                "sharded gradients"
            )
        if precision not in PRECISIONS:
            raise GulliverError(
                f"precision={precision!r} is not supported; use one of {', '.join(PRECISIONS)}, "
                "or plugin=TorchDDPPlugin()"
            )
        ours = getattr(self._plugin, "precision", None)
        if ours is not None and precision != "32-true":
            raise GulliverError(
                f"Trainer(precision={precision!r}) and precision={ours!r} of the strategy cannot "
                "be combined; set one of them"
            )


class _Resumed:
    """The checkpoint that a run resumes from; `folder` is None for a file."""

    def __init__(self, folder: Path | None, checkpoint: dict[str, Any]) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.strict, self.filled = True, False

    def fill_plain(self, optimizers: list[Any], sixteen_bits: bool) -> None:
        """Loads optimizer states before boosting, because boosting shards them."""
        states = self.checkpoint.get("optimizer_states")
        if self.folder is not None or states is None:
            return
        if sixteen_bits:
            raise GulliverError(
                "a file has no float32 master weights for 16-bit parameters; resume from a "
                "folder, or load only the weights and start a new run"
            )
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(state)
        self.filled = True


def choose_plugin(
    plugin: Plugin | None,
    stage: int | None,
    memory_limit: int | float | str | None,
    given: Mapping[str, Any],
) -> Plugin:
    if plugin is not None:
        rest = [*given, *(["stage"] if stage is not None else [])]
        _check_plugin(plugin, rest + (["memory_limit"] if memory_limit is not None else []))
        return plugin
    options = {"verbose": False, **given}  # Lightning prints its own summary
    if memory_limit is None:
        # By default results and communication like DDP, with sharded optimizer state.
        return LowLevelZeroPlugin(1 if stage is None else stage, **options)
    if stage not in (None, 3):
        raise GulliverError(
            f"stage={stage} and a memory limit cannot be combined; a limit needs stage 3"
        )
    return GeminiPlugin(memory_limit, **options)


def _check_plugin(plugin: Plugin, rest: list[str]) -> None:
    if rest:
        raise GulliverError(f"plugin= and {rest[0]}= cannot be combined; pass the latter to plugin")
    if isinstance(plugin, HybridParallelPlugin) or not isinstance(
        plugin, TorchDDPPlugin | LowLevelZeroPlugin | GeminiPlugin
    ):
        what = type(plugin).__name__ if isinstance(plugin, Plugin) else repr(plugin)
        raise GulliverError(
            f"plugin={what} cannot run a LightningModule; use LowLevelZeroPlugin, GeminiPlugin or "
            "TorchDDPPlugin, or a Booster in your own loop for model parallelism"
        )


# Rejects moves or conversions of modules while their parameters are in chunks.
#
# Under stage 3 a parameter is a view of temporary memory: ``.to`` or ``.cpu()`` would create a
# whole copy that is not trained. Below stage 3 the step rejects replaced parameters.


DURING = (
    "and {strategy} manages the placement of its parameters; remove the call, or make it in "
    "__init__ or configure_model (Lightning moves batches)"
)
AFTER = (
    "and a fit of {strategy} has left its parameters sharded; use a new module with the "
    "checkpoint (ckpt_path=) for other Trainers"
)


class _Unmoved:
    """Replaces a module's `_apply`, which implements ``.to()``, ``.cpu()`` and similar methods."""

    def __init__(self, module: nn.Module, message: str) -> None:
        self._module, self._message = module, message

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        raise GulliverError(self._message)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copy = memo[id(self._module)]  # a copy of the module may be moved
        return type(copy)._apply.__get__(copy)


def forbid_moves(module: nn.Module, strategy: str, why: str = DURING) -> None:
    """Rejects moves of a module and of all its submodules with parameters."""
    for name, part in module.named_modules():
        if next(part.parameters(), None) is not None:
            told = type(part).__name__ + (f" ({name})" if name else "")
            moves = "is moved or converted (.to, .cpu(), .half() ...)"
            message = f"{told} {moves}, {why.format(strategy=strategy)}"
            # On the instance, so that its class and other modules of the class are not affected.
            vars(part)["_apply"] = _Unmoved(part, message)


def shutdown_alone(size: int) -> None:
    """Shuts down a one-rank world left over from another run in this process."""
    if size == 1:
        shutdown()


for _name, _options in STRATEGIES.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name, GulliverStrategy, description=f"Gulliver: {_name}", **_options
        )


# Strategies for ``lightning.pytorch``: ``Trainer(strategy="gulliver")``.
#
# Importing this module registers the names ``gulliver``, ``gulliver_zero3`` and
# ``gulliver_gemini``.
#
# Example:
#     >>> Trainer(strategy=GulliverStrategy(memory_limit="6GiB", disk="/scratch:100GiB"))


__all__ = ["GulliverStrategy", "to_lightning"]
