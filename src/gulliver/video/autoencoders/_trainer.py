"""The training loop of video autoencoders: one for `gulliver train` and `train-autoencoder`.

Read `TrainingLoop` in `gulliver.jobs`, then `AutoencoderTrainer.forward_backward`. What it does not
know: how parameters lie in memory (`gulliver.booster`).

Everything random is a function of (seed, epoch, batch), never of the rank, so a resumed run needs
no saved generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.checkpoint import load
from gulliver.comm import World, all_reduce, gather_objects
from gulliver.data import BucketSampler, ClipBatch, Step, collate
from gulliver.errors import GulliverError
from gulliver.jobs import console, derive
from gulliver.jobs._loop import LoopOptions, TrainingLoop
from gulliver.models import AUTOENCODER_SIZES, VideoAutoencoder
from gulliver.options import resolved
from gulliver.video._autoencoder_config import MAY_CHANGE_OF_AUTOENCODER, TrainAutoencoderConfig
from gulliver.video._batches import read_ahead
from gulliver.video._ema import ExponentialAverage
from gulliver.video._run import Run
from gulliver.video._skipped import SkippedClips, common_samples, listing
from gulliver.video.autoencoders._adversary import Adversary
from gulliver.video.autoencoders._clips import Sources
from gulliver.video.autoencoders._losses import (
    AutoencoderLoss,
    Features,
    Terms,
    check_perceptual,
    load_perceptual,
)
from gulliver.video.autoencoders._metrics import Quality, measure
from gulliver.video.autoencoders._passes import make_passes
from gulliver.video.autoencoders._picture import reconstruction_picture

STATISTICS_BATCHES = 24


def build_autoencoder(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    """Makes the autoencoder of a run, its weights drawn from the run's seed."""
    torch.manual_seed(config.seed)
    model = config.model
    return VideoAutoencoder(
        model.latent_channels, **AUTOENCODER_SIZES[model.size], posterior=model.posterior
    )


class AutoencoderTrainer(TrainingLoop):
    """An autoencoder, its optimizers and its clips, and the loop over them.

    Args:
        config: options of the run, whose folder is ``config.out``.
        model: autoencoder to train, on the device of this rank.
        sources: clips to train on, and held-out clips.
        world: ranks that train together.
    """

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
                f"--share-ranks is {replicas}, but there are {world.size} ranks: their number "
                f"must be a multiple of it"
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
        """Yields steps with their clips, and the positions after them."""
        training, seed = self.sources.training, self.config.seed
        for step, batch, state in read_ahead(training, self.sampler, seed, self.world.device):
            yield (step, batch), state

    def _agreed(self, step: Step, batch: ClipBatch) -> tuple[Tensor | None, list[int], int]:
        """Returns this rank's clips, their rows in the step, and the clips of all ranks."""
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
            f"{problem}: the autoencoder's training stopped at step {self.step_number}"
        )

    def forward_backward(self, batch: tuple[Step, ClipBatch]) -> Mapping[str, float] | None:
        """Runs backward for this rank's clips; None where no rank could read one."""
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
        # Gradients are averaged over ranks, the loss over clips: the factor makes up for it.
        self.booster.backward(loss * (len(rows) * self.world.size / count), self.optimizer)
        self._decoded = videos, decoded, share
        own = {} if terms is None else {"loss": loss.detach(), **terms.figures}
        return {name: float(own.get(name, 0.0)) * share for name in self._names()}

    @property
    def _judging(self) -> Adversary | None:
        """The discriminator, once it has begun."""
        begun = self.step_number >= self.config.loss.adversarial_start
        return self.adversary if begun else None

    def after_update(self) -> Mapping[str, float]:
        """Moves the average of the weights, and trains the discriminator on the same clips."""
        if self.average is not None:
            self.average.update(self.autoencoder)
        videos, decoded, share = self._decoded
        self._decoded = None, None, 0.0
        # The loop has counted the step already.
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
        """Names of a step's figures, the same on all ranks."""
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
        """What the progress bar shows."""
        rate = self.step_number / max(self.seconds, 1e-9) * self.config.data.batch_size
        return {"grad_norm": f"{line['grad_norm']:.3f}", "samples_per_s": f"{rate:.1f}"}

    def evaluate(self) -> None:
        """Reports on held-out clips while training goes on."""
        if self.step_number % self.config.report_every == 0 and not self.is_over:
            model = self.result()
            self.report(model, self.quality(model))

    def report(self, model: VideoAutoencoder, quality: Quality) -> None:
        """Logs figures of held-out clips, and draws some of them; every rank calls it."""
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
        """Returns the autoencoder with averaged weights, or the trained one where there are none.

        Every rank calls it.
        """
        if self.average is None:
            return self.autoencoder
        found = VideoAutoencoder(**self.autoencoder.config).to(self.world.device, self.dtype)
        found.load_state_dict(self.average.shadow)
        return found

    def quality(self, model: VideoAutoencoder) -> Quality:
        """Measures PSNR and SSIM on the held-out clips; every rank calls it."""
        return measure(model, self.sources.held_out, self.world.device, self.place)

    def finish(self) -> tuple[VideoAutoencoder, dict[str, Any]]:
        """Measures the latents, and what the result is worth; every rank calls it.

        Returns:
            The autoencoder, plain again, and figures: psnr in dB and ssim of the held-out clips,
            what these are, and the steps.
        """
        self.passes.off()
        model = self.result()
        self._measure_latents(model)
        quality = self.quality(model)
        figures = {"psnr": quality.psnr, "ssim": quality.ssim, "clips": self.sources.name}
        return model, figures | {"steps": self.config.steps}

    @torch.no_grad()
    def _measure_latents(self, model: VideoAutoencoder) -> None:
        """Stores mean and standard deviation of the latents of some training clips."""
        columns = []
        for step in islice(self._sampler(0, 1), STATISTICS_BATCHES):
            videos = collate(self.sources.training, step.indices).videos
            if videos is not None:
                latents = model.encode_raw(videos.to(self.world.device, self.dtype))
                columns.append(latents.transpose(0, 1).flatten(1).double())
        if not columns:
            raise GulliverError("no clip could be read any more: the latents could not be measured")
        values = torch.cat(columns, dim=1)
        model.mean.copy_(values.mean(dim=1))
        model.std.copy_(values.std(dim=1).clamp(min=1e-6))

    def state(self) -> dict[str, Any]:
        """The discriminator, the average of the weights, and what a resumed run must share."""
        average, table = self.average, self.sources.table
        run = {
            "rows": None if table is None else table.fingerprint,
            "ema_updates": 0 if average is None else average.updates,
            "config": resolved(self.config),
        }
        ema = {} if average is None else {"ema": average.leaves()}
        return {**self.loaded_in_place(), **ema, "run": run}

    def loaded_in_place(self) -> dict[str, Any]:
        """The discriminator and its optimizer."""
        return {} if self.adversary is None else self.adversary.state()

    def load_state(self, run: dict[str, Any], folder: Path) -> None:
        """Takes up the average of the weights and the position in the data."""
        if self.sources.table is not None:
            self.sources.table.check_rows(run["rows"])
        if self.average is not None:
            load(folder, {"ema": self.average.leaves()})
            self.average.updates = run["ema_updates"]
        self.sampler.load_state_dict(run["position"])
