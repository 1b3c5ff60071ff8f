"""Layers of causal video autoencoders, which pad clips with zeros before the first frame."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from gulliver.errors import GulliverError
from gulliver.models.autoencoder_frames import EPS, FrameDownsample, FrameUpsample, on_frames
from gulliver.models.autoencoders import (
    check_causal,
    check_latents,
    check_length,
    check_space,
    regrouped,
)
from gulliver.models.configurations import checked_quirks


class CausalConv(nn.Module):
    """A 3-D convolution that is causal in time."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: tuple[int, int, int] = (1, 1, 1),
        before: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.before = kernel - 1 if before is None else before
        around = (0, kernel // 2, kernel // 2)
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride, around, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 0, 0, 0, self.before, 0)) if self.before else x)


class CausalResidual(nn.Module):
    """Residual block: norm, SiLU and convolution, twice."""

    def __init__(
        self, inputs: int, outputs: int, groups: int, eps: float, bias: bool, shortcut: str
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs, eps)
        self.conv1 = CausalConv(inputs, outputs, bias=bias)
        self.norm2 = nn.GroupNorm(groups, outputs, eps)
        self.conv2 = CausalConv(outputs, outputs, bias=bias)
        self.shortcut = shortcut
        if inputs != outputs:
            self.add_module(shortcut, CausalConv(inputs, outputs, 1, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        shortcut = getattr(self, self.shortcut, None)
        return h + (x if shortcut is None else shortcut(x))


def residuals(
    inputs: int, outputs: int, count: int, groups: int, eps: float, bias: bool, shortcut: str
) -> nn.ModuleList:
    """Returns a list of residual blocks; the first one changes the number of channels."""
    widths = [inputs] + [outputs] * count
    return nn.ModuleList(
        CausalResidual(a, b, groups, eps, bias, shortcut) for a, b in pairwise(widths)
    )


def through(blocks: nn.Module, x: Tensor) -> Tensor:
    """Calls modules in sequence, flattening module lists."""
    for block in blocks.children():
        x = through(block, x) if isinstance(block, nn.ModuleList) else block(x)
    return x


# Latent statistics of Open-Sora 1.3's autoencoder, as its models expect.
#
# Means and deviations of the 16 channels, over whole clips, to nine digits. From the public
# weights.


VIDEO_MEANS = (
    -0.190169498, -0.044800628, 0.0207897052, 0.0186533574, -0.011585569, 0.00108655752,
    0.0837893337, 0.08902134, 0.00940945465, 0.0808684826, -0.0725162774, 0.0505214408,
    -0.0209724810, -0.122307919, -0.00386235653, -0.023072388,
)  # fmt: skip
VIDEO_DEVIATIONS = (
    0.949077606, 0.9594118, 0.944430292, 0.910328448, 0.959351659, 0.843035161, 0.888812482,
    0.929113686, 0.972594142, 0.891795397, 0.863085389, 0.827989161, 0.911430001, 0.792284489,
    0.899140716, 0.947351396,
)  # fmt: skip


# The autoencoder of Open-Sora 1.3: one causal network for rows, columns and time.
#
# The state dict uses the public names. The public code encodes a long clip in pieces of 17 frames
# that share one frame, and averages its two decodings (the quirk ``micro_frames``). In its middle
# block, tokens attend to earlier tokens in raster order (``raster_causal_attention``). Its weights
# and models were trained this way. With ``compat=()`` a clip is encoded as a whole and tokens
# attend to their entire frame.
#
# Shapes: videos ``[B, 3, 4 k + 1, H, W]`` in [-1, 1]; latents ``[B, 16, k + 1, H / 8, W / 8]``.


MICRO_FRAMES = 17
"""Frames per chunk in Open-Sora's implementation; consecutive chunks share one frame."""
RESIDUAL: dict[str, Any] = {"eps": EPS, "bias": True, "shortcut": "nin_shortcut"}


def frame_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, scale: float | None = None
) -> Tensor:
    """Computes attention of each token to the tokens of its own and all earlier frames."""
    # `gulliver.parallel.convolution` recognizes this function by name, and computes it if a process
    # holds a part of the tokens.
    given = q, k, v
    if has_torch_function(given):
        return handle_torch_function(frame_causal_attention, given, q, k, v, tokens, scale)
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, end - tokens : end], k[:, :, :end], v[:, :, :end], scale=scale
        )
        for end in range(tokens, q.shape[2] + 1, tokens)
    ]
    return torch.cat(parts, 2)


class CausalAttention(nn.Module):
    """Single-head attention, causal by token in raster order, or by frame."""

    def __init__(self, channels: int, groups: int, raster: bool) -> None:
        super().__init__()
        self.raster = raster
        self.norm = nn.GroupNorm(groups, channels, EPS)
        self.q, self.k, self.v, self.proj_out = (
            CausalConv(channels, channels, 1) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[2:])
        h = self.norm(x)
        q, k, v = (
            layer(h).flatten(2).transpose(1, 2).unsqueeze(1) for layer in (self.q, self.k, self.v)
        )
        if self.raster:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            made = frame_causal_attention(q, k, v, shape[1] * shape[2])
        return x + self.proj_out(made.squeeze(1).transpose(1, 2).unflatten(2, shape))


class SpatialDownsample(FrameDownsample):
    """`FrameDownsample` for clips."""

    def forward(self, x: Tensor) -> Tensor:
        return on_frames(super().forward, x)


class SpatialUpsample(FrameUpsample):
    """`FrameUpsample` for clips."""

    def forward(self, x: Tensor) -> Tensor:
        return on_frames(super().forward, x)


class UpsampleResidual(nn.Module):
    """Two convolutions with norms and a residual connection, used after upsampling."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = CausalConv(channels, channels), CausalConv(channels, channels)
        self.norm1, self.norm2 = (nn.GroupNorm(groups, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(h)) + x)


class Upsample(nn.Module):
    """Doubles frames, rows and columns."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv3d = UpsampleResidual(channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3d(x) + x


class Downsample(nn.Module):
    """Halves frames, rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, stride=(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def _level(inputs: int, outputs: int, groups: int, count: int) -> nn.ModuleDict:
    return nn.ModuleDict({"block": residuals(inputs, outputs, count, groups, **RESIDUAL)})


def _middle(channels: int, groups: int, raster: bool) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "block_1": CausalResidual(channels, channels, groups, **RESIDUAL),
            "attn_1": CausalAttention(channels, groups, raster),
            "block_2": CausalResidual(channels, channels, groups, **RESIDUAL),
        }
    )


class CausalEncoder(nn.Module):
    """Encoder of `CausalAutoencoder`."""

    def __init__(
        self,
        outputs: int,
        widths: Sequence[int],
        count: int,
        in_time: int,
        groups: int,
        raster: bool,
    ) -> None:
        super().__init__()
        self.conv_in = CausalConv(3, widths[0])
        levels = [_level(a, b, groups, count) for a, b in pairwise([widths[0], *widths])]
        for number, (level, width) in enumerate(zip(levels[:-1], widths, strict=False)):
            # The last ones, so that time is halved at low resolution.
            halved = number >= len(widths) - 1 - in_time
            level["downsample"] = Downsample(width) if halved else SpatialDownsample(width)
        self.down = nn.ModuleList(levels)
        self.mid = _middle(widths[-1], groups, raster)
        self.norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = CausalConv(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = through(level, x)
        return self.conv_out(F.silu(self.norm_out(through(self.mid, x))))


class CausalDecoder(nn.Module):
    """Decoder of `CausalAutoencoder`."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        count: int,
        in_time: int,
        groups: int,
        raster: bool,
    ) -> None:
        super().__init__()
        self.dropped = 2**in_time - 1
        self.conv_in = CausalConv(inputs, widths[-1])
        self.mid = _middle(widths[-1], groups, raster)
        levels = [
            _level(before, own, groups, count + 1)
            for own, before in pairwise([*widths, widths[-1]])
        ]
        for number in range(1, len(widths)):
            doubled = number >= len(widths) - in_time
            width = widths[number]
            own = Upsample(width, groups) if doubled else SpatialUpsample(width)
            levels[number]["upsample"] = own
        self.up = nn.ModuleList(levels)
        self.norm_out = nn.GroupNorm(groups, widths[0], EPS)
        self.conv_out = nn.Conv3d(widths[0], 3, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Decodes ``[B, C, k + 1, h, w]`` and drops the copies of the first frame."""
        x = through(self.mid, self.conv_in(x))
        for number in reversed(range(len(self.up))):
            x = through(self.up[number], x)
        x = self.conv_out(F.pad(F.silu(self.norm_out(x)), (0, 0, 0, 0, 2, 0)))
        return x[:, :, self.dropped :]


class CausalAutoencoder(nn.Module):
    """Autoencoder for clips of 4 k + 1 frames; the first frame is encoded separately.

    Args:
        latent_channels: channels of the latents.
        channels: channels of the first resolution.
        channel_multipliers: channel factors of each resolution.
        num_res_blocks: residual blocks per resolution of the encoder; the decoder has one more.
        temporal_downsamples: number of resolutions, counted from the last, that also halve time.
        num_groups: groups of all norms.
        normalization: ``"video"`` for published statistics of 16 channels; None for raw latents.
        compat: names of enabled `QUIRKS`; None for those that the published weights need.

    Raises:
        GulliverError: a quirk is unknown, or the statistics do not fit `latent_channels`.
    """

    def __init__(
        self,
        latent_channels: int = 16,
        channels: int = 128,
        channel_multipliers: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        temporal_downsamples: int = 2,
        num_groups: int = 32,
        normalization: str | None = "video",
        compat: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.compat = checked_quirks("CausalAutoencoder", compat)
        if normalization is not None and (normalization, latent_channels) != ("video", 16):
            raise GulliverError(
                f"normalization={normalization!r} does not apply to {latent_channels} latent "
                "channels; use 'video' for 16 channels, else None"
            )
        self.normalization = normalization
        widths = [channels * times for times in channel_multipliers]
        rest = (widths, num_res_blocks, temporal_downsamples, num_groups)
        raster = "raster_causal_attention" in self.compat
        self.latent_channels = latent_channels
        side = 2 ** (len(widths) - 1)
        self.compression = (2**temporal_downsamples, side, side)
        self.encoder = CausalEncoder(2 * latent_channels, *rest, raster)
        self.decoder = CausalDecoder(latent_channels, *rest, raster)

    @property
    def micro_frames(self) -> int | None:
        """Frames per separately encoded chunk; None if clips are not chunked."""
        return MICRO_FRAMES if "micro_frames" in self.compat else None

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        count = check_causal(self, frames)
        if self.micro_frames is not None and frames > 1:
            whole, rest = divmod(frames - 1, self.micro_frames - 1)
            steps = self.compression[0]
            count = whole * self._piece + (rest // steps + 1 if rest else 0)
        return self.latent_channels, count, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes ``[B, 3, 4 k + 1, H, W]`` to normalized latents."""
        self.latent_shape(*video.shape[2:])
        if self.micro_frames is None:
            return self.stream_encoder(video)
        return torch.cat(list(self.encode_pieces([video])), 2)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents; `num_frames` is the expected number of decoded frames."""
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        if self.micro_frames is None:
            return self.stream_decoder(latents)
        return torch.cat(list(self.decode_pieces([latents])), 2)

    def moments(self, video: Tensor) -> Tensor:
        """Returns unnormalized mean and log-variance of a chunk ``[B, 2 C, ...]``."""
        return self.encoder(video)

    def encode_pieces(self, clips: Iterable[Tensor], frames: int | None = None) -> Iterator[Tensor]:
        """Encodes a stream of frames in chunks, like the reference implementation."""
        for piece in regrouped(clips, MICRO_FRAMES, overlap=1):
            yield self.stream_encoder(piece)

    def decode_pieces(
        self, latents: Iterable[Tensor], frames: int | None = None
    ) -> Iterator[Tensor]:
        """Decodes a stream of latents in chunks; averages the frame that two chunks share."""
        last = None
        for piece in regrouped(latents, self._piece):
            made = self.stream_decoder(piece)
            if last is not None:
                made = torch.cat([0.5 * (last + made[:, :, :1]), made[:, :, 1:]], 2)
            if made.shape[2] > 1:
                yield made[:, :, :-1]
            last = made[:, :, -1:]
        assert last is not None
        yield last

    def stream_encoder(self, video: Tensor) -> Tensor:
        """Encodes a clip without splitting it into chunks."""
        mean = self.encoder(video).chunk(2, 1)[0]
        if self.normalization is None:
            return mean
        shift, scale = self._statistics(mean)
        return (mean - shift) / scale

    def stream_decoder(self, latents: Tensor) -> Tensor:
        if self.normalization is not None:
            shift, scale = self._statistics(latents)
            latents = latents * scale + shift
        return self.decoder(latents)

    @property
    def _piece(self) -> int:
        return (MICRO_FRAMES - 1) // self.compression[0] + 1

    def _statistics(self, x: Tensor) -> list[Tensor]:
        tables = (VIDEO_MEANS, VIDEO_DEVIATIONS)
        return [
            torch.tensor(t, dtype=x.dtype, device=x.device).view(1, -1, 1, 1, 1) for t in tables
        ]
