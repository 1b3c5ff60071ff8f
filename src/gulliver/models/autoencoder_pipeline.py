"""The causal temporal autoencoder of Open-Sora 1.2: four times fewer frames, same resolution.

It encodes the features of an image autoencoder over time. Start with `TemporalAutoencoder`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models.autoencoder_causal import CausalConv, residuals, through
from gulliver.models.autoencoder_frames import FrameAutoencoder
from gulliver.models.autoencoders import check_latents, check_length, check_space, regrouped
from gulliver.models.configurations import checked_quirks

RESIDUAL: dict[str, Any] = {"eps": 1e-5, "bias": False, "shortcut": "conv3"}


class TemporalEncoder(nn.Module):
    """Encoder of `TemporalAutoencoder`."""

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
        # A kernel of three and a stride of two in time with one frame of zero padding: blocks of
        # two frames that look back one frame.
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
    """Decoder of `TemporalAutoencoder`."""

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
        x = through(self.res_blocks, self.conv1(x))
        for level in reversed(range(len(self.block_res_blocks))):
            x = through(self.block_res_blocks[level], x)
            if level and self.halved[level - 1]:
                # The odd channels are the later one of two frames.
                x = self.conv_blocks[level - 1](x).unflatten(1, (-1, 2))
                x = x.permute(0, 1, 3, 2, 4, 5).flatten(2, 3)
        return self.conv_out(F.silu(self.norm1(x)))


class TemporalAutoencoder(nn.Module):
    """Compresses features of frames over time: encoder, decoder and pointwise convolutions."""

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
        """Encodes features to moments, after prepending `padding` zero frames."""
        padded = F.pad(features, (0, 0, 0, 0, padding, 0)) if padding else features
        return self.quant_conv(self.encoder(padded))

    def decode(self, latents: Tensor, padding: int) -> Tensor:
        """Decodes to features of frames, and drops the `padding` frames."""
        return self.decoder(self.post_quant_conv(latents))[:, :, padding:]


# The autoencoder of Open-Sora 1.2: a picture autoencoder per frame, then a causal temporal one.
#
# The state dict uses the public names. A clip is padded with zero frames at the start to a multiple
# of four, which are removed after decoding: `decode` needs the number of frames if it is not 4 k +
# 1.
#
# The public code encodes a clip in independent pieces of 17 frames, with visible seams. Its models
# were trained on such latents, which the quirk ``micro_frames`` reproduces; ``compat=()`` encodes a
# clip as a whole.
#
# Shapes: videos ``[B, 3, T, H, W]`` in [-1, 1]; latents ``[B, 4, T / 4, H / 8, W / 8]``.


MICRO_FRAMES = 17
"""Frames per chunk in Open-Sora's implementation."""
SHIFT = (-0.10, 0.34, 0.27, 0.98)
SCALE = (3.85, 2.32, 2.33, 3.06)


class PipelineAutoencoder(nn.Module):
    """Autoencoder that compresses each frame, then the frames' features over time.

    Args:
        spatial: fields of the image autoencoder, as for `FrameAutoencoder`.
        temporal: fields of the temporal autoencoder, as for `TemporalAutoencoder`.
        shift: means of the latent channels.
        scale: standard deviations of the latent channels, by which latents are divided.
        compat: names of enabled `QUIRKS`; None for those that the published weights need.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        spatial: Mapping[str, Any] | None = None,
        temporal: Mapping[str, Any] | None = None,
        shift: Sequence[float] = SHIFT,
        scale: Sequence[float] = SCALE,
        compat: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.compat = checked_quirks("PipelineAutoencoder", compat)
        frames, time = FrameAutoencoder(**(spatial or {})), TemporalAutoencoder(**(temporal or {}))
        self.spatial_vae = nn.ModuleDict({"module": frames})
        self.temporal_vae = time
        self.register_buffer("scale", torch.tensor(scale).view(1, -1, 1, 1, 1))
        self.register_buffer("shift", torch.tensor(shift).view(1, -1, 1, 1, 1))
        self.latent_channels = time.latent_channels
        self.compression = (time.step, *frames.compression[1:])
        # In a dict, so that no module has a second name in the state dict.
        self.networks = {"encoder": _Encoder(frames, time), "decoder": _Decoder(frames, time)}

    @property
    def micro_frames(self) -> int | None:
        """Frames per separately encoded chunk; None if clips are not chunked."""
        return MICRO_FRAMES if "micro_frames" in self.compat else None

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        whole, rest = divmod(frames, self.micro_frames or frames)
        count = whole * self._steps(self.micro_frames or frames) + self._steps(rest)
        return self.latent_channels, count, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        self.latent_shape(*video.shape[2:])
        if self.micro_frames is None:
            return self.stream_encoder(video, video.shape[2])
        return torch.cat(list(self.encode_pieces([video])), 2)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents ``[B, C, t, h, w]`` to `num_frames` frames.

        By default every chunk has 4 k + 1 frames.
        """
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        if self.micro_frames is None:
            return self.stream_decoder(latents, num_frames)
        return torch.cat(list(self.decode_pieces([latents], num_frames)), 2)

    def moments(self, video: Tensor) -> Tensor:
        return self.networks["encoder"](video, self._padding(video.shape[2]))

    def encode_pieces(self, clips: Iterable[Tensor], frames: int | None = None) -> Iterator[Tensor]:
        """Encodes a stream of frames in chunks, like Open-Sora's reference implementation."""
        for piece in regrouped(clips, MICRO_FRAMES):
            yield self.stream_encoder(piece, piece.shape[2])

    def decode_pieces(
        self, latents: Iterable[Tensor], frames: int | None = None
    ) -> Iterator[Tensor]:
        left = frames
        for piece in regrouped(latents, self._steps(MICRO_FRAMES)):
            held = None if left is None else min(MICRO_FRAMES, left)
            yield self.stream_decoder(piece, held)
            left = None if left is None or held is None else left - held

    def stream_encoder(self, video: Tensor, frames: int | None = None) -> Tensor:
        """Encodes a clip without splitting it into chunks; `frames` defaults to 4 k + 1."""
        mean = self.networks["encoder"](video, self._padding(frames)).chunk(2, 1)[0]
        return (mean - self.shift.to(mean.dtype)) / self.scale.to(mean.dtype)

    def stream_decoder(self, latents: Tensor, frames: int | None = None) -> Tensor:
        """Decodes latents without splitting them into chunks; see `stream_encoder`."""
        raw = latents * self.scale.to(latents.dtype) + self.shift.to(latents.dtype)
        return self.networks["decoder"](raw, self._padding(frames))

    def _padding(self, frames: int | None) -> int:
        return -(frames or 1) % self.temporal_vae.step

    def _steps(self, frames: int) -> int:
        return -(-frames // self.temporal_vae.step)


class _Halves(nn.Module):
    """Image and temporal autoencoder; the default padding is that of a clip of 4 k + 1 frames."""

    def __init__(self, frames: FrameAutoencoder, time: TemporalAutoencoder) -> None:
        super().__init__()
        self.frames, self.time = frames, time


class _Encoder(_Halves):
    def forward(self, video: Tensor, padding: int = 3) -> Tensor:
        return self.time.moments(self.frames.stream_encoder(video), padding)


class _Decoder(_Halves):
    def forward(self, latents: Tensor, padding: int = 3) -> Tensor:
        return self.frames.stream_decoder(self.time.decode(latents, padding))
