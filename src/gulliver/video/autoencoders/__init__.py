"""Training of video autoencoders: losses, discriminator, figures, clips, and the loop.

    loss = AutoencoderLoss(AutoencoderLossConfig(reconstruction="l1", learnt_variance=True))
    terms = loss(video, decoded, Posterior.of(moments, channels))
    print(psnr(video, decoded), ssim(video, decoded))           # of each frame

Read `_losses.py`, then `_trainer.py`; `_passes.py` says how clips that are too long for memory are
streamed, and how ranks share one. It does not know of run folders: `gulliver.video` has them.
"""

from gulliver.video._autoencoder_config import AutoencoderLossConfig
from gulliver.video.autoencoders._clips import ClipWindows, MixedClips, Sources, make_sources
from gulliver.video.autoencoders._discriminator import PatchDiscriminator
from gulliver.video.autoencoders._losses import (
    AutoencoderLoss,
    Posterior,
    Terms,
    adaptive_weight,
    discriminator_loss,
    generator_loss,
    kl_divergence,
    perceptual_distance,
    pixel_error,
)
from gulliver.video.autoencoders._metrics import Quality, measure, psnr, ssim
from gulliver.video.autoencoders._picture import reconstruction_picture
from gulliver.video.autoencoders._trainer import AutoencoderTrainer, build_autoencoder

__all__ = [
    "AutoencoderLoss",
    "AutoencoderLossConfig",
    "AutoencoderTrainer",
    "ClipWindows",
    "MixedClips",
    "PatchDiscriminator",
    "Posterior",
    "Quality",
    "Sources",
    "Terms",
    "adaptive_weight",
    "build_autoencoder",
    "discriminator_loss",
    "generator_loss",
    "kl_divergence",
    "make_sources",
    "measure",
    "perceptual_distance",
    "pixel_error",
    "psnr",
    "reconstruction_picture",
    "ssim",
]
