"""Training with data-centric steps: each step is planned from its clips.

`PlannedTrainer` is a `Trainer` with planned steps as batches. Noise, levels, dropped captions and
masks of a clip depend only on (seed, epoch, clip), not on the rank; whether a step has masks at
all, on (seed, step). Planning is in `gulliver.data`, execution in `gulliver.booster`, costs and
reading in `planned_costs.py`.
"""

from __future__ import annotations

import inspect
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster.plugins import Plugin
from gulliver.checkpoint.files import write_json
from gulliver.comm.collectives import barrier
from gulliver.comm.world import guard, init_world
from gulliver.data.clips import Bucket
from gulliver.data.table import ClipTable
from gulliver.data_centric.costs import Budget, Samples, Seconds, Tokens
from gulliver.data_centric.planner import DataCentricPlanner
from gulliver.data_centric.step_loader import DataCentricLoader, LoadedBatch, TrainingStep
from gulliver.data_centric.steps import StepPlan
from gulliver.errors import GulliverError
from gulliver.hardware.samples import SampleShape
from gulliver.jobs.display import console
from gulliver.jobs.log import derive
from gulliver.jobs.loop import Outcome
from gulliver.jobs.stop import StopRequest
from gulliver.models.autoencoders import Autoencoder
from gulliver.options import resolved, size_text
from gulliver.video.batches import VideoBatch
from gulliver.video.config import TrainConfig, check_config
from gulliver.video.flows import RectifiedFlow
from gulliver.video.monitoring import make_samples
from gulliver.video.planned_costs import ClipOrder, ClipShapes, StepClips, ready_costs, stack_clips
from gulliver.video.public_models import load_autoencoder, told
from gulliver.video.run import Run
from gulliver.video.sources import (
    check_start,
    describe_start,
    make_dataset,
    make_held_out,
    ready_autoencoder,
    refuse_other_autoencoder,
    with_encoded,
)
from gulliver.video.training import Trainer, check_ranks, stage_inputs, stage_loss


class PlannedTrainer(Trainer):
    """Training loop over planned steps, with the model, its optimizer and data."""

    sampler: PlannedOrder
    loader: DataCentricLoader
    _running: TrainingStep

    def _place(self, plugin: Plugin) -> tuple[tuple[int, int], int]:
        """Returns position 0 of 1 (samples are not split), and the ranks per validation sample."""
        return (0, 1), self.world.size

    def _sampler(self, dataset: Any, model: nn.Module, autoencoder: Autoencoder) -> PlannedOrder:
        config, order = self.config, ClipOrder(dataset, derive(self.config.seed, 14))
        if not dataset.encoded:
            autoencoder = autoencoder.to(self.world.device).eval()
        self.shapes = ClipShapes.of_buckets(
            order.buckets(), model, autoencoder, not dataset.encoded
        )
        made_up = partial(_placeholder_losses, self, model, autoencoder)
        costs, lines = ready_costs(config, self.run.folder, model, self.shapes, made_up, self.world)
        planner = DataCentricPlanner(
            costs,
            self.shapes.arriving(order),
            self.world.size // (config.tp_size * config.pp_size),
            budget_of(config),
            window=config.planner.window,
            intra=config.planner.intra,
            inter=config.planner.inter,
            pac=config.planner.pac,
            degree=config.planner.degree,
            unfit=config.planner.unfit,
            seed=derive(config.seed, 6),
            stages=config.pp_size,
        )
        left_out = _unfit_clips(planner, order, self.shapes) if order.is_dealt else planner.left_out
        skipped = [f"{n:,} of {shape}" for shape, n in left_out.items()]
        if skipped:
            lines.append(f"clips that fit at no degree are skipped: {', '.join(skipped)}")
        if self.world.is_main:
            console().print("\n".join([f"data-centric: {planner.describe()}", *lines]))
        return PlannedOrder(planner, order, len(order.epoch(0)[0]) - left_out.total())

    def _prepare(self) -> None:
        self.clips = StepClips(self.maker.dataset, self.sampler.order, self.config.seed)
        self.loader = DataCentricLoader(
            self.sampler.planner,
            self.clips,
            self.model,
            self.optimizer,
            collate=stack_clips,
            weight=self.clips.weight,
            begin=self._begin,
        )
        self.ratios: list[float] = []

    def batches(self) -> Iterator[tuple[TrainingStep, Any]]:
        while True:
            for step in self.loader:
                yield step, self.position
                if self.skipped.problem is not None:
                    self._refuse_lost_data(self.skipped.problem)

    def _begin(self, plan: StepPlan) -> None:
        # A step without readable clips is skipped, as without planning.
        self.clips.begin(self.loader.optimizer.rank, plan, self.sampler.planner.upcoming())
        lost = len(self.clips.lost)
        self.skipped.count(plan.epoch, plan.samples - lost, lost)
        if lost == plan.samples and self.skipped.problem is not None:
            self._refuse_lost_data(self.skipped.problem)

    def forward_backward(self, batch: TrainingStep) -> Mapping[str, Tensor | float]:  # type: ignore[override]
        plan, self._running = batch.plan, batch
        if self.config.pp_size > 1:
            self._run_stages(batch)
        for loaded in batch if self.config.pp_size == 1 else ():
            clips = self._clips(loaded, plan.epoch, plan.step)
            # If all clips of a micro-batch are lost, its ranks run no forward.
            losses = self._losses(clips, slice(None)) if clips.weight else clips.latents
            batch.backward(losses.mean())
        return {"loss": batch.loss()}

    def after_update(self) -> Mapping[str, float]:
        step = self._running
        self.position = self.loader.state_dict()
        self.sampler.given(step.plan.samples)
        predicted = sum(seconds for _, seconds, _ in step.measured)
        if predicted:
            self.ratios.append(sum(seconds for *_, seconds in step.measured) / predicted)
        return super().after_update()

    def _run_stages(self, step: TrainingStep) -> None:
        flow, plan = self.flow, step.plan
        assert isinstance(flow, RectifiedFlow), "checked"

        def prepare(loaded: LoadedBatch) -> dict[str, Any]:
            clips = self._clips(loaded, plan.epoch, plan.step)
            return stage_inputs(flow, clips, torch.arange(len(clips.latents)))

        step.run(partial(stage_loss, flow, 1.0), prepare)

    @torch.no_grad()
    def _clips(self, loaded: LoadedBatch, epoch: int, step: int) -> VideoBatch:
        # Lost clips are left out; if all are, one of zeros has weight zero.
        maker, data, bucket = self.maker, loaded.data, self.shapes.buckets[loaded.shape]
        videos, captions, fps, rows = (data[n] for n in ("videos", "captions", "fps", "rows"))
        latents, captions, fps = maker.shown(bucket, videos, captions, fps)
        rows = [-1] if videos is None else rows
        shape, device = tuple(latents.shape[1:]), maker.device
        drawn = [self._draw(epoch, row, step, shape, bucket) for row in rows]
        masks = [mask for *_, mask in drawn]
        whole = torch.ones(shape[1], dtype=torch.bool)
        return VideoBatch(
            latents=latents,
            noise=torch.stack([noise for noise, *_ in drawn]).to(device),
            timesteps=torch.cat([level for _, level, *_ in drawn]).to(device),
            drop_caption=torch.tensor([drop for _, _, drop, _ in drawn], device=device),
            generate=None
            if all(mask is None for mask in masks)
            else torch.stack([whole if m is None else m for m in masks]).to(device),
            fps=fps,
            total=len(latents),
            skipped=len(loaded.samples) - len(data["rows"]),
            epoch=epoch,
            weight=0.0 if videos is None else 1.0,
            sampler_state={},
            **maker.conditions(bucket, captions),
        )

    def _draw(
        self, epoch: int, row: int, step: int, shape: tuple[int, ...], bucket: Bucket
    ) -> tuple[Tensor, Tensor, bool, Tensor | None]:
        """Samples noise [C, T, H, W], level [1], caption dropout and mask [T] of a clip."""
        seed = self.config.seed
        noise = torch.randn(shape, generator=_generator(seed, 1, epoch, row))
        own = _generator(seed, 12, epoch, row)
        level = self.flow.sample_timesteps(
            1, generator=own, height=bucket.height, width=bucket.width, num_frames=shape[1]
        )
        drop = float(torch.rand((), generator=own)) < self.config.flow.drop_caption
        mask = self.maker.masks.draw(1, shape[1], own, _generator(seed, 13, step))
        return noise, level, drop, None if mask is None else mask[0]

    def train(self, stop: StopRequest) -> bool:
        try:
            over = super().train(stop)
        finally:
            self.clips.close()
        if self.ratios and self.world.is_main:
            error = statistics.median(abs(ratio - 1) for ratio in self.ratios)
            console().print(
                f"rank 0 took {statistics.median(self.ratios):.2f} x the predicted seconds of its "
                f"share of a step (median of {len(self.ratios)}); error {100 * error:.0f} %"
            )
        return over


class PlannedOrder:
    """Position in planned steps; used in place of a sampler."""

    def __init__(self, planner: DataCentricPlanner, order: ClipOrder, samples: int) -> None:
        self.planner, self.order, self.samples = planner, order, samples
        self._given, self._steps = 0, 0

    def given(self, samples: int) -> None:
        self._given, self._steps = self._given + samples, self._steps + 1

    def __len__(self) -> int:
        """Estimates the steps per epoch from previous steps, or from the next one at first."""
        if self._steps:
            return max(1, round(self.samples * self._steps / self._given))
        coming = self.planner.upcoming()
        return 1 if coming is None else max(1, -(-self.samples // coming.samples))

    def state_dict(self) -> dict[str, Any]:
        return self.planner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a position; the number of ranks may differ."""
        self.planner.load_state_dict(state)


def budget_of(config: TrainConfig) -> Budget:
    if config.planner.tokens is not None:
        return Tokens(config.planner.tokens)
    if config.planner.seconds is not None:
        return Seconds(config.planner.seconds)
    return Samples(config.data.batch_size)


def _unfit_clips(
    planner: DataCentricPlanner, order: ClipOrder, shapes: ClipShapes
) -> Counter[SampleShape]:
    costs, buckets = planner.costs, order.epoch(0)[1]
    fitting = {
        shape
        for shape in shapes.buckets
        if any(len(costs.batches(shape, d, planner.pac)) for d in planner.degrees)
    }
    strange = [shape for shape in shapes.buckets if shape not in fitting]
    if strange and planner.unfit == "refuse":
        raise GulliverError(
            f"clips of {strange[0]} ({strange[0].tokens:,} tokens) and {len(strange) - 1} other "
            f"shapes of --data.buckets do not fit into {size_text(costs.memory)} per rank at any "
            f"degree up to {planner.ranks}; use more ranks or memory, or --planner.unfit skip"
        )
    unfit = Counter(shapes.of[b] for b in buckets if shapes.of[b] not in fitting)
    usable = len(buckets) - unfit.total()
    if isinstance(planner.budget, Samples) and planner.budget.count > usable:
        raise GulliverError(
            f"--data.batch-size {planner.budget.count} exceeds the {usable} clips of the first "
            f"epoch that fit; use at most {usable}"
        )
    return unfit


def _generator(*key: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive(*key))


def _placeholder_losses(
    trainer: PlannedTrainer, model: Any, autoencoder: Autoencoder, bucket: Bucket, count: int
) -> Tensor:
    """Computes losses [count] of dummy clips, at the same cost as real clips."""
    device, precision = trainer.world.device, trainer.config.dtype
    size = autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
    with torch.no_grad():
        latents = torch.zeros(count, *size, device=device)
        if any(shape.pixels for shape in trainer.shapes.buckets):
            sides = (bucket.frames, bucket.height, bucket.width)
            latents = autoencoder.encode(torch.zeros(count, 3, *sides, device=device))
    ones = torch.ones(count, device=device)
    null = model.y_embedder.y_embedding
    takes = inspect.signature(model.forward).parameters
    inputs = {
        **{name: value for name, value in told(bucket, 8, ones).items() if name in takes},
        "y": null.expand(count, 1, *null.shape),
        "mask": torch.ones(count, len(null), dtype=torch.bool, device=device),
        "drop_caption": torch.zeros(count, dtype=torch.bool, device=device),
        "x_mask": torch.ones(count, size[1], dtype=torch.bool, device=device),
    }
    noise, levels = torch.ones_like(latents), 500 * ones
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        return trainer.flow.loss(model, latents, inputs, noise=noise, timesteps=levels)


# `train`: opens or resumes a run folder, creates data and trainer, and trains to the end.


def train(config: TrainConfig) -> Outcome:
    """Trains a text-to-video model; called on every rank."""
    config = with_encoded(config)
    check_config(config)
    check_start(config)
    world = init_world()
    check_ranks(config, world.size)
    run = Run(config.out, config.keep)
    with guard():
        refuse_other_autoencoder(config, run)
        checkpoint = run.open(config, step=config.resume_step)
        words = None if config.model.public else config.model.text_length
        path = config.autoencoder.path
        given = None if path is None else load_autoencoder(path)
        dataset = make_dataset(config.data, words, world.is_main, config.seed, given)
        held_out = make_held_out(config, dataset)
        barrier()  # all ranks read before any rank writes
        if world.is_main:
            run.write(options=resolved(config))
            if checkpoint is None:
                describe_start(config, run)
        autoencoder = ready_autoencoder(config, run, dataset, world)
        samples = make_samples(config, run, world, dataset, held_out)
        kind = PlannedTrainer if config.data_centric else Trainer
        trainer = kind(config, run, dataset, autoencoder, world, held_out, samples)
        if world.is_main and isinstance(dataset, ClipTable):
            write_json(run.clips_path, {"fps": dataset.fps})
        trainer.start(checkpoint, options=resolved(config))
        with StopRequest().listening() as stop:
            return trainer.run_to_end(stop)
