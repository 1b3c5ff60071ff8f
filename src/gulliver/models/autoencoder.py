"""A small causal 3-D autoencoder that compresses video by 4 x 4 x 4.

The first frame is repeated three times at the start, so that blocks of four frames become one
latent frame and the first latent frame depends on the first frame only. An image is then a clip of
one frame. All convolutions run on the small grid and are causal in time.

Shapes: videos [B, 3, T, H, W] in [-1, 1] with T = 4 k + 1; latents [B, C, k + 1, H / 4, W / 4].
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models.autoencoders import check_causal, check_length, check_space

BLOCK = 4
"""Frames, rows and columns of a block that becomes one latent vector."""
AUTOENCODER_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 56, "depth": 1},
    "small": {"width": 96, "depth": 2},
    "base": {"width": 160, "depth": 3},
    "large": {"width": 256, "depth": 4},
}
"""Sizes of `VideoAutoencoder` by name; the first is its default."""


class CausalConv3d(nn.Module):
    """A causal 3-D convolution, computed as one 2-D convolution.

    The time taps are folded into the channels: on CPUs that is two to four times faster than conv3d
    with the same result. The first frame is repeated before the clip.
    """

    def __init__(self, inputs: int, outputs: int, taps: int = 3) -> None:
        super().__init__()
        self.taps = taps
        self.conv = nn.Conv2d(inputs * taps, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves [B, T, inputs, H, W] to [B, T, outputs, H, W]."""
        batch, frames = x.shape[:2]
        if self.taps > 1:
            # Not zeros: padding with the first frame looks like a still video.
            first = x[:, :1].expand(-1, self.taps - 1, -1, -1, -1)
            padded = torch.cat([first, x], dim=1)
            x = torch.cat([padded[:, tap : tap + frames] for tap in range(self.taps)], dim=2)
        return self.conv(x.flatten(0, 1)).unflatten(0, (batch, frames))


class Residual(nn.Module):
    """Two convolutions with a residual connection, each after SiLU; the first also spans time."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = CausalConv3d(channels, channels)
        self.second = CausalConv3d(channels, channels, taps=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))


class VideoAutoencoder(nn.Module):
    """Encodes clips to normalized latents and decodes them.

    `mean` and `std` [C] are statistics of the raw latents, measured after training; diffusion
    expects latents of about unit variance.

    Args:
        latent_channels: channels C of the latent.
        width: channels of the convolutions.
        depth: residual blocks of the encoder, and of the decoder.
        posterior: whether the encoder predicts a Gaussian, mean and log-variance, instead of a
            point; its mean is then the latent.
    """

    compression = (BLOCK, BLOCK, BLOCK)
    input_dims: ClassVar = {"height": -2, "width": -1, "time": 1, "channels": 2}
    """Input dims of `encoder` and `decoder`."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, latent_channels: int = 8, width: int = 56, depth: int = 1, posterior: bool = False
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "latent_channels": latent_channels,
            "width": width,
            "depth": depth,
        }
        if posterior:
            self.config["posterior"] = True
        self.latent_channels = latent_channels
        pixels = 3 * BLOCK**3
        self.encoder = nn.Sequential(
            CausalConv3d(pixels, width, taps=1),
            *(Residual(width) for _ in range(depth)),
            nn.SiLU(),
            CausalConv3d(width, latent_channels * (2 if posterior else 1), taps=1),
        )
        self.decoder = nn.Sequential(
            CausalConv3d(latent_channels, width),
            *(Residual(width) for _ in range(depth)),
            nn.SiLU(),
            CausalConv3d(width, pixels, taps=1),
        )
        self.register_buffer("mean", torch.zeros(latent_channels))
        self.register_buffer("std", torch.ones(latent_channels))

    @property
    def last_layer(self) -> nn.Parameter:
        """Weight of the last convolution; its gradient norm balances loss terms."""
        return self.get_parameter(f"decoder.{len(self.decoder) - 1}.conv.weight")

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns the latent shape of a clip: channels, frames, rows and columns."""
        return self.latent_channels, check_causal(self, frames), *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes [B, 3, T, H, W] to latents with about zero mean and unit variance."""
        self.latent_shape(*video.shape[2:])
        return self.stream_encoder(video)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents [B, C, k + 1, H / 4, W / 4] to [B, 3, 4 k + 1, H, W]."""
        check_length(self, latents, num_frames)
        return self.decode_raw(latents * self._column(self.std) + self._column(self.mean))

    def moments(self, video: Tensor) -> Tensor:
        """Returns the encoder's output: latents, and log-variances if built with `posterior`."""
        return self.encoder(fold(video)).transpose(1, 2)

    def encode_raw(self, video: Tensor) -> Tensor:
        """Encodes without normalization, because statistics are only known after training."""
        return self.moments(video)[:, : self.latent_channels]

    def decode_raw(self, latents: Tensor) -> Tensor:
        return unfold(self.decoder(latents.transpose(1, 2)))

    def stream_encoder(self, video: Tensor) -> Tensor:
        """Encodes a clip without splitting it into chunks."""
        return (self.encode_raw(video) - self._column(self.mean)) / self._column(self.std)

    stream_decoder = decode

    def _column(self, values: Tensor) -> Tensor:
        return values.view(-1, 1, 1, 1)


def fold(video: Tensor) -> Tensor:
    """Folds blocks of 4 x 4 x 4 into channels: [B, 3, 4 k + 1, H, W] to [B, k + 1, 192, H/4, W/4].

    Time comes before channels, so that `CausalConv3d` merges batch and time without a copy.
    """
    first = video[:, :, :1].expand(-1, -1, BLOCK - 1, -1, -1)
    video = torch.cat([first, video], dim=2)
    for dim in (4, 3, 2):
        video = video.unflatten(dim, (-1, BLOCK))
    return video.permute(0, 2, 1, 3, 5, 7, 4, 6).flatten(2, 5)


def unfold(blocks: Tensor) -> Tensor:
    """Inverts `fold` and drops the three copies of the first frame."""
    batch, frames, _, rows, columns = blocks.shape
    split = blocks.view(batch, frames, 3, BLOCK, BLOCK, BLOCK, rows, columns)
    video = split.permute(0, 2, 1, 3, 6, 4, 7, 5)
    video = video.reshape(batch, 3, frames * BLOCK, rows * BLOCK, columns * BLOCK)
    return video[:, :, BLOCK - 1 :]
