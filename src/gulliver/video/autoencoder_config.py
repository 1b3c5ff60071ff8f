"""Options of `gulliver train-autoencoder`: frozen dataclasses, which are also the command line.

Nothing here imports torch at the top, nor may it: ``--help`` reads this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from gulliver.errors import GulliverError, nearest
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    RANKS,
    RATE,
    SEED,
    SHARE,
    Options,
    Range,
    check_needs,
)
from gulliver.video.config import DataConfig, parse_shapes, table_needs

WINDOW = 11
"""Side of SSIM's window: the smallest picture that it can be measured on."""
WEIGHTS = Range(0, 1e9)
"""Range of the weights of a loss."""


@dataclass(frozen=True)
class AutoencoderDataConfig(DataConfig):
    """Clips to learn from, and those that are held out."""

    batch_size: Annotated[int, AT_LEAST_1] = 16
    """Clips of one optimizer step, all ranks together."""
    image_share: Annotated[float, SHARE] = 0.0
    """Share of the samples that are shown as one of their frames: pictures among the videos."""
    repeats: Annotated[int, Range(1, 1_000_000)] = 1
    """Times that a clip is shown in an epoch, each time another window of its frames."""
    held_out_frames: Annotated[float, Range(0, 0.9)] = 0.2
    """Share of each video's frames, its last, that training never sees (tables only)."""
    held_out_clips: Annotated[float, Range(0, 0.9)] = 0.0
    """Share of the clips that training never sees (tables only)."""
    in_memory: bool = False
    """Decode each clip once and keep it, scaled to its bucket, as bytes (tables only)."""


@dataclass(frozen=True)
class AutoencoderModelConfig(Options):
    """The autoencoder that is trained."""

    size: str = "tiny"
    """A name of `gulliver.models.autoencoder.AUTOENCODER_SIZES`."""
    latent_channels: Annotated[int, Range(1, 4096)] = 8
    """Channels of the latent."""
    posterior: bool = False
    """Encode to a Gaussian, mean and variance, with a KL term: else to points, with some noise."""
    init: Path | None = None
    """A trained autoencoder (.safetensors) to go on from; it settles size, channels, posterior."""


@dataclass(frozen=True)
class AutoencoderLossConfig(Options):
    """Terms of the loss; all are means over elements, so that sizes of clips weigh alike."""

    reconstruction: Literal["mse", "l1"] = "mse"
    """Error of pixels: squared or absolute."""
    learnt_variance: bool = False
    """Learn the log-variance s of the error: error / e^s + s, a negative log-likelihood."""
    kl: Annotated[float, WEIGHTS] = 1e-6
    """Weight of the KL divergence to a standard normal (with --model.posterior)."""
    latent_noise: Annotated[float, Range(0, 100)] = 0.15
    """Standard deviation of the noise on latents (without --model.posterior)."""
    latent_pull: Annotated[float, WEIGHTS] = 1e-4
    """Weight of the latents' mean square (without --model.posterior)."""
    perceptual: str = ""
    """Network whose features are compared, as module:name; called with clips [B, 3, T, H, W]."""
    perceptual_weight: Annotated[float, WEIGHTS] = 1.0
    """Weight of the perceptual term."""
    adversarial: Annotated[float, WEIGHTS] = 0.0
    """Weight of the adversarial term; 0 has no discriminator."""
    adversarial_start: Annotated[int, AT_LEAST_0] = 0
    """Steps before the discriminator begins."""
    adaptive: bool = True
    """Scale the adversarial term to the gradient of the others at the last layer (VQGAN)."""
    discriminator_width: Annotated[int, Range(8, 4096)] = 32
    """Channels of the discriminator's first layer."""
    discriminator_rate: Annotated[float, RATE] = 2e-4
    """Learning rate of the discriminator."""


@dataclass(frozen=True)
class TrainAutoencoderConfig(Options):
    """Trains a video autoencoder."""

    out: Path = Path("runs/autoencoder")
    """The run folder: config, log, checkpoints, pictures, and autoencoder.safetensors."""
    steps: Annotated[int, AT_LEAST_1] = 2000
    """Optimizer steps of the whole run."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or --share-ranks. Ignored under torchrun."""
    resume: bool = False
    """Continue from the newest checkpoint of the run folder, bit for bit."""
    resume_step: Annotated[int | None, AT_LEAST_0] = None
    """Continue from this step's checkpoint; later ones become a branch that was left."""
    seed: Annotated[int, SEED] = 0
    """Seed of everything random."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak of the one-cycle learning rate."""
    clip: Annotated[float, Range(0, 1e9)] = 0.05
    """Largest global gradient norm; 0 turns clipping off."""
    ema: Annotated[float, Range(0, 1, open_above=True)] = 0.0
    """Decay of averaged weights, which the result has then; 0 keeps none."""
    segment_frames: Annotated[int, AT_LEAST_0] = 0
    """Stream clips through the networks in segments of so many frames, and run backward segment by
    segment: memory of one segment, the same gradients. 0 takes clips whole."""
    share_ranks: Annotated[int, Range(1, 1024)] = 1
    """Ranks that run the networks of each clip together, with the same gradients."""
    share_dim: Literal["auto", "height", "width", "time"] = "height"
    """Dim that they share."""
    save_every: Annotated[int, AT_LEAST_1] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Number of newest checkpoints kept."""
    async_save: bool = True
    """Write checkpoints while training goes on."""
    log_every: Annotated[int, AT_LEAST_1] = 10
    """Steps between lines of the log."""
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
    | {"report_every", "segment_frames", "share_ranks", "share_dim"}
    | {"model.init", "data.unreadable_limit", "data.in_memory"}
)
"""Options that may differ between a run and its resumption: where, how, and how long."""


def check_autoencoder_config(config: TrainAutoencoderConfig) -> TrainAutoencoderConfig:
    """Refuses values that no run could use."""
    _check_loss(config)
    _check_data(config)
    check_needs(config, _needs(config))
    if config.model.init is None:
        check_latent_terms(config, config.model.posterior)
    if config.resume_step is not None and not config.resume:
        raise GulliverError(
            f"--resume-step {config.resume_step} says where to continue: add --resume"
        )
    if config.segment_frames and config.share_ranks > 1:
        raise GulliverError(
            f"--segment-frames {config.segment_frames} and --share-ranks {config.share_ranks} "
            "exclude each other: stream clips on each rank, or share them between ranks"
        )
    return config


def check_latent_terms(config: TrainAutoencoderConfig, posterior: bool) -> None:
    """Refuses terms of latents that an autoencoder does not have."""
    points = not posterior, "it is for latents that are points, these have a posterior"
    gaussian = posterior, "it is for latents with a posterior (--model.posterior), these are points"
    needs = {"loss.kl": gaussian, "loss.latent_noise": points, "loss.latent_pull": points}
    check_needs(config, needs)


def _needs(config: TrainAutoencoderConfig) -> dict[str, tuple[bool, str]]:
    """Lists what options need to have an effect, for `check_needs`."""
    loss = config.loss
    critic = loss.adversarial > 0, "there is no discriminator: add --loss.adversarial 0.5"
    made = config.model.init is None, "--model.init settles it: leave it out"
    return {
        **table_needs(config.data, "in_memory", "held_out_frames", "held_out_clips"),
        "data.scores": (False, "an autoencoder reads no captions: leave it out"),
        "data.bucket_ranks": (False, "an autoencoder has no --data.buckets: leave it out"),
        "data.encoded": (False, "an autoencoder learns from pixels: leave it out"),
        "data.windows": (False, "an autoencoder takes any frames: leave it out"),
        **dict.fromkeys(("model.size", "model.latent_channels", "model.posterior"), made),
        **dict.fromkeys(("loss.adversarial_start", "loss.adaptive"), critic),
        **dict.fromkeys(("loss.discriminator_width", "loss.discriminator_rate"), critic),
        "loss.perceptual_weight": (
            bool(loss.perceptual),
            "there is no network: add --loss.perceptual, such as my_networks:vgg_features",
        ),
        "loss.perceptual": (
            loss.perceptual_weight > 0,
            "--loss.perceptual-weight 0 leaves it out: give a weight, or no network",
        ),
        "share_dim": (config.share_ranks > 1, "no ranks share a clip: add --share-ranks 2"),
    }


def _check_loss(config: TrainAutoencoderConfig) -> None:
    loss, start = config.loss, config.loss.adversarial_start
    if loss.adversarial and start >= config.steps:
        raise GulliverError(
            f"--loss.adversarial-start is {start}: the run ends at step {config.steps}, and the "
            "discriminator would never begin; give fewer, or more --steps"
        )
    module, _, name = loss.perceptual.partition(":")
    if loss.perceptual and not (module and name):
        raise GulliverError(
            f"--loss.perceptual is {loss.perceptual!r}: it must be module:name, such as "
            "my_networks:vgg_features"
        )


def _check_data(config: TrainAutoencoderConfig) -> None:
    from gulliver.models.autoencoder import AUTOENCODER_SIZES, VideoAutoencoder

    data, name = config.data, config.model.size
    if name not in AUTOENCODER_SIZES:
        raise GulliverError(
            f"unknown size {name!r} of autoencoders: {nearest(name, AUTOENCODER_SIZES)}"
        )
    unit = VideoAutoencoder.compression[0]
    if config.segment_frames % unit:
        right = max(1, round(config.segment_frames / unit)) * unit
        raise GulliverError(
            f"--segment-frames is {config.segment_frames}: the autoencoder makes one latent frame "
            f"of {unit}, so it must be a multiple of {unit}, such as {right}"
        )
    for bucket in parse_shapes(data.shapes):
        if min(bucket.height, bucket.width) < WINDOW:
            raise GulliverError(
                f"--data.shapes {bucket}: SSIM's window has {WINDOW}x{WINDOW} pixels: height and "
                f"width must be at least {-(-WINDOW // 8) * 8}"
            )
    if data.buckets is not None:
        raise GulliverError(
            f"--data.buckets {data.buckets} deals clips to the sizes of a diffusion model: an "
            "autoencoder takes --data.shapes"
        )
