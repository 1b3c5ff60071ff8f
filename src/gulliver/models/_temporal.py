"""The causal autoencoder in time of Open-Sora 1.2: four times fewer frames, no smaller pictures.

It encodes what a picture autoencoder made of each frame. Read `TemporalAutoencoder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models._causal import CausalConv, residuals, through

RESIDUAL: dict[str, Any] = {"eps": 1e-5, "bias": False, "shortcut": "conv3"}
"""What is particular to the residual blocks here."""


class TemporalEncoder(nn.Module):
    """Encodes features of frames; see `TemporalAutoencoder`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        widths: Sequence[int],
        count: int,
        halved: Sequence[bool],
        groups: int,
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv(inputs, widths[0], bias=False)
        self.block_res_blocks = nn.ModuleList(
            residuals(before, own, count, groups, **RESIDUAL)
            for before, own in pairwise([widths[0], *widths])
        )
        # A kernel of three steps by two with one frame of zeros: blocks of two frames, looking one
        # frame back.
        self.conv_blocks = nn.ModuleList(
            CausalConv(own, own, stride=(2, 1, 1), before=1) if half else nn.Identity()
            for own, half in zip(widths, halved, strict=False)
        )
        self.res_blocks = residuals(widths[-1], widths[-1], count, groups, **RESIDUAL)
        self.norm1 = nn.GroupNorm(groups, widths[-1])
        self.conv2 = CausalConv(widths[-1], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Encodes ``[B, C, 4 k, h, w]`` to moments ``[B, 2 C, k, h, w]``."""
        x = self.conv_in(x)
        for level, blocks in enumerate(self.block_res_blocks):
            x = through(blocks, x)
            if level < len(self.conv_blocks):
                x = self.conv_blocks[level](x)
        return self.conv2(F.silu(self.norm1(through(self.res_blocks, x))))


class TemporalDecoder(nn.Module):
    """Decodes to features of frames; see `TemporalAutoencoder`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        widths: Sequence[int],
        count: int,
        halved: Sequence[bool],
        groups: int,
    ) -> None:
        super().__init__()
        self.halved = tuple(halved)
        self.conv1 = CausalConv(inputs, widths[-1])
        self.res_blocks = residuals(widths[-1], widths[-1], count, groups, **RESIDUAL)
        self.block_res_blocks = nn.ModuleList(
            residuals(before, own, count, groups, **RESIDUAL)
            for own, before in pairwise([*widths, widths[-1]])
        )
        self.conv_blocks = nn.ModuleList(
            CausalConv(own, 2 * own) if half else nn.Identity()
            for own, half in zip(widths[1:], halved, strict=True)
        )
        self.norm1 = nn.GroupNorm(groups, widths[0])
        self.conv_out = CausalConv(widths[0], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Decodes ``[B, C, k, h, w]`` to ``[B, C, 4 k, h, w]``."""
        x = through(self.res_blocks, self.conv1(x))
        for level in reversed(range(len(self.block_res_blocks))):
            x = through(self.block_res_blocks[level], x)
            if level and self.halved[level - 1]:
                # Every second channel is the later one of two frames.
                x = self.conv_blocks[level - 1](x).unflatten(1, (-1, 2))
                x = x.permute(0, 1, 3, 2, 4, 5).flatten(2, 3)
        return self.conv_out(F.silu(self.norm1(x)))


class TemporalAutoencoder(nn.Module):
    """Encoder, decoder and the convolutions of one position between them."""

    def __init__(
        self,
        channels: int = 4,
        latent_channels: int = 4,
        filters: int = 128,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4),
        num_res_blocks: int = 4,
        temporal_downsample: Sequence[bool] = (False, True, True),
        num_groups: int = 32,
    ) -> None:
        super().__init__()
        self.latent_channels = latent_channels
        self.step = 2 ** sum(temporal_downsample)
        widths = [filters * times for times in channel_multipliers]
        rest = (widths, num_res_blocks, temporal_downsample, num_groups)
        self.encoder = TemporalEncoder(channels, 2 * latent_channels, *rest)
        self.quant_conv = CausalConv(2 * latent_channels, 2 * latent_channels, 1)
        self.post_quant_conv = CausalConv(latent_channels, latent_channels, 1)
        self.decoder = TemporalDecoder(latent_channels, channels, *rest)

    def moments(self, features: Tensor, padding: int) -> Tensor:
        """Encodes features of frames, with frames of zeros before them."""
        padded = F.pad(features, (0, 0, 0, 0, padding, 0)) if padding else features
        return self.quant_conv(self.encoder(padded))

    def decode(self, latents: Tensor, padding: int) -> Tensor:
        """Decodes to features of frames, without the frames that were put before them."""
        return self.decoder(self.post_quant_conv(latents))[:, :, padding:]
