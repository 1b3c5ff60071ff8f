"""A run of `gulliver train-autoencoder`: its folder, its log, its reports and its result.

run/
  config.json              the resolved configuration
  autoencoder.safetensors  the result, for `gulliver train --autoencoder.path`
  reconstruction.png       held-out frames, and below them as they were decoded
  log.jsonl                a line per logged step, and one per report
  tensorboard/
  checkpoints/step-*/      model, optimizers, schedule, averaged weights, position in the data
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.comm import any_rank, barrier, guard, init_world
from gulliver.errors import GulliverError
from gulliver.jobs import Display, StopRequest, console, memory_in_use, tensorboard
from gulliver.models import VideoAutoencoder
from gulliver.options import MOST
from gulliver.video._autoencoder_config import (
    MAY_CHANGE_OF_AUTOENCODER,
    TrainAutoencoderConfig,
    check_autoencoder_config,
    check_latent_terms,
)
from gulliver.video._autoencoder_training import load_autoencoder, save_autoencoder
from gulliver.video._run import Run
from gulliver.video._sources import make_dataset
from gulliver.video.autoencoders import (
    AutoencoderTrainer,
    Quality,
    build_autoencoder,
    make_sources,
    reconstruction_picture,
)


@dataclass(frozen=True)
class AutoencoderOutcome:
    """Outcome of a call of `run_autoencoder`."""

    # Last step that was done.
    step: int
    # Whether it was the last of the run.
    finished: bool
    # File of the result, where it is there.
    path: Path
    # PSNR, SSIM and what they were measured on, where the run is finished.
    figures: dict[str, Any]


def run_autoencoder(config: TrainAutoencoderConfig) -> AutoencoderOutcome:
    """Trains a video autoencoder as `config` says, on every rank of the present world.

    Raises:
        GulliverError: the configuration cannot run, the folder holds another run, the loss is no
            longer a number, or another rank is gone.
    """
    check_autoencoder_config(config)
    world = init_world()
    run = Run(config.out, config.keep, MAY_CHANGE_OF_AUTOENCODER)
    with guard():
        checkpoint = run.open(config)
        barrier()  # nobody writes before everybody has looked
        if world.is_main:
            run.write_config(config)
            if checkpoint is None:
                run.cut_log(0)  # of a run that was killed before its first checkpoint
        # Captions are not read here.
        dataset = make_dataset(config.data, MOST, world.is_main)
        sources = make_sources(dataset, config.data, config.seed)
        model = _begun(config).to(world.device)
        job = _Job(config, run, AutoencoderTrainer(config, model, sources, world))
        if checkpoint is not None:
            job.restore(checkpoint)
        with StopRequest().listening() as stop:
            return job.run_to_end(stop)


def _begun(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    """Makes the autoencoder, or reads the one to go on from."""
    if config.model.init is None:
        return build_autoencoder(config)
    model = load_autoencoder(config.model.init)
    if not isinstance(model, VideoAutoencoder):
        raise GulliverError(
            f"--model.init {config.model.init} holds a {type(model).__name__}: only autoencoders "
            "of gulliver's own kind are trained here"
        )
    check_latent_terms(config, model.config.get("posterior", False))
    # Raw latents are trained; their statistics are measured anew at the end.
    model.mean.zero_()
    model.std.fill_(1)
    return model.train()


class _Job:
    """A trainer and the folder of its run."""

    def __init__(
        self, config: TrainAutoencoderConfig, run: Run, trainer: AutoencoderTrainer
    ) -> None:
        self.config, self.run, self.trainer = config, run, trainer
        self.main = trainer.world.is_main
        self.seconds = 0.0

    def restore(self, folder: Path) -> None:
        """Takes up the state of a checkpoint; every rank calls it."""
        self.trainer.restore(folder)
        if self.main:
            self.run.cut_log(self.trainer.done)
            past = self.run.read_log()
            self.seconds = past[-1]["seconds"] if past else 0.0
            console().print(f"resumed at step {self.trainer.done} from {folder}")

    def run_to_end(self, stop: StopRequest) -> AutoencoderOutcome:
        """Steps until the last, or until a signal; the last state is always saved."""
        config, trainer = self.config, self.trainer
        stopping = False
        title = f"training autoencoder {config.model.size}"
        with (
            tensorboard(self.run.folder / "tensorboard", trainer.done, self.main) as scalars,
            Display(title, config.steps, trainer.done, self.main) as display,
        ):
            started = time.monotonic()
            for figures in trainer.steps():
                self.seconds += time.monotonic() - started
                self._report(figures, display, scalars)
                stopping = any_rank(stop.wanted, trainer.world.device)
                last = trainer.done == config.steps
                if trainer.done % config.report_every == 0 and not last:
                    self._measure(trainer.result(), scalars)
                if stopping or last or trainer.done % config.save_every == 0:
                    trainer.save(self.run.checkpoints.root)
                if stopping:
                    break
                started = time.monotonic()
        trainer.booster.close()
        if trainer.done < config.steps:
            if self.main:
                console().print(
                    f"stopped at step {trainer.done} of {config.steps}; "
                    f"continue with --resume --out {self.run.folder}"
                )
            return AutoencoderOutcome(trainer.done, False, self.run.autoencoder_path, {})
        return self._finish()

    def _finish(self) -> AutoencoderOutcome:
        """Measures and writes the result."""
        model, figures = self.trainer.finish()
        quality = Quality(figures["psnr"], figures["ssim"])
        with tensorboard(self.run.folder / "tensorboard", self.trainer.done, self.main) as scalars:
            self._tell(model, quality, scalars)
        path = self.run.autoencoder_path
        if self.main:
            save_autoencoder(path, model, figures)
            console().print(
                f"{path}: {quality.psnr:.2f} dB, SSIM {quality.ssim:.4f} on {figures['clips']}"
            )
        barrier()
        return AutoencoderOutcome(self.trainer.done, True, path, figures)

    def _measure(self, model: VideoAutoencoder, scalars: Any) -> None:
        """Reports on held-out clips while training goes on; every rank calls it."""
        self._tell(model, self.trainer.quality(model), scalars)

    def _tell(self, model: VideoAutoencoder, quality: Quality, scalars: Any) -> None:
        """Logs figures of held-out clips, and draws some of them; every rank calls it."""
        trainer = self.trainer
        folder = self.run.folder if self.main else None
        path = None if folder is None else folder / "reconstruction.png"
        reconstruction_picture(path, model, trainer.sources.held_out, trainer.world.device)
        if not self.main:
            return
        line = {"step": trainer.done, **quality._asdict(), "seconds": round(self.seconds, 3)}
        self.run.append_log(line)
        for name, value in quality._asdict().items():
            scalars(f"held_out/{name}", value, trainer.done)

    def _report(self, figures: dict[str, float], display: Display, scalars: Any) -> None:
        if not self.main:
            return
        done = self.trainer.done
        rate = done / max(self.seconds, 1e-9) * self.config.data.batch_size
        display.advance(
            loss=f"{figures['loss']:.5f}",
            grad_norm=f"{figures['grad_norm']:.3f}",
            samples_per_s=f"{rate:.1f}",
            memory=f"{memory_in_use() / 2**30:.2f} GiB",
        )
        if done % self.config.log_every and done != self.config.steps:
            return
        learning_rate = self.trainer.scheduler.get_last_lr()[0]
        line = {"step": done, **figures, "learning_rate": learning_rate}
        self.run.append_log({**line, "seconds": round(self.seconds, 3)})
        for name, value in line.items():
            if name != "step":
                scalars(f"train/{name}", value, done)
