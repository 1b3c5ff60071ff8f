"""The training loop of autoencoders, and the discriminator.

The discriminator is small, so every rank holds a replica and its optimizer, and gradients are
all-reduced. It is stepped after the autoencoder, on the same decoded clips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gulliver.booster.booster import Booster
from gulliver.booster.plugins import LowLevelZeroPlugin
from gulliver.checkpoint.loading import load
from gulliver.comm.collectives import all_reduce, gather_objects
from gulliver.comm.torus import make_axes
from gulliver.comm.world import World
from gulliver.data.clips import ClipBatch, collate
from gulliver.data.sampler import BucketSampler, Step
from gulliver.errors import GulliverError
from gulliver.jobs.display import console
from gulliver.jobs.log import derive
from gulliver.jobs.loop import LoopOptions, TrainingLoop
from gulliver.models.autoencoder import AUTOENCODER_SIZES, VideoAutoencoder
from gulliver.options import resolved
from gulliver.parallel.convolution.share import SharedNetworks, share_autoencoder
from gulliver.parallel.convolution.stream import stream_trained
from gulliver.video.autoencoder_config import MAY_CHANGE_OF_AUTOENCODER, TrainAutoencoderConfig
from gulliver.video.autoencoders.clips import Sources
from gulliver.video.autoencoders.losses import (
    AutoencoderLoss,
    Features,
    PatchDiscriminator,
    Posterior,
    Quality,
    Terms,
    adaptive_weight,
    check_perceptual,
    discriminator_loss,
    generator_loss,
    load_perceptual,
    measure,
)
from gulliver.video.batches import SkippedClips, common_samples, listing, read_ahead
from gulliver.video.media import SheetRow, still_sheet
from gulliver.video.run import ExponentialAverage, Run


class Adversary:
    """A discriminator that is trained together with an autoencoder."""

    def __init__(self, config: TrainAutoencoderConfig, last_layer: Tensor, world: World) -> None:
        self.config, self.last_layer, self.world = config.loss, last_layer, world
        self.replicas = config.share_ranks
        torch.manual_seed(derive(config.seed, 9))
        network = PatchDiscriminator(config.loss.discriminator_width)
        self.network = network.to(last_layer.device, last_layer.dtype)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=config.loss.discriminator_rate,
            betas=(0.5, 0.9),
            weight_decay=0.0,
        )

    def state(self) -> dict[str, Any]:
        return {"discriminator": self.network, "discriminator_optimizer": self.optimizer}

    def term(self, terms: Terms | None, decoded: Tensor | None, share: float) -> Tensor:
        """Computes the weighted adversarial term of this rank's clips; a collective call."""
        if terms is None or decoded is None:
            if self.config.adaptive:
                self._gradients(None, None, 0.0)
            return torch.zeros((), device=self.last_layer.device, dtype=self.last_layer.dtype)
        made = generator_loss(self.network.frozen(decoded))
        terms.figures["generator"] = made.detach()
        weight = torch.ones_like(made)
        if self.config.adaptive:
            weight = adaptive_weight(*self._gradients(terms.reconstruction, made, share))
            terms.figures["adaptive_weight"] = weight
        return self.config.adversarial * weight * made

    def _gradients(
        self, reconstruction: Tensor | None, made: Tensor | None, share: float
    ) -> Tensor:
        """Returns the last layer's gradients of both terms, summed over ranks: [2, ...]."""
        found = self.last_layer.new_zeros(2, *self.last_layer.shape)
        for row, term in enumerate((reconstruction, made)):
            if term is not None:
                (gradient,) = torch.autograd.grad(term, self.last_layer, retain_graph=True)
                found[row] = gradient * share
        all_reduce(found)
        return found

    def step(self, videos: Tensor | None, decoded: Tensor | None, share: float) -> Tensor:
        """Trains the discriminator on this rank's clips; a collective call."""
        self.optimizer.zero_grad()
        loss = self.last_layer.new_zeros(())
        if videos is not None and decoded is not None:
            loss = discriminator_loss(self.network(videos), self.network(decoded.detach()))
            (loss * (share / self.replicas)).backward()
        for parameter in self.network.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.world.size > 1:
                all_reduce(parameter.grad)
        self.optimizer.step()
        return loss.detach()


# Training forward: whole, in segments, or shared between ranks.
#
# All three give the same values and, after backward, the same gradients: if ranks share the
# networks each has its part of the gradients, which the optimizer sums along with those of other
# clips.


@dataclass(frozen=True)
class Passes:
    """Encodes and decodes clips whole, in segments, or shared between ranks."""

    model: VideoAutoencoder
    # Latent frames per segment; 0 runs whole clips.
    segment: int = 0
    shared: SharedNetworks | None = None

    def encode(self, videos: Tensor) -> Posterior:
        moments = self._run(self.model.moments, videos, self.model.compression[0])
        return Posterior.of(moments, self.model.latent_channels)

    def decode(self, latents: Tensor) -> Tensor:
        return self._run(self.model.decode_raw, latents, 1)

    def _run(self, network: Callable[[Tensor], Tensor], x: Tensor, unit: int) -> Tensor:
        frames = x.shape[2]
        size = self.segment * unit
        if not size or frames <= size:
            return network(x)
        # The first latent frame corresponds to a single frame.
        first = size - (unit - 1)
        sizes = [first] + [min(size, frames - at) for at in range(first, frames, size)]
        return stream_trained(network, x.split(sizes, dim=2))

    def off(self) -> None:
        if self.shared is not None:
            self.shared.off()


def make_passes(
    model: VideoAutoencoder, segment_frames: int, share_ranks: int, dim: str, ranks: int
) -> Passes:
    """Creates the `Passes` of a run; a collective call."""
    if share_ranks == 1:
        return Passes(model, segment_frames // model.compression[0])
    axes = make_axes({"data": ranks // share_ranks, "share": share_ranks})
    group = axes.rank_group("share")
    return Passes(model, 0, share_autoencoder(model, group, dim))


# A picture of held-out clips: original frames, with their reconstructions below.


CLIPS = 3
LEAST_SIDE = 96
"""Minimum side in pixels; smaller frames are enlarged by pixel repetition."""


@torch.no_grad()
def reconstruction_picture(
    path: Path | None, model: VideoAutoencoder, dataset: Any, device: torch.device
) -> None:
    """Draws the first and last frame of a few clips above their reconstructions, as a PNG.

    Called on all ranks that share the autoencoder; `path` is None on ranks that do not write.
    """
    bucket = max(
        {dataset.bucket_of(index) for index in range(len(dataset))},
        key=lambda b: (b.frames > 1, b.height * b.width),
    )
    members = [i for i in range(len(dataset)) if dataset.bucket_of(i) == bucket]
    count = min(CLIPS, len(members))
    chosen = [members[number * len(members) // count] for number in range(count)]
    videos = collate(dataset, chosen).videos
    if videos is None:
        return
    videos = videos.to(device, next(model.parameters()).dtype)
    decoded = model.decode(model.encode(videos))
    if path is None:
        return
    shown = dict.fromkeys((0, bucket.frames - 1))
    rows = [
        SheetRow(title, [clip[:, n : n + 1] for clip in clips for n in shown], [])
        for title, clips in (("held-out frames", videos), ("reconstructions", decoded))
    ]
    still_sheet(path, rows, -(-LEAST_SIDE // bucket.height))


# The training loop of video autoencoders, used by `gulliver train` and `train-autoencoder`.
#
# Start with `TrainingLoop` in `gulliver.jobs`, then `AutoencoderTrainer.forward_backward`.
#
# All randomness depends only on (seed, epoch, batch), not on the rank, so a resumed run needs no
# saved generator.


STATISTICS_BATCHES = 24


def build_autoencoder(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    torch.manual_seed(config.seed)
    model = config.model
    return VideoAutoencoder(
        model.latent_channels, **AUTOENCODER_SIZES[model.size], posterior=model.posterior
    )


class AutoencoderTrainer(TrainingLoop):
    """Training loop of an autoencoder, with its optimizers and clips."""

    def __init__(
        self,
        config: TrainAutoencoderConfig,
        model: VideoAutoencoder,
        sources: Sources,
        world: World,
    ) -> None:
        self.config, self.autoencoder, self.sources, self.world = config, model, sources, world
        replicas = config.share_ranks
        if world.size % replicas:
            raise GulliverError(
                f"--share-ranks {replicas} does not divide the {world.size} ranks; use a divisor "
                f"of {world.size}"
            )
        place = world.rank // replicas, world.size // replicas
        self.dtype = next(model.parameters()).dtype
        self.sampler = self._sampler(*place)
        self.skipped = SkippedClips(
            self.sampler.samples, len(self.sampler), config.data.unreadable_limit
        )
        self.loss = AutoencoderLoss(config.loss, self._perceptual()).to(world.device, self.dtype)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=1, chunk_mb=1.0, verbose=False))
        run = Run(config.out, config.keep, MAY_CHANGE_OF_AUTOENCODER)
        options = LoopOptions(
            title=f"training autoencoder {config.model.size}",
            steps=config.steps,
            save_every=config.save_every,
            seed=config.seed,
            log_every=config.log_every,
            clip=config.clip,
            use_async=config.async_save,
            report_to=config.report_to,
        )
        super().__init__(run, world, options, booster, self._boosted(booster), place, replicas)
        self.position = self.sampler.state_dict()
        self.average = ExponentialAverage(model, config.ema) if config.ema else None
        self.adversary = None
        if config.loss.adversarial:
            self.adversary = Adversary(config, model.last_layer, world)
        self._decoded: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0)
        self.passes = make_passes(
            model, config.segment_frames, replicas, config.share_dim, world.size
        )

    def _boosted(self, booster: Booster) -> tuple[Any, Any, Any]:
        config = self.config
        trained = nn.ModuleDict({"autoencoder": self.autoencoder, "loss": self.loss})
        optimizer = torch.optim.AdamW(
            trained.parameters(), lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, config.learning_rate, total_steps=config.steps + 1, pct_start=0.1
        )
        model, boosted, *_ = booster.boost(trained, optimizer)
        return model, boosted, scheduler

    def restore(self, folder: Path) -> None:
        # The saved cycle belongs to the earlier run length; an extended run has another one.
        cycle = ("total_steps", "_schedule_phases")
        present = {name: getattr(self.scheduler, name) for name in cycle}
        super().restore(folder)
        vars(self.scheduler).update(present)

    def _sampler(self, rank: int, size: int) -> BucketSampler:
        clips = self.sources.training
        buckets = [clips.bucket_of(index) for index in range(len(clips))]
        return BucketSampler(buckets, self.config.data.batch_size, rank, size, self.config.seed)

    def _perceptual(self) -> Features | None:
        place, clips = self.config.loss.perceptual, self.sources.training
        if not place:
            return None
        network = load_perceptual(place, self.world.device)
        buckets = {clips.bucket_of(index) for index in range(len(clips))} - {None}
        check_perceptual(network, buckets, self.world.device, self.dtype)
        return network

    def batches(self) -> Iterator[tuple[tuple[Step, ClipBatch], Any]]:
        """Yields each step with its clips, and the data position after it."""
        training, seed = self.sources.training, self.config.seed
        for step, batch, state in read_ahead(training, self.sampler, seed, self.world.device):
            yield (step, batch), state

    def _agreed(self, step: Step, batch: ClipBatch) -> tuple[Tensor | None, list[int], int]:
        """Returns this rank's clips, their rows in the step, and the total number of clips."""
        videos, kept = batch.videos, batch.kept
        if self.replicas > 1:
            common = common_samples(self.place, kept)
            rows = [row for row, position in enumerate(kept) if position in common]
            videos = videos[rows] if videos is not None and rows else None
            kept = common
        counts = torch.tensor([len(kept), len(step.indices) - len(kept)], device=self.world.device)
        all_reduce(counts)
        read, skipped = (int(count) // self.replicas for count in counts)
        self.skipped.count(step.epoch, read, skipped)
        return videos, [step.offset + position for position in kept], read

    def _refuse_lost_data(self, problem: str) -> NoReturn:
        broken = {entry for part in gather_objects(self.sources.training.broken) for entry in part}
        if self.world.is_main:
            console().print(listing(broken))
        self.booster.wait()  # a checkpoint may be in flight
        raise GulliverError(
            f"{problem}; the autoencoder's training stopped at step {self.step_number}"
        )

    def forward_backward(self, batch: tuple[Step, ClipBatch]) -> Mapping[str, float] | None:
        """Runs backward for this rank's clips; returns None if no rank could read a clip."""
        step = batch[0]
        videos, rows, count = self._agreed(*batch)
        if self.skipped.problem is not None:
            self._refuse_lost_data(self.skipped.problem)
        if not count:
            return None
        share = len(rows) / count
        terms, decoded = None, None
        if videos is None:
            # Zero gradients without clips: the other ranks wait for this one in the reduction.
            nothing = (p.sum() * 0 for p in self.model.parameters())
            loss = sum(nothing, torch.zeros((), device=self.world.device))
        else:
            videos = videos.to(self.world.device, self.dtype)
            terms, decoded = self._forward(step, videos, rows)
            loss = terms.reconstruction + terms.regularisation
        if self._judging is not None:
            loss = loss + self._judging.term(terms, decoded, share)
        # Gradients are averaged over ranks, the loss over clips; the factor converts between them.
        self.booster.backward(loss * (len(rows) * self.world.size / count), self.optimizer)
        self._decoded = videos, decoded, share
        own = {} if terms is None else {"loss": loss.detach(), **terms.figures}
        return {name: float(own.get(name, 0.0)) * share for name in self._names()}

    @property
    def _judging(self) -> Adversary | None:
        begun = self.step_number >= self.config.loss.adversarial_start
        return self.adversary if begun else None

    def after_update(self) -> Mapping[str, float]:
        """Updates the averaged weights, and trains the discriminator on the same clips."""
        if self.average is not None:
            self.average.update(self.autoencoder)
        videos, decoded, share = self._decoded
        self._decoded = None, None, 0.0
        # The loop has already counted the step.
        begun = self.step_number > self.config.loss.adversarial_start
        if self.adversary is None or not begun:
            return {}
        own = self.adversary.step(videos, decoded, share) * share
        all_reduce(own)
        return {"discriminator": float(own) / self.replicas}

    def _forward(self, step: Step, videos: Tensor, rows: list[int]) -> tuple[Terms, Tensor]:
        posterior = self.passes.encode(videos)
        generator = torch.Generator().manual_seed(derive(self.config.seed, step.epoch, step.number))
        noise = torch.randn(step.total, *posterior.mean.shape[1:], generator=generator)[rows]
        noise = noise.to(self.world.device, self.dtype)
        decoded = self.passes.decode(posterior.sample(noise, self.config.loss.latent_noise))
        return self.loss(videos, decoded, posterior, self.replicas), decoded

    def _names(self) -> list[str]:
        loss, adversarial = self.config.loss, self._judging is not None
        posterior = self.autoencoder.config.get("posterior", False)
        named = {
            "loss": True,
            loss.reconstruction: True,
            "perceptual": bool(loss.perceptual),
            "log_variance": loss.learnt_variance,
            "kl": posterior,
            "generator": adversarial,
            "adaptive_weight": adversarial and loss.adaptive,
        }
        return [name for name, there in named.items() if there]

    def describe(self, line: dict[str, Any], batch: Any, seconds: float) -> dict[str, str]:
        rate = self.step_number / max(self.seconds, 1e-9) * self.config.data.batch_size
        return {"grad_norm": f"{line['grad_norm']:.3f}", "samples_per_s": f"{rate:.1f}"}

    def evaluate(self) -> None:
        if self.step_number % self.config.report_every == 0 and not self.is_over:
            model = self.result()
            self.report(model, self.quality(model))

    def report(self, model: VideoAutoencoder, quality: Quality) -> None:
        """Logs metrics of held-out clips, and draws some of them; a collective call."""
        path = self.run.folder / "reconstruction.png" if self.world.is_main else None
        reconstruction_picture(path, model, self.sources.held_out, self.world.device)
        if not self.world.is_main:
            return
        figures = quality._asdict()
        seconds = round(self.seconds, 3)
        self.run.log.append({"step": self.step_number, **figures, "seconds": seconds})
        for name, value in figures.items():
            self.scalars(f"held_out/{name}", value, self.step_number)

    def result(self) -> VideoAutoencoder:
        """Returns the averaged autoencoder, or the trained one without averaging (collective)."""
        if self.average is None:
            return self.autoencoder
        found = VideoAutoencoder(**self.autoencoder.config).to(self.world.device, self.dtype)
        found.load_state_dict(self.average.shadow)
        return found

    def quality(self, model: VideoAutoencoder) -> Quality:
        """Measures PSNR and SSIM on the held-out clips; a collective call."""
        return measure(model, self.sources.held_out, self.world.device, self.place)

    def finish(self) -> tuple[VideoAutoencoder, dict[str, Any]]:
        """Measures latent statistics and quality; returns the complete autoencoder and metrics."""
        self.passes.off()
        model = self.result()
        self._measure_latents(model)
        quality = self.quality(model)
        figures = {"psnr": quality.psnr, "ssim": quality.ssim, "clips": self.sources.name}
        return model, figures | {"steps": self.config.steps}

    @torch.no_grad()
    def _measure_latents(self, model: VideoAutoencoder) -> None:
        columns = []
        for step in islice(self._sampler(0, 1), STATISTICS_BATCHES):
            videos = collate(self.sources.training, step.indices).videos
            if videos is not None:
                latents = model.encode_raw(videos.to(self.world.device, self.dtype))
                columns.append(latents.transpose(0, 1).flatten(1).double())
        if not columns:
            raise GulliverError("no clip could be read to measure the latents")
        values = torch.cat(columns, dim=1)
        model.mean.copy_(values.mean(dim=1))
        model.std.copy_(values.std(dim=1).clamp(min=1e-6))

    def state(self) -> dict[str, Any]:
        average, table = self.average, self.sources.table
        run = {
            "rows": None if table is None else table.fingerprint,
            "ema_updates": 0 if average is None else average.updates,
            "config": resolved(self.config),
        }
        ema = {} if average is None else {"ema": average.leaves()}
        return {**self.loaded_in_place(), **ema, "run": run}

    def loaded_in_place(self) -> dict[str, Any]:
        return {} if self.adversary is None else self.adversary.state()

    def load_state(self, run: dict[str, Any], folder: Path) -> None:
        if self.sources.table is not None:
            self.sources.table.check_rows(run["rows"])
        if self.average is not None:
            load(folder, {"ema": self.average.leaves()})
            self.average.updates = run["ema_updates"]
        self.sampler.load_state_dict(run["position"])
