"""Options of `gulliver train-autoencoder`: frozen dataclasses that also define the command line.

Nothing here may import torch at the top: ``--help`` reads this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from gulliver.errors import GulliverError, check_known
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    RANKS,
    RATE,
    SEED,
    SHARE,
    Options,
    Range,
    Tracker,
    check_needs,
)
from gulliver.video.config import DataConfig, parse_shapes, table_needs

WINDOW = 11
"""Size of the SSIM window: the smallest picture that it supports."""
WEIGHTS = Range(0, 1e9)


@dataclass(frozen=True)
class AutoencoderDataConfig(DataConfig):
    """Training and held-out clips."""

    batch_size: Annotated[int, AT_LEAST_1] = 16
    """Global batch size in clips."""
    image_share: Annotated[float, SHARE] = 0.0
    """Fraction of the samples that are single frames, like images mixed with videos."""
    repeats: Annotated[int, Range(1, 1_000_000)] = 1
    """Number of times that an epoch uses a clip, each with another window of its frames."""
    held_out_frames: Annotated[float, Range(0, 0.9)] = 0.2
    """Fraction of each video's frames, at its end, held out from training (tables only)."""
    held_out_clips: Annotated[float, Range(0, 0.9)] = 0.0
    """Fraction of the clips held out from training (tables only)."""
    in_memory: bool = False
    """Decode each clip once and keep it in memory, scaled to its bucket, as bytes (tables only)."""


@dataclass(frozen=True)
class AutoencoderModelConfig(Options):
    """The autoencoder to train."""

    size: str = "tiny"
    """Name in `gulliver.models.autoencoder.AUTOENCODER_SIZES`."""
    latent_channels: Annotated[int, Range(1, 4096)] = 8
    """Channels of the latent."""
    posterior: bool = False
    """Encode to a Gaussian with a KL term; otherwise to points with added noise."""
    init: Path | None = None
    """Trained autoencoder (.safetensors) to start from; determines size, channels and posterior."""


@dataclass(frozen=True)
class AutoencoderLossConfig(Options):
    """Loss terms; all are means over elements, so that they do not depend on clip sizes."""

    reconstruction: Literal["mse", "l1"] = "mse"
    """Pixel error: squared or absolute."""
    learnt_variance: bool = False
    """Learn the log-variance s of the error: error / e^s + s, a negative log-likelihood."""
    kl: Annotated[float, WEIGHTS] = 1e-6
    """Weight of the KL divergence to a standard normal (with --model.posterior)."""
    latent_noise: Annotated[float, Range(0, 100)] = 0.15
    """Standard deviation of the noise on latents (without --model.posterior)."""
    latent_pull: Annotated[float, WEIGHTS] = 1e-4
    """Weight of the latents' mean square (without --model.posterior)."""
    perceptual: str = ""
    """Network for the perceptual term, as module:name; called with clips [B, 3, T, H, W]."""
    perceptual_weight: Annotated[float, WEIGHTS] = 1.0
    """Weight of the perceptual term."""
    adversarial: Annotated[float, WEIGHTS] = 0.0
    """Weight of the adversarial term; 0 disables the discriminator."""
    adversarial_start: Annotated[int, AT_LEAST_0] = 0
    """Step at which the discriminator starts."""
    adaptive: bool = True
    """Scale the adversarial term to the gradient of the other terms at the last layer (VQGAN)."""
    discriminator_width: Annotated[int, Range(8, 4096)] = 32
    """Channels of the discriminator's first layer."""
    discriminator_rate: Annotated[float, RATE] = 2e-4
    """Learning rate of the discriminator."""


@dataclass(frozen=True)
class TrainAutoencoderConfig(Options):
    """Trains a video autoencoder."""

    out: Path = Path("runs/autoencoder")
    """Run folder: config, log, checkpoints, pictures, and autoencoder.safetensors."""
    steps: Annotated[int, AT_LEAST_1] = 2000
    """Optimizer steps of the whole run."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or --share-ranks. Ignored under torchrun."""
    resume: bool = False
    """Resume from the newest checkpoint of the run folder; results are bitwise identical."""
    resume_step: Annotated[int | None, AT_LEAST_0] = None
    """Resume from this step's checkpoint; later ones are abandoned."""
    seed: Annotated[int, SEED] = 0
    """Random seed."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak learning rate of the one-cycle schedule."""
    clip: Annotated[float, Range(0, 1e9)] = 0.05
    """Maximum global gradient norm; 0 disables clipping."""
    ema: Annotated[float, Range(0, 1, open_above=True)] = 0.0
    """Decay of averaged weights, which are used for the result; 0 disables averaging."""
    segment_frames: Annotated[int, AT_LEAST_0] = 0
    """Process clips in segments of this many frames, with a backward per segment: less memory, same
    gradients. 0 processes whole clips.
    """
    share_ranks: Annotated[int, Range(1, 1024)] = 1
    """Number of ranks that process each clip together, with the same gradients."""
    share_dim: Literal["auto", "height", "width", "time"] = "height"
    """Dim of clips that is split over the ranks of --share-ranks."""
    save_every: Annotated[int, AT_LEAST_1] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of checkpoints to keep."""
    async_save: bool = True
    """Write checkpoints asynchronously."""
    log_every: Annotated[int, AT_LEAST_1] = 10
    """Steps between log lines."""
    report_to: tuple[Tracker, ...] = ("tensorboard",)
    """Experiment trackers that get losses and samples."""
    report_every: Annotated[int, AT_LEAST_1] = 500
    """Steps between reports: PSNR and SSIM of held-out clips, and a picture of some."""
    data: AutoencoderDataConfig = field(default_factory=AutoencoderDataConfig)
    model: AutoencoderModelConfig = field(default_factory=AutoencoderModelConfig)
    loss: AutoencoderLossConfig = field(default_factory=AutoencoderLossConfig)


MAY_CHANGE_OF_AUTOENCODER = frozenset(
    {
        "steps",
        "out",
        "ranks",
        "resume",
        "resume_step",
        "save_every",
        "keep",
        "async_save",
        "log_every",
    }
    | {"report_every", "report_to", "segment_frames", "share_ranks", "share_dim"}
    | {"model.init", "data.unreadable_limit", "data.in_memory"}
)
"""Options that may change on resume: where, how and how long a run trains."""


def check_autoencoder_config(config: TrainAutoencoderConfig) -> TrainAutoencoderConfig:
    _check_loss(config)
    _check_data(config)
    check_needs(config, _needs(config))
    if config.model.init is None:
        check_latent_terms(config, config.model.posterior)
    if config.resume_step is not None and not config.resume:
        raise GulliverError(f"--resume-step {config.resume_step} needs --resume")
    if config.segment_frames and config.share_ranks > 1:
        raise GulliverError(
            f"--segment-frames {config.segment_frames} and --share-ranks {config.share_ranks} "
            "cannot be combined; use one of them"
        )
    return config


def check_latent_terms(config: TrainAutoencoderConfig, posterior: bool) -> None:
    points = not posterior, "it applies to point latents, but the autoencoder has a posterior"
    gaussian = (
        posterior,
        "it applies to a posterior (--model.posterior), but the autoencoder has point latents",
    )
    needs = {"loss.kl": gaussian, "loss.latent_noise": points, "loss.latent_pull": points}
    check_needs(config, needs)


def _needs(config: TrainAutoencoderConfig) -> dict[str, tuple[bool, str]]:
    loss = config.loss
    critic = loss.adversarial > 0, "there is no discriminator; add --loss.adversarial 0.5"
    made = config.model.init is None, "--model.init determines it; omit it"
    return {
        **table_needs(config.data, "in_memory", "held_out_frames", "held_out_clips"),
        "data.scores": (False, "an autoencoder does not use captions; omit it"),
        "data.bucket_ranks": (False, "an autoencoder does not use --data.buckets; omit it"),
        "data.encoded": (False, "an autoencoder trains on pixels; omit it"),
        "data.windows": (False, "an autoencoder accepts any frames; omit it"),
        **dict.fromkeys(("model.size", "model.latent_channels", "model.posterior"), made),
        **dict.fromkeys(("loss.adversarial_start", "loss.adaptive"), critic),
        **dict.fromkeys(("loss.discriminator_width", "loss.discriminator_rate"), critic),
        "loss.perceptual_weight": (
            bool(loss.perceptual),
            "there is no network; add --loss.perceptual, such as my_networks:vgg_features",
        ),
        "loss.perceptual": (
            loss.perceptual_weight > 0,
            "--loss.perceptual-weight 0 disables it; give a weight, or omit the network",
        ),
        "share_dim": (config.share_ranks > 1, "ranks do not share clips; add --share-ranks 2"),
    }


def _check_loss(config: TrainAutoencoderConfig) -> None:
    loss, start = config.loss, config.loss.adversarial_start
    if loss.adversarial and start >= config.steps:
        raise GulliverError(
            f"--loss.adversarial-start {start} is not before the end of the run at step "
            f"{config.steps}, so the discriminator would never start; lower it, or raise --steps"
        )
    module, _, name = loss.perceptual.partition(":")
    if loss.perceptual and not (module and name):
        raise GulliverError(
            f"--loss.perceptual {loss.perceptual!r} is not of the form module:name; use for "
            "example my_networks:vgg_features"
        )


def _check_data(config: TrainAutoencoderConfig) -> None:
    from gulliver.models.autoencoder import AUTOENCODER_SIZES, VideoAutoencoder

    data, name = config.data, config.model.size
    check_known("autoencoder size", name, AUTOENCODER_SIZES)
    unit = VideoAutoencoder.compression[0]
    if config.segment_frames % unit:
        right = max(1, round(config.segment_frames / unit)) * unit
        raise GulliverError(
            f"--segment-frames {config.segment_frames} must be a multiple of {unit}, such as "
            f"{right}, because {unit} frames make a latent frame"
        )
    for bucket in parse_shapes(data.shapes):
        if min(bucket.height, bucket.width) < WINDOW:
            raise GulliverError(
                f"--data.shapes {bucket} is smaller than the SSIM window of {WINDOW}x{WINDOW} "
                f"pixels; use a height and width of at least {-(-WINDOW // 8) * 8}"
            )
    if data.buckets is not None:
        raise GulliverError(
            f"--data.buckets {data.buckets} does not apply to an autoencoder; use --data.shapes"
        )
