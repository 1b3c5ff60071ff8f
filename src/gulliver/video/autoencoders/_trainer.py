"""The training loop of video autoencoders: one for `gulliver train` and `train-autoencoder`.

Read `AutoencoderTrainer.steps`, then `_step`: one optimizer step is there from the clips to the
averaged weights. What it does not know: run folders, what is shown of a run, and how parameters lie
in memory (`gulliver.booster`).

Everything random is a function of (seed, epoch, batch), never of the rank, so a resumed run needs
no saved generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from gulliver.models import AUTOENCODER_SIZES, VideoAutoencoder
from gulliver.options import resolved
from gulliver.video._autoencoder_config import TrainAutoencoderConfig
from gulliver.video._batches import read_ahead
from gulliver.video._ema import ExponentialAverage
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

STATISTICS_BATCHES = 24


def build_autoencoder(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    """Makes the autoencoder of a run, its weights drawn from the run's seed."""
    torch.manual_seed(config.seed)
    model = config.model
    return VideoAutoencoder(
        model.latent_channels, **AUTOENCODER_SIZES[model.size], posterior=model.posterior
    )


class AutoencoderTrainer:
    """An autoencoder, its optimizers and its clips, and the loop over them.

    Args:
        config: options of the run.
        model: autoencoder to train, on the device of this rank.
        sources: clips to train on, and held-out clips.
        world: ranks that train together.

    Attributes:
        done: number of steps that are done.
    """

    def __init__(
        self,
        config: TrainAutoencoderConfig,
        model: VideoAutoencoder,
        sources: Sources,
        world: World,
    ) -> None:
        self.config, self.model, self.sources, self.world = config, model, sources, world
        self.done = self.saved = 0
        self.replicas = config.share_ranks
        if world.size % self.replicas:
            raise GulliverError(
                f"--share-ranks is {self.replicas}, but there are {world.size} ranks: their number "
                f"must be a multiple of it"
            )
        self.place = world.rank // self.replicas, world.size // self.replicas
        self.dtype = next(model.parameters()).dtype
        self.sampler = self._sampler(*self.place)
        self.sampler_state = self.sampler.state_dict()
        self.skipped = SkippedClips(
            self.sampler.samples, len(self.sampler), config.data.unreadable_limit
        )
        self.loss = AutoencoderLoss(config.loss, self._perceptual()).to(world.device, self.dtype)
        self._boost()
        average = ExponentialAverage(model, config.ema) if config.ema else None
        self.average = average
        self.adversary = None
        if config.loss.adversarial:
            self.adversary = Adversary(config, model.last_layer, world)
        self.passes = make_passes(
            model, config.segment_frames, self.replicas, config.share_dim, world.size
        )

    def _boost(self) -> None:
        config = self.config
        trained = nn.ModuleDict({"autoencoder": self.model, "loss": self.loss})
        optimizer = torch.optim.AdamW(
            trained.parameters(), lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, config.learning_rate, total_steps=config.steps + 1, pct_start=0.1
        )
        self.booster = Booster(plugin=LowLevelZeroPlugin(stage=1, chunk_mb=1.0, verbose=False))
        self.boosted_model, self.optimizer, *_ = self.booster.boost(trained, optimizer)

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

    def steps(self) -> Iterator[dict[str, float]]:
        """Trains to the end, and yields the figures of each step; every rank goes through it.

        Raises:
            GulliverError: more clips than allowed could not be read; the loss is no number.
        """
        if self.done >= self.config.steps:
            return
        reading = read_ahead(
            self.sources.training, self.sampler, self.config.seed, self.world.device
        )
        for step, batch, state in reading:
            videos, rows, count = self._agreed(step, batch)
            if self.skipped.problem is not None:
                self._refuse_lost_data(self.skipped.problem)
            if not count:
                continue
            figures = self._step(step, videos, rows, count)
            self.sampler_state, self.done = state, self.done + 1
            yield figures
            if self.done >= self.config.steps:
                return

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
        self.booster.wait()  # a checkpoint may be under way
        raise GulliverError(f"{problem}: the autoencoder's training stopped at step {self.done}")

    def _step(
        self, step: Step, videos: Tensor | None, rows: list[int], count: int
    ) -> dict[str, float]:
        """Runs one step on this rank's clips."""
        share = len(rows) / count
        terms, decoded = None, None
        # Zero gradients without clips: the other ranks wait for this one in the reduction.
        nothing = (p.sum() * 0 for p in self.boosted_model.parameters())
        loss = sum(nothing, torch.zeros((), device=self.world.device)) if videos is None else None
        if videos is not None:
            videos = videos.to(self.world.device, self.dtype)
            terms, decoded = self._forward(step, videos, rows)
            loss = terms.reconstruction + terms.regularisation
        adversary = self.adversary
        if self.done < self.config.loss.adversarial_start:
            adversary = None
        assert loss is not None
        if adversary is not None:
            loss = loss + adversary.term(terms, decoded, share)
        # Gradients are averaged over ranks, the loss over clips: the factor makes up for it.
        self.booster.backward(loss * (len(rows) * self.world.size / count), self.optimizer)
        figures = self._figures(terms, loss, share)
        norm = float(self.optimizer.clip_grad_by_norm(self.config.clip or math.inf))
        self._check_finite(figures["loss"], norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        if adversary is not None:
            own = adversary.step(videos, decoded, share) * share
            all_reduce(own)
            figures["discriminator"] = float(own) / self.replicas
        return figures | {"grad_norm": norm}

    def _forward(self, step: Step, videos: Tensor, rows: list[int]) -> tuple[Terms, Tensor]:
        posterior = self.passes.encode(videos)
        generator = torch.Generator().manual_seed(derive(self.config.seed, step.epoch, step.number))
        noise = torch.randn(step.total, *posterior.mean.shape[1:], generator=generator)[rows]
        noise = noise.to(self.world.device, self.dtype)
        decoded = self.passes.decode(posterior.sample(noise, self.config.loss.latent_noise))
        return self.loss(videos, decoded, posterior, self.replicas), decoded

    def _figures(self, terms: Terms | None, loss: Tensor, share: float) -> dict[str, float]:
        """Returns the means of all ranks' figures; a rank without clips adds nothing."""
        own = {} if terms is None else {"loss": loss.detach(), **terms.figures}
        names = list(own) if self.world.size == 1 else self._names()
        values = [float(own.get(name, 0.0)) * share for name in names]
        totals = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        if self.world.size > 1:
            all_reduce(totals)
        return dict(zip(names, (totals / self.replicas).tolist(), strict=True))

    def _names(self) -> list[str]:
        """Names of a step's figures, the same on all ranks."""
        loss = self.config.loss
        adversarial = bool(loss.adversarial) and self.done >= loss.adversarial_start
        posterior = self.model.config.get("posterior", False)
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

    def _check_finite(self, loss: float, norm: float) -> None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.booster.wait()
            raise GulliverError(
                f"loss {loss} with gradient norm {norm} at step {self.done} of the autoencoder: "
                "training stopped before the weights changed; try a lower learning rate"
            )

    def result(self) -> VideoAutoencoder:
        """Returns the autoencoder with averaged weights, or the trained one where there are none.

        Every rank calls it.
        """
        if self.average is None:
            return self.model
        found = VideoAutoencoder(**self.model.config).to(self.world.device, self.dtype)
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

    def save(self, folder: Path) -> None:
        """Begins a checkpoint of this step; every rank calls it. A step is saved once.

        Args:
            folder: folder of the run's checkpoints.
        """
        if self.done == self.saved:
            return
        self.saved = self.done
        average = self.average
        state: dict[str, Any] = {} if self.adversary is None else self.adversary.state()
        table = self.sources.table
        state["run"] = {
            "step": self.done,
            "sampler": self.sampler_state,
            "rows": None if table is None else table.fingerprint,
            "ema_updates": 0 if average is None else average.updates,
            "config": resolved(self.config),
        }
        if average is not None:
            state["ema"] = average.leaves()
        self.booster.save(
            folder,
            self.done,
            self.boosted_model,
            self.optimizer,
            self.scheduler,
            state=state,
            use_async=self.config.async_save,
            keep=self.config.keep,
        )

    def restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        state: dict[str, Any] = {} if self.adversary is None else self.adversary.state()
        loaded = self.booster.load(
            folder,
            self.boosted_model,
            self.optimizer,
            self.scheduler,
            state={**state, "run": None},
            random=False,  # every step draws from seeds of its own
        )
        run, table = loaded.values["run"], self.sources.table
        if table is not None and "rows" in run:  # older checkpoints have none
            table.check_rows(run["rows"])
        if self.average is not None:
            load(folder, {"ema": self.average.leaves()})
            self.average.updates = run["ema_updates"]
        self.sampler.load_state_dict(run["sampler"])
        self.sampler_state = run["sampler"]
        self.done = self.saved = run["step"]
