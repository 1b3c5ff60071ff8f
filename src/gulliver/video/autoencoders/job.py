"""A run of `gulliver train-autoencoder`: its folder, log, reports and result.

run/
  config.json              the resolved configuration
  autoencoder.safetensors  the result, for `gulliver train --autoencoder.path`
  reconstruction.png       held-out frames, and their reconstructions below
  log.jsonl                a line per logged step, and one per report
  tensorboard/
  checkpoints/step-*/      model, optimizers, schedule, averaged weights, position in the data
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gulliver.comm.collectives import barrier
from gulliver.comm.world import guard, init_world
from gulliver.errors import GulliverError
from gulliver.jobs.display import console
from gulliver.jobs.stop import StopRequest
from gulliver.jobs.trackers import track
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.options import MOST, resolved
from gulliver.video.autoencoder_config import (
    MAY_CHANGE_OF_AUTOENCODER,
    TrainAutoencoderConfig,
    check_autoencoder_config,
    check_latent_terms,
)
from gulliver.video.autoencoders.clips import make_sources
from gulliver.video.autoencoders.losses import Quality
from gulliver.video.autoencoders.trainer import AutoencoderTrainer, build_autoencoder
from gulliver.video.public_models import load_trained, save_autoencoder
from gulliver.video.run import Run
from gulliver.video.sources import make_dataset


@dataclass(frozen=True)
class AutoencoderOutcome:
    """Result of `run_autoencoder`."""

    step: int
    # Whether the run is finished.
    finished: bool
    # Result file, if it exists.
    path: Path
    # PSNR, SSIM and a description of the clips, if the run is finished.
    figures: dict[str, Any]


def run_autoencoder(config: TrainAutoencoderConfig) -> AutoencoderOutcome:
    """Trains a video autoencoder; called on every rank."""
    check_autoencoder_config(config)
    world = init_world()
    run = Run(config.out, config.keep, MAY_CHANGE_OF_AUTOENCODER)
    with guard():
        checkpoint = run.open(config, step=config.resume_step)
        barrier()  # all ranks read before any rank writes
        # Captions are not used here.
        dataset = make_dataset(config.data, MOST, world.is_main)
        sources = make_sources(dataset, config.data, config.seed)
        trainer = AutoencoderTrainer(
            config, _initial_model(config).to(world.device), sources, world
        )
        trainer.start(checkpoint, options=resolved(config))
        with StopRequest().listening() as stop:
            if not trainer.train(stop):
                return AutoencoderOutcome(trainer.step_number, False, run.autoencoder_path, {})
        return _finished(trainer, run.autoencoder_path)


def _finished(trainer: AutoencoderTrainer, path: Path) -> AutoencoderOutcome:
    main, step = trainer.world.is_main, trainer.step_number
    model, figures = trainer.finish()
    quality = Quality(figures["psnr"], figures["ssim"])
    names, folder = trainer.options.report_to, trainer.run.folder
    with track(names, folder, step, main, {}) as trainer.scalars:
        trainer.report(model, quality)
    if main:
        save_autoencoder(path, model, figures)
        console().print(
            f"{path}: {quality.psnr:.2f} dB, SSIM {quality.ssim:.4f} on {figures['clips']}"
        )
    barrier()
    return AutoencoderOutcome(step, True, path, figures)


def _initial_model(config: TrainAutoencoderConfig) -> VideoAutoencoder:
    if config.model.init is None:
        return build_autoencoder(config)
    model = load_trained(config.model.init)
    if not isinstance(model, VideoAutoencoder):
        raise GulliverError(
            f"--model.init {config.model.init} holds a {type(model).__name__}; only Gulliver's "
            "own autoencoders can be trained"
        )
    check_latent_terms(config, model.config.get("posterior", False))
    # Training uses raw latents; their statistics are measured again at the end.
    model.mean.zero_()
    model.std.fill_(1)
    return model.train()
