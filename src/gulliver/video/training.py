"""Training of text-to-video models: plugin, loss over pipeline stages, and training loop."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.hybrid.mesh import size_axes
from gulliver.booster.hybrid.optimizer import HybridOptimizer
from gulliver.booster.hybrid_plugin import HybridParallelPlugin
from gulliver.booster.plugins import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from gulliver.checkpoint.loading import load
from gulliver.checkpoint.manifest import Mismatch
from gulliver.comm.collectives import all_reduce, gather_objects
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.comm.world import World
from gulliver.data.table import ClipTable
from gulliver.data_centric.plugin import DataCentricPlugin
from gulliver.errors import GulliverError
from gulliver.jobs.display import console
from gulliver.jobs.loop import LoopOptions, Outcome, TrainingLoop
from gulliver.jobs.stop import StopRequest
from gulliver.models.autoencoders import Autoencoder
from gulliver.options import resolved
from gulliver.parallel.optimizer import BoostedOptimizer
from gulliver.video.batches import BatchMaker, SkippedClips, VideoBatch, common_samples, listing
from gulliver.video.config import TrainConfig
from gulliver.video.flows import RectifiedFlow
from gulliver.video.generation import ranks_alike, share_coding
from gulliver.video.monitoring import RunSamples, Validation
from gulliver.video.run import ExponentialAverage, Run, make_optimizer
from gulliver.video.sources import build_model, flow_of, make_flow, make_sampler, ready_texts

CHUNK_MB = 1.0


def check_ranks(config: TrainConfig, ranks: int) -> None:
    size_axes(ranks, config.pp_size, config.sp_size, config.tp_size)


def make_plugin(config: TrainConfig) -> Plugin:
    # Steps of different shapes take different times, which tuning would attribute to its own
    # changes.
    if config.data_centric:
        mode = config.sequence_parallelism_mode or "all_to_all"
        inside: dict[str, Any] = {"tp_size": config.tp_size, "pp_size": config.pp_size}
        return DataCentricPlugin(config.stage, mode, chunk_mb=CHUNK_MB, **inside)
    if config.ranks_of_a_model > 1:
        mode = config.sequence_parallelism_mode or "all_to_all"
        return HybridParallelPlugin(
            tp_size=config.tp_size,
            sp_size=config.sp_size,
            pp_size=config.pp_size,
            num_microbatches=config.micro_batches if config.pp_size > 1 else None,
            sequence_parallelism_mode=mode if config.sp_size > 1 else None,
            zero_stage=config.stage,
            chunk_mb=CHUNK_MB,
        )
    if config.plugin == "zero":
        return LowLevelZeroPlugin(stage=config.stage, chunk_mb=CHUNK_MB)
    return TorchDDPPlugin()


# Forward and backward of a share of clips through a pipeline.


TARGET, COUNTS = "target", "counts"
"""Inputs for the loss only."""


def hide_targets(model: nn.Module) -> None:
    """Removes the loss inputs of a micro-batch before the model's forward."""

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {n: v for n, v in kwargs.items() if n not in (TARGET, COUNTS)}

    # Before the hooks of sequence parallelism, which reject unknown inputs.
    model.register_forward_pre_hook(hide, with_kwargs=True, prepend=True)


def run_stages(
    booster: Booster,
    model: nn.Module,
    optimizer: BoostedOptimizer | None,
    flow: RectifiedFlow,
    batch: VideoBatch,
    micro_batches: int,
    scale: float,
) -> Tensor:
    """Runs this rank's share through the pipeline; called on every rank of the model."""
    held = len(batch.latents)
    # Each micro-batch needs a sample: if there are too few, some are repeated with weight zero.
    number = torch.arange(max(held, micro_batches), device=batch.latents.device)
    given = stage_inputs(flow, batch, number % held)
    given[COUNTS] = (number < held).to(batch.latents.dtype) * batch.weight
    # The pipeline averages over all rows.
    criterion = partial(stage_loss, flow, len(number) * scale)
    done = booster.execute_pipeline(iter([given]), model, criterion, optimizer)
    return done["loss"].double() / scale


def stage_inputs(flow: RectifiedFlow, batch: VideoBatch, rows: Tensor) -> dict[str, Any]:
    shown = flow.point(batch.latents, batch.noise, batch.timesteps, batch.generate)
    return {
        "x": shown[rows],
        "timestep": batch.timesteps[rows],
        **batch.model_inputs(rows),
        TARGET: (batch.latents - batch.noise)[rows],
    }


def stage_loss(
    flow: RectifiedFlow, factor: float, output: Tensor, micro: dict[str, Tensor]
) -> Tensor:
    errors = flow.error(output, micro[TARGET], micro["x_mask"])
    return (errors * micro.get(COUNTS, 1.0)).mean() * factor


# The training loop of the text-to-video model.
#
# Start with `TrainingLoop` in `gulliver.jobs`, then `Trainer.forward_backward`. Trainers are
# created in `planned_training.py`, batches in `batches.py`; sharding and communication are in
# `gulliver.booster`.


class Trainer(TrainingLoop):
    """Training loop of a text-to-video model, with its optimizer and data."""

    run: Run

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        dataset: Any,
        autoencoder: Autoencoder,
        world: World,
        held_out: Any = None,
        samples: RunSamples | None = None,
    ) -> None:
        self.config, self.run, self.world, self.samples = config, run, world, samples
        begin = run.checkpoints.latest() is None
        model = build_model(config, autoencoder, run, begin).to(world.device).train()
        self.flow = flow_of(model, make_flow(config.flow, autoencoder))
        plugin = make_plugin(config)
        self.place, replicas = self._place(plugin)
        self.sampler = self._sampler(dataset, model, autoencoder)
        self.skipped = SkippedClips(
            self.sampler.samples, len(self.sampler), config.data.unreadable_limit
        )
        self.maker = BatchMaker(
            dataset,
            self.sampler,
            autoencoder if dataset.encoded else autoencoder.to(world.device).eval(),
            ready_texts(config, run, model, (dataset, held_out), world),
            self.flow,
            config.flow,
            config.seed,
            world.device,
            self._agree if config.ranks_of_a_model > 1 or config.data_centric else None,
            frozenset(inspect.signature(model.forward).parameters) & {"num_frames", "ar"},
        )
        shares = config.ranks_of_a_model > 1 and not config.data_centric
        if shares and not self.maker.encoded:
            share_coding(
                autoencoder, ranks_alike(self.place), config.autoencoder.share, console().print
            )
        self.validation: Validation | None = None
        if held_out is not None and config.validation.every:
            of = config.validation, self.place, config.data.batch_size
            self.validation = Validation(held_out, self.maker, *of)
        precision = None if config.dtype == "fp32" else config.dtype
        booster = Booster(plugin=plugin, mixed_precision=precision)
        optimizer, scheduler = make_optimizer(config, model)
        self.plain_model = model
        boosted, optimizer, _, _, scheduler = booster.boost(
            model, optimizer, lr_scheduler=scheduler
        )
        options = LoopOptions(
            title=f"training {config.model.size}",
            steps=config.steps,
            save_every=config.save_every,
            seed=config.seed,
            log_every=config.log_every,
            clip=config.optimizer.clip,
            use_async=config.async_save,
            rate_option="--optimizer.learning-rate",
            report_to=config.report_to,
        )
        whole = (boosted, optimizer, scheduler)
        super().__init__(run, world, options, booster, whole, self.place, replicas)
        self.position = self.sampler.state_dict()
        if config.pp_size > 1:
            hide_targets(model)
        self._prepare()
        # After boost, which may have sharded the model.
        self.average = ExponentialAverage(model, config.optimizer.ema)

    def _place(self, plugin: Plugin) -> tuple[tuple[int, int], int]:
        """Returns the data-parallel rank and size, and the number of ranks that share a sample."""
        return plugin.data_place(), self.config.ranks_of_a_model

    def _sampler(self, dataset: Any, model: nn.Module, autoencoder: Autoencoder) -> Any:
        """Creates the order of the samples, before the model is boosted."""
        return make_sampler(self.config, dataset, self.place)

    def _prepare(self) -> None:
        """Hook that runs after the model is boosted."""

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yields batches and the data positions after them, until too many clips are unreadable."""
        for batch in self.maker.batches():
            yield batch, batch.sampler_state
            if self.skipped.problem is not None:
                self._refuse_lost_data(self.skipped.problem)

    def run_to_end(self, stop: StopRequest) -> Outcome:
        """Trains until the last step or a signal; always saves the last state."""
        if self.is_over and self.samples is None:
            return Outcome(self.step_number, True, self.seconds)
        over = self.train(stop)
        self._list_unreadable()
        return Outcome(self.step_number, over, self.seconds)

    def _agree(self, kept: list[int]) -> list[int]:
        """Returns the samples that all ranks with the same share could read (collective)."""
        if not isinstance(self.maker.dataset, ClipTable):
            return kept
        return common_samples(self.place, kept)

    def _list_unreadable(self) -> None:
        """Lists clips that are unreadable or differ from the table (collective)."""
        dataset = self.maker.dataset
        if not isinstance(dataset, ClipTable):
            return
        found = gather_objects((dataset.broken, dataset.misdescribed))
        broken, misdescribed = (
            {one for part in parts for one in part} for parts in zip(*found, strict=True)
        )
        if broken and self.world.is_main:
            console().print(listing(broken))
        if misdescribed and self.world.is_main:
            console().print(listing(misdescribed, "used despite a mismatch with the table"))

    def _refuse_lost_data(self, problem: str) -> None:
        """Stops a run with too many lost clips, after saving its state (collective)."""
        self.save()
        kept = self.kept()
        self.booster.close()  # the folder is free for another run in this process
        self._list_unreadable()
        raise GulliverError(
            f"{problem}; training stopped at step {self.step_number}, {kept}; restore the clips "
            "and continue with --resume, or raise --data.unreadable-limit"
        )

    def forward_backward(self, batch: VideoBatch) -> Mapping[str, Tensor | float] | None:
        """Runs backward for this rank's share; returns None if no rank could read a sample."""
        # Ranks that hold one model together have the same share and random numbers.
        count = self._count(batch)
        return {"loss": self._backward(batch, count) / count} if count else None

    def after_update(self) -> Mapping[str, float]:
        self.average.update(self.plain_model)
        return {}

    def _count(self, batch: VideoBatch) -> int:
        if not isinstance(self.maker.dataset, ClipTable):
            return batch.total
        read = int(len(batch.latents) * batch.weight)
        counts = torch.tensor([read, batch.skipped], device=self.world.device)
        all_reduce(counts)
        read, skipped = (int(count) // self.replicas for count in counts)
        self.skipped.count(batch.epoch, read, skipped)
        return read

    def _backward(self, batch: VideoBatch, count: int) -> Tensor:
        """Runs backward for this rank's share of `count`; returns the sum of its losses."""
        if self.config.pp_size > 1:
            assert isinstance(self.flow, RectifiedFlow), "checked"
            run, scale = self.config.micro_batches, self.place[1] / count
            return run_stages(
                self.booster, self.model, self.optimizer, self.flow, batch, run, scale
            )
        held = len(batch.latents)
        size = math.ceil(held / self.config.accumulate)
        parts = [slice(start, start + size) for start in range(0, held, size)]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            context = nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)
            with context:
                share = self._losses(batch, part).sum() * batch.weight
                # Gradients are averaged over shares, losses over samples; the factor converts
                # between them.
                self.booster.backward(share * (self.place[1] / count), self.optimizer)
            loss_sum += share.detach()
        return loss_sum

    def _losses(self, batch: VideoBatch, part: slice) -> Tensor:
        return self.flow.loss(
            self.model,
            batch.latents[part],
            batch.model_inputs(part),
            noise=batch.noise[part],
            timesteps=batch.timesteps[part],
            mask=None if batch.generate is None else batch.generate[part],
        )

    @torch.no_grad()
    def _loss_sum(self, batch: VideoBatch) -> Tensor:
        if self.config.pp_size > 1:
            assert isinstance(self.flow, RectifiedFlow), "checked"
            how = self.flow, batch, self.config.micro_batches, 1.0
            return run_stages(self.booster, self.model, None, *how)
        return self._losses(batch, slice(None)).sum() * batch.weight

    def begin(self) -> bool:
        """Generates missing samples for the last checkpoint of an interrupted run."""
        return self.step_number > 0 and not self._show_samples()

    def evaluate(self) -> None:
        validation, step = self.validation, self.step_number
        if validation is not None and (self.is_over or step % self.config.validation.every == 0):
            found = validation.losses(self._loss_sum, self.replicas)
            if self.world.is_main and found:
                validation.report(found, step, self.run, self.display, self.scalars)

    def after_saving(self, stopping: bool) -> bool:
        return not stopping and not self._show_samples()

    def _show_samples(self) -> bool:
        """Creates samples when due; False if stopped by a signal (collective)."""
        samples, step = self.samples, self.step_number
        if samples is None or not samples.due(step, self.is_over):
            return True
        self.save()
        self.booster.wait()
        return samples.make(step, lambda: self.stop.wanted, self.display, self.scalars)

    def describe(self, line: dict[str, Any], batch: Any, seconds: float) -> dict[str, str]:
        size = self.sampler.samples / len(self.sampler)
        rate = self.step_number / max(self.seconds, 1e-9) * size
        return {"grad_norm": f"{line['grad_norm']:.3f}", "samples_per_s": f"{rate:.0f}"}

    def state(self) -> dict[str, Any]:
        rows = self.maker.dataset
        run = {
            "ema_updates": self.average.updates,
            "rows": rows.fingerprint if isinstance(rows, ClipTable) else None,
            "config": resolved(self.config),
        }
        return {"ema": self.average.leaves(*self._shares), "run": run}

    @property
    def _shares(self) -> tuple[RankGroup, Callable[[str, Tensor], bool] | None]:
        """Ranks with equal shards of the model, and a predicate for shards that this rank saves."""
        boosted = self.optimizer
        if not isinstance(boosted, HybridOptimizer):
            return ALONE, None
        return boosted.mesh.replicas, boosted.checkpoint.writes if self.config.pp_size > 1 else None

    def load_state(self, run: dict[str, Any], folder: Path) -> None:
        # A stage has only some of the names, and all of those must exist.
        ema = load(folder, {"ema": self.average.leaves()}, strict=self.config.pp_size == 1)
        if ema.mismatches.get("ema", Mismatch()).missing:
            raise GulliverError(f"{folder} holds the averaged weights of another model: {ema}")
        rows = self.maker.dataset
        if isinstance(rows, ClipTable):
            rows.check_rows(run["rows"])
        self.average.updates = run["ema_updates"]
        self.sampler.load_state_dict(run["position"])
