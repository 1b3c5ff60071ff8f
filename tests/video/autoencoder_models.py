"""Small autoencoders of all the layers that public ones have, written plainly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalConv(nn.Module):
    """A 3-D convolution that sees earlier frames only: the first frame, or zeros, before them."""

    def __init__(self, inputs: int, outputs: int, stride: Any = 1, mode: str = "replicate") -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3, stride)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        """Convolves ``[B, C, T, H, W]``."""
        return self.conv(F.pad(x, (1, 1, 1, 1, 2, 0), mode=self.mode))


class FrameNorm(nn.Module):
    """A group norm of each frame by itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``[B, C, T, H, W]``."""
        frames = x.transpose(1, 2)
        return self.norm(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).transpose(1, 2)


class RootNorm(nn.Module):
    """A root-mean-square norm over channels, as Wan's autoencoder has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``[B, C, T, H, W]``."""
        return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma


class Residual(nn.Module):
    """Norm, activation, convolution, twice, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: Any) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), CausalConv(inputs, outputs)
        self.norm2, self.conv2 = norm(outputs), CausalConv(outputs, outputs)
        self.shortcut = nn.Conv3d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolutions' output."""
        h = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Attention of one head over pixels of a frame, or causal over all tokens."""

    def __init__(self, channels: int, norm: Any, kind: str) -> None:
        super().__init__()
        self.norm, self.kind = norm(channels), kind
        self.qkv, self.out = nn.Conv3d(channels, 3 * channels, 1), nn.Conv3d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the attention's output."""
        batch, channels, frames, height, width = x.shape
        qkv = self.qkv(self.norm(x))
        if self.kind == "frame":
            qkv = qkv.transpose(1, 2).reshape(batch * frames, 1, 3 * channels, height * width)
        else:
            qkv = qkv.reshape(batch, 1, 3 * channels, -1)
        q, k, v = qkv.transpose(2, 3).chunk(3, dim=-1)
        causal = self.kind == "raster"
        made = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(2, 3)
        if self.kind == "frame":
            made = made.reshape(batch, frames, channels, height, width).transpose(1, 2)
        return x + self.out(made.reshape(x.shape))


class Upsample(nn.Module):
    """Doubles rows and columns, and frames but the first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Resamples ``[B, C, T, H, W]`` to ``[B, C, 2 T - 1, 2 H, 2 W]``."""
        first, others = x.split((1, x.shape[2] - 1), dim=2)
        made = F.interpolate(first.squeeze(2), scale_factor=(2.0, 2.0)).unsqueeze(2)
        if x.shape[2] > 1:
            rest = F.interpolate(others.contiguous(), scale_factor=(2.0, 2.0, 2.0))
            made = torch.cat((made, rest), dim=2)
        return self.conv(made)


NORMS = {"frame": FrameNorm, "root": RootNorm, "group": lambda n: nn.GroupNorm(2, n)}


class TinyAutoencoder(nn.Module):
    """Encoder and decoder, 2 x 2 x 2 smaller in between."""

    def __init__(self, norm: str = "group", attention: str = "raster", channels: int = 4) -> None:
        super().__init__()
        make = NORMS[norm]
        self.encoder = nn.Sequential(
            CausalConv(3, channels, mode="constant"),
            Residual(channels, channels, make),
            CausalConv(channels, channels, 2),
            Residual(channels, 2 * channels, make),
            Attention(2 * channels, make, attention),
            nn.Conv3d(2 * channels, 4, 1),
        )
        self.decoder = nn.Sequential(
            CausalConv(4, 2 * channels),
            Attention(2 * channels, make, attention),
            Residual(2 * channels, channels, make),
            Upsample(channels),
            make(channels),
            nn.SiLU(),
            CausalConv(channels, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Encodes and decodes."""
        return self.decoder(self.encoder(x))


def tiny_image_autoencoder() -> nn.Module:
    """Symmetric 2-D convolutions, pooling, asymmetric padding, full attention: as for pictures."""

    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.pad(x, (0, 1, 0, 1)))

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(x).view(x.shape[0], 8, -1).transpose(1, 2)
            q, k, v = (f(tokens).unflatten(2, (2, 4)).transpose(1, 2) for f in self.layers[:3])
            made = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return x + self.layers[3](made).transpose(1, 2).reshape(x.shape)

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"),
                nn.GroupNorm(2, 4),
                nn.SiLU(),
                Down(),
                Middle(),
                nn.AvgPool2d(2),
                nn.Conv2d(8, 8, 5, padding=4, dilation=2),
            )
            self.decoder = nn.Sequential(
                nn.Conv2d(8, 8, 3, padding="same"),
                Middle(),
                nn.Upsample(scale_factor=2),
                nn.Conv2d(8, 16, 3, padding=1),
                nn.PixelShuffle(2),
                nn.LeakyReLU(0.2),
                nn.Conv2d(4, 3, 3, padding=1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x))

    return Images()
