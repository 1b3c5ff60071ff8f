"""The `Booster`, and a check that all ranks have built the same model."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from gulliver.booster.checkpoint_io import CheckpointIO
from gulliver.booster.noise import NoiseMeter, NoiseScale, check_noise
from gulliver.booster.plugins import LowLevelZeroPlugin, PlanPlugin, Plugin, TorchDDPPlugin
from gulliver.booster.running import Running, run_whole
from gulliver.comm.collectives import broadcast_object, gather_objects, raise_on_any_rank
from gulliver.comm.groups import release_groups
from gulliver.comm.watchdog import guard
from gulliver.comm.world import World, init_world
from gulliver.errors import GulliverError, first_difference
from gulliver.parallel.optimizer import BoostedOptimizer, boosted_only, refuse_extra_state
from gulliver.plan.plan import Plan
from gulliver.plan.results import Comparison
from gulliver.planner.model import autocast_calls, check_precision, unwrapped
from gulliver.precision.fp8.conversion import revert_fp8
from gulliver.precision.int8.layers import QuantizedLayer

if TYPE_CHECKING:
    from gulliver.jobs.display import Scalars

# Description of each tensor of a model, by name.
Signature = dict[str, str]


def check_alike(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Rejects models that differ between ranks (collective)."""
    mine = _signature(model, optimizer)
    # Digests first: signatures are long, and nearly always the same on all ranks.
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather_objects(digest))) > 1:
        raise GulliverError(_difference(gather_objects(mine)))


def _signature(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Signature:
    groups = optimizer.param_groups if optimizer is not None else []
    home = {p: f", in the optimizer's group {n}" for n, g in enumerate(groups) for p in g["params"]}
    found = {"the optimizer": f"a {type(optimizer).__name__}" if optimizer is not None else "none"}
    for name, p in model.named_parameters(remove_duplicate=False):
        trained = home.get(p, "") if p.requires_grad else ", frozen"
        found[f"parameter {name!r}"] = f"{tuple(p.shape)} {p.dtype}{trained}"
    for name, b in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name!r}"] = f"{tuple(b.shape)} {b.dtype}"
    return found


def _difference(every: Sequence[Signature]) -> str:
    found = first_difference(every)
    if found is None:
        return (
            "ranks have built models whose tensors come in different orders: build the same model "
            "on every rank"
        )
    rank, name, first, other = found
    return (
        f"ranks have built different models: {name} is {first or 'not there'} on rank 0 and "
        f"{other or 'not there'} on rank {rank}: build the same on every rank"
    )


# `Booster` runs an ordinary model and training loop as planned.
#
# Read `Booster.boost`. `apply_plan` runs the plan; `CheckpointIO` saves and loads.


class Booster(CheckpointIO):
    """Boosts models according to a plugin's plan.

    Args:
        plugin: strategy that creates the plan; None for torch's DDP.
        mixed_precision: ``bf16`` runs the model under autocast; parameters and reductions keep
            their dtype. None leaves the model unchanged.
        plan: plan to run instead of a plugin's: ``Plan.load("plan.yaml")``.
        verbose: print the plan when the model is boosted; plugins have this option too.
        gradient_noise: measure the gradient noise scale for `noise_scale`; costs a pass over the
            gradients of each backward and an all-reduce of one number per step.

    Raises:
        GulliverError: the precision is not supported; both a plugin and a plan are given;
            `gradient_noise` is used with a plugin whose ranks have no full local gradients.

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
        gradient_noise: bool = False,
    ) -> None:
        check_precision(mixed_precision)
        if plugin is not None and not isinstance(plugin, Plugin):
            raise GulliverError(
                f"plugin is {plugin!r}: pass LowLevelZeroPlugin(...) or TorchDDPPlugin(...)"
            )
        if plan is not None and (plugin is not None or not isinstance(plan, Plan)):
            raise GulliverError(
                "a plan is not a plugin; use Booster(plan=Plan.load(path)) without a plugin"
            )
        if plan is not None:
            plugin = PlanPlugin(plan, verbose)
        self.plugin = plugin or TorchDDPPlugin()
        if gradient_noise:
            check_noise(self.plugin, (TorchDDPPlugin, LowLevelZeroPlugin))
        self.mixed_precision, self.gradient_noise = mixed_precision, gradient_noise
        self._noise: NoiseMeter | None = None
        self._last: Running | None = None
        self._tracking = ExitStack()
        self._scalars: Scalars | None = None
        super().__init__()

    @property
    def plan(self) -> Plan:
        """The running plan, with tuned values, after a model was boosted."""
        return self._running().plan

    @property
    def moved(self) -> tuple[int, int] | None:
        """Bytes read from and written to slower tiers in the last step; None without a limit."""
        return self._running().moved

    def compare(self) -> Comparison:
        """Compares measured with predicted seconds and bytes on this rank.

        Seconds are medians over the steps so far, bytes are peaks; see
        `gulliver.plan.results.Comparison`.
        """
        return self._running().compare()

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
        """Applies the plan to a model and its optimizer.

        Every rank calls it with the same model; rank 0's values are used. Criterion, data loader
        and scheduler are returned unchanged; the scheduler keeps controlling the boosted optimizer.
        Errors are raised on all ranks, before anything is changed.

        Args:
            model: model to run; it may be boosted again with an optimizer of other parameters.
            optimizer: optimizer of its parameters; None runs the model without training it.
            criterion: returned unchanged, like the next two.
            dataloader: data loader of the run.
            lr_scheduler: scheduler of the optimizer.

        Returns:
            model, optimizer, criterion, dataloader, lr_scheduler.

        Raises:
            GulliverError: the plan does not support the optimizer; the model is not on this rank's
                device; ranks have built different models.
        """
        world = init_world()
        choices = raise_on_any_rank(lambda: self._check(model, optimizer, world))
        # Before any broadcast: collectives over different tensors would hang or mix them up.
        check_alike(unwrapped(model), optimizer)
        again = next((known for known in self._optimizers if unwrapped(known) is model), model)
        boosted, wrapped, plan = self.plugin.configure(again, optimizer, world, choices)
        self._last = Running(broadcast_object(plan), wrapped, unwrapped(model))
        # All ranks are here, so they can release the groups of deleted models together.
        release_groups()
        wrapped.watch(unwrapped(model))
        if boosted in self._optimizers:
            self._several.add(boosted)
            if self.gradient_noise:
                raise GulliverError("gradient_noise supports only models with one optimizer")
        elif plan.precision.autocast != "none":
            autocast_calls(model, world.device.type, plan.precision.autocast)
        try:
            refuse_extra_state(unwrapped(model))
        except GulliverError as error:  # it can be trained, but saving would fail late
            warnings.warn(str(error), stacklevel=2)
        self._optimizers[boosted] = wrapped
        if self.gradient_noise and optimizer is not None:
            self._noise = NoiseMeter(wrapped, world)
        if world.is_main and self.plugin.verbose:
            self._last.planned.show()
        return boosted, None if optimizer is None else wrapped, criterion, dataloader, lr_scheduler

    def _check(self, model: nn.Module, optimizer: Any, world: World) -> Plan:
        """Returns the plugin's choices; rejects unsupported models before anything is changed."""
        if isinstance(optimizer, BoostedOptimizer):
            raise GulliverError("the optimizer is already boosted; boost each model once")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise GulliverError(
                f"the optimizer is {optimizer!r}: pass a torch.optim.Optimizer, or None to run the "
                "model without training it"
            )
        if optimizer is not None:
            for path, module in model.named_modules():
                if isinstance(module, QuantizedLayer):
                    raise GulliverError(
                        f"{path or 'the model'} has {module.mode} weights, which cannot be "
                        "trained: boost the model before replace_module, or boost it without "
                        "an optimizer to run it"
                    )
        for name, parameter in model.named_parameters():
            if parameter.device.type not in (world.device.type, *self.plugin.takes):
                raise GulliverError(
                    f"parameter {name!r} is on {parameter.device}, but this rank runs on "
                    f"{world.device}; move the model there before you create its optimizer"
                )
        return self.plugin.check(unwrapped(model), optimizer, self.mixed_precision or "none")

    def track(
        self,
        *names: str,
        folder: str | Path = "runs",
        config: Mapping[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        """Opens experiment trackers for `log`; `close` closes them.

        Args:
            names: ``tensorboard``, ``wandb`` or ``mlflow``.
            folder: folder of the run; a run that a tracker already has for this folder is
                continued.
            config: hyperparameters to record.
            step: last completed step of a resumed run.

        Raises:
            GulliverError: a tracker is unknown, or its package is not installed.
        """
        from gulliver.jobs.trackers import track  # and with it rich, which no training loop needs

        opened = track(names, Path(folder), step, init_world().is_main, config or {})
        self._scalars = self._tracking.enter_context(opened)

    def log(self, figures: Mapping[str, float | Tensor], step: int) -> None:
        """Writes rank 0's metrics of a step to the trackers opened by `track`.

        Example:
            booster.log({"loss": loss}, step)
        """
        if self._scalars is None:
            raise GulliverError("no tracker is open: call booster.track('tensorboard') first")
        if init_world().is_main:
            for name, value in figures.items():
                self._scalars(name, float(value), step)

    def close(self) -> None:
        """Waits for checkpoints, frees the buffers used for saving, and closes trackers."""
        try:
            super().close()
        finally:
            self._tracking.close()
            self._scalars = None

    def noise_scale(self, batch: int) -> NoiseScale | None:
        """Estimates the gradient noise scale from the steps so far; None before the first step.

        McCandlish et al. 2018, "An empirical model of large-batch training". A batch of `scale`
        samples makes half the progress that these samples would make one at a time. All ranks get
        the same numbers. Micro-batches should have equal sizes; if these differ by one sample, as
        for 16 samples on 3 ranks, the estimate is off by less than 1%.

        Args:
            batch: samples of a step since the last call, over all ranks and micro-batches.

        Raises:
            GulliverError: the booster does not measure the noise scale.
        """
        if not self.gradient_noise:
            raise GulliverError(
                "gradient noise is not being measured; use Booster(gradient_noise=True)"
            )
        return None if self._noise is None else self._noise.scale(batch)

    def backward(self, loss: Tensor, optimizer: BoostedOptimizer) -> None:
        """Runs the backward of this rank's loss; gradients are averaged over the ranks.

        Losses that share a graph must be added up and passed in one call.

        Args:
            loss: loss of this rank.
            optimizer: optimizer that `boost` returned.
        """
        with guard():
            boosted_only(optimizer).backward(loss)

    def release(self, model: nn.Module, *optimizers: BoostedOptimizer) -> nn.Module:
        """Undoes `boost`: the model has ordinary full parameters again.

        Must be called on all ranks. The parameters are new tensors; the optimizers can still be
        saved but no longer step. 16-bit parameters stay 16-bit.

        Args:
            model: model that `boost` returned.
            optimizers: the optimizers it was boosted with, if there are several.

        Returns:
            The user's module, which may be boosted again.
        """
        plain, holder = unwrapped(model), self._optimizers.pop(model, None)
        for optimizer in dict.fromkeys([*optimizers, *([] if holder is None else [holder])]):
            boosted_only(optimizer).release(plain)
        self._several.discard(model)
        revert_fp8(plain)
        return plain

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
        """Runs forward and backward of the next batch through the stages of a pipeline.

        Without a pipeline it calls the model, so the same loop works for both. Gradients are
        complete when it returns; `optimizer.step` is next. Every rank calls it; ranks of one model
        pass the same batch.

        Args:
            data_iter: iterator over batches: dicts of the model's keyword arguments, or tuples.
            model: model that `boost` returned.
            criterion: computes the loss from a micro-batch's outputs and the micro-batch; the
                batch's loss is their mean, weighted by samples or by `weight`. None uses the
                outputs' own ``loss``, in which all tokens have equal weight.
            optimizer: optimizer that `boost` returned; with None, or a model in evaluation mode,
                only forward runs.
            return_loss: whether to return the loss.
            return_outputs: whether to return the outputs, on the last stage.
            weight: the items that a criterion averages over, if their number differs between
                micro-batches: ``samples``, ``labels`` that are not -100, ``shifted_labels``
                (without the first of each sample), or a function that counts a micro-batch's items.

        Returns:
            Dict with the batch's ``loss`` (on every stage) and ``outputs``, None if not requested.

        Raises:
            GulliverError: the batch cannot be split; ranks of one model have different batches.
            StopIteration: there are no more batches.
        """
        if model not in self._optimizers:
            raise GulliverError("execute_pipeline only supports models that this booster boosted")
        if optimizer is not None:
            boosted_only(optimizer)
        holder, backward = self._optimizers[model], optimizer is not None and model.training
        if optimizer is not None and optimizer is not holder:
            raise GulliverError(
                "the optimizer belongs to another model: pass the one that boost returned with "
                "this model"
            )
        batch = next(data_iter)
        with guard():
            if holder.pipeline is not None:
                return holder.run(batch, criterion, backward, return_loss, return_outputs, weight)
            return run_whole(batch, model, criterion, holder if backward else None, return_outputs)

    @contextmanager
    def full_parameters(self, model: nn.Module) -> Iterator[None]:
        """Gives access to a model's full parameters inside a ``with`` block.

        Stage 3 of ZeRO keeps only shards between uses. Writes in the block must be the same on all
        ranks, and are copied to the shards on exit. All ranks must enter and exit it. Under a
        memory limit, parameters are loaded one at a time as they are read; writing through a view
        after the next load raises. In a hybrid run the parameters are this rank's slices.

        Args:
            model: model that `boost` returned.

        Example:
            with booster.full_parameters(model):
                norm = sum(p.square().sum() for p in model.parameters())
        """
        if model not in self._optimizers:
            raise GulliverError("full_parameters only supports models that this booster boosted")
        with guard(), self._optimizers[model].full_parameters():
            yield

    def no_sync(
        self, model: nn.Module, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[Any]:
        """Accumulates gradients locally; the next backward outside the block reduces them.

        Stage 2 of ZeRO keeps no full gradients: it still reduces them, and accumulates shards.

        Args:
            model: model that `boost` returned.
            optimizer: optimizer that `boost` returned with it; by default the model's optimizer.
        """
        if optimizer is None:
            if model not in self._optimizers:
                raise GulliverError("no_sync only supports models that this booster boosted")
            optimizer = self._optimizers[model]
        return boosted_only(optimizer).no_sync()
