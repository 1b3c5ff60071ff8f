"""Layers of causal video autoencoders: zeros stand before the first frame."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from gulliver.errors import GulliverError, nearest
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
    """A 3-D convolution that sees the present and earlier frames."""

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
        """Convolves ``[B, C, T, H, W]``."""
        return self.conv(F.pad(x, (0, 0, 0, 0, self.before, 0)) if self.before else x)


class CausalResidual(nn.Module):
    """Norm, SiLU, convolution, twice, and a shortcut."""

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
        """Adds the convolutions' output."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        shortcut = getattr(self, self.shortcut, None)
        return h + (x if shortcut is None else shortcut(x))


def residuals(
    inputs: int, outputs: int, count: int, groups: int, eps: float, bias: bool, shortcut: str
) -> nn.ModuleList:
    """Returns residual blocks, the first of which changes the channels."""
    widths = [inputs] + [outputs] * count
    return nn.ModuleList(
        CausalResidual(a, b, groups, eps, bias, shortcut) for a, b in pairwise(widths)
    )


def through(blocks: nn.Module, x: Tensor) -> Tensor:
    """Calls modules one after the other; of a list its modules, too."""
    for block in blocks.children():
        x = through(block, x) if isinstance(block, nn.ModuleList) else block(x)
    return x


# Statistics of the latents of Open-Sora 1.3's autoencoder: what its models expect.
#
# Means and deviations of the 16 channels, over whole clips (``video``) or for each of the five
# latent frames of a piece of 17 frames (``video_5frames``). Facts of the public weights, to nine
# digits.


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
PIECE_MEANS = (
    (-0.310381383, -0.174883023, -0.139006495, -0.112284191, -0.214308396),
    (0.0897552744, -0.0559542328, -0.0701738298, -0.128422827, -0.0592224225),
    (0.00972988363, 0.0223069917, 0.0238451157, 0.0233360324, 0.024730036),
    (0.106182761, -0.109029539, 0.0607197843, 0.100053392, -0.064660348),
    (0.0293846559, 0.0527690649, -0.0128054805, -0.0303686094, -0.0969020873),
    (0.0171699096, -0.00723328395, 0.00113727944, -0.00299318647, -0.00267917616),
    (0.115011312, 0.0874074548, 0.0757848024, 0.0742846727, 0.0664027855),
    (0.0436057746, 0.125319287, 0.0574030802, 0.0971641764, 0.121611729),
    (-0.00380059308, 0.0669507161, 0.0037457007, 0.000646243338, -0.0204937384),
    (0.0944265723, 0.0474720523, 0.043563962, 0.0550657511, 0.163805649),
    (-0.176900789, -0.137355044, -0.0225914493, 0.0332081765, -0.0589708649),
    (0.0494649373, 0.0629776567, 0.0469673015, 0.0424522832, 0.0507443883),
    (-0.0520139523, -0.0383668132, -0.00183036912, -0.0057245153, -0.00693384837),
    (-0.068219386, -0.137915343, -0.145952463, -0.119555518, -0.139909118),
    (-0.00970380194, -0.014363708, -0.00513305934, 0.00680994568, 0.00308005395),
    (-0.143932387, -0.00912384037, -0.0186387096, -0.00570942182, 0.0620580912),
)
PIECE_DEVIATIONS = (
    (0.996910512, 0.945940912, 0.916742325, 0.928850234, 0.899329841),
    (1.01929355, 0.941669226, 0.93469429, 0.935369372, 0.900303721),
    (0.983393371, 0.908229828, 0.930842698, 0.962482572, 0.93497318),
    (0.971861362, 0.910520017, 0.887819588, 0.86988616, 0.863094449),
    (1.02020574, 0.944731951, 0.93303609, 0.963245213, 0.921047866),
    (1.03855872, 0.887676775, 0.736891687, 0.758069873, 0.750872552),
    (1.05921268, 0.865704298, 0.821517944, 0.847671807, 0.820949376),
    (0.992097199, 0.927169025, 0.898868442, 0.928998172, 0.886912227),
    (1.03590059, 0.959939539, 0.946561277, 0.980175674, 0.934220016),
    (0.962185979, 0.882872224, 0.871039152, 0.880846381, 0.851632476),
    (0.95604372, 0.845335364, 0.830891311, 0.825838983, 0.801084101),
    (0.987995565, 0.811465979, 0.756189764, 0.788990974, 0.7724365),
    (0.958446205, 0.885802686, 0.899209440, 0.922968805, 0.88479799),
    (0.906037927, 0.786324561, 0.737436533, 0.761473298, 0.742873847),
    (0.964859784, 0.871286511, 0.890293121, 0.894709289, 0.870981634),
    (1.01701963, 0.933048785, 0.914440095, 0.929465294, 0.887158334),
)

STATISTICS: dict[str, tuple[Any, Any]] = {
    "video": (VIDEO_MEANS, VIDEO_DEVIATIONS),
    "video_5frames": (PIECE_MEANS, PIECE_DEVIATIONS),
}
"""Means and deviations by the public name of their table."""


# The autoencoder of Open-Sora 1.3: one causal network for rows, columns and time.
#
# The names of the state dict are the public ones. The public code encodes a long clip in pieces of
# 17 frames that share one, whose two decodings are averaged (the quirk ``micro_frames``), and the
# tokens of its middle block see those before them in raster order (``raster_causal_attention``);
# both are what its weights and its models were trained with. With ``compat=()`` a clip is encoded
# as one and tokens see all of their own frame.
#
# Shapes: videos ``[B, 3, 4 k + 1, H, W]`` in [-1, 1]; latents ``[B, 16, k + 1, H / 8, W / 8]``.


MICRO_FRAMES = 17
"""Frames of a piece of the public code, of which neighbours share one."""
RESIDUAL: dict[str, Any] = {"eps": EPS, "bias": True, "shortcut": "nin_shortcut"}
"""What is particular to the residual blocks here."""


def frame_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, scale: float | None = None
) -> Tensor:
    """Computes attention in which tokens see those of their own frame and of earlier ones."""
    # `gulliver.parallel.convolution` knows a function of this name by its name, and computes it
    # where a process holds a part of the tokens.
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
    """Attention of one head over the tokens so far: in raster order, or by whole frames."""

    def __init__(self, channels: int, groups: int, raster: bool) -> None:
        super().__init__()
        self.raster = raster
        self.norm = nn.GroupNorm(groups, channels, EPS)
        self.q, self.k, self.v, self.proj_out = (
            CausalConv(channels, channels, 1) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds the attention's output."""
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
    """Halves rows and columns of every frame."""

    def forward(self, x: Tensor) -> Tensor:
        """Resamples ``[B, C, T, H, W]``."""
        return on_frames(super().forward, x)


class SpatialUpsample(FrameUpsample):
    """Doubles rows and columns of every frame."""

    def forward(self, x: Tensor) -> Tensor:
        """Resamples ``[B, C, T, H, W]``."""
        return on_frames(super().forward, x)


class Enlarged(nn.Module):
    """Two convolutions with norms and a residual, as they follow an enlargement."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = CausalConv(channels, channels), CausalConv(channels, channels)
        self.norm1, self.norm2 = (nn.GroupNorm(groups, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolutions' output, within the last activation."""
        h = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(h)) + x)


class Upsample(nn.Module):
    """Doubles frames, rows and columns."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv3d = Enlarged(channels, groups)

    def forward(self, x: Tensor) -> Tensor:
        """Resamples ``[B, C, T, H, W]``."""
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3d(x) + x


class Downsample(nn.Module):
    """Halves frames, rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, stride=(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Resamples ``[B, C, T, H, W]``."""
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
    """Encodes clips to moments; see `CausalAutoencoder`."""

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
            # The last ones, so that time is halved where pictures are small.
            halved = number >= len(widths) - 1 - in_time
            level["downsample"] = Downsample(width) if halved else SpatialDownsample(width)
        self.down = nn.ModuleList(levels)
        self.mid = _middle(widths[-1], groups, raster)
        self.norm_out = nn.GroupNorm(groups, widths[-1], EPS)
        self.conv_out = CausalConv(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Encodes ``[B, 3, 4 k + 1, H, W]``."""
        x = self.conv_in(x)
        for level in self.down:
            x = through(level, x)
        return self.conv_out(F.silu(self.norm_out(through(self.mid, x))))


class CausalDecoder(nn.Module):
    """Decodes to clips; see `CausalAutoencoder`."""

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
        """Decodes ``[B, C, k + 1, h, w]``; the copies of the first frame are dropped."""
        x = through(self.mid, self.conv_in(x))
        for number in reversed(range(len(self.up))):
            x = through(self.up[number], x)
        x = self.conv_out(F.pad(F.silu(self.norm_out(x)), (0, 0, 0, 0, 2, 0)))
        return x[:, :, self.dropped :]


class CausalAutoencoder(nn.Module):
    """Encodes clips of 4 k + 1 frames, the first of which stands alone.

    Args:
        latent_channels: channels of the latents.
        channels: channels of the first resolution.
        channel_multipliers: factors of the channels of each resolution.
        num_res_blocks: residual blocks of each resolution of the encoder; the decoder has one more.
        temporal_downsamples: number of the resolutions, the last ones, that halve time too.
        num_groups: groups of all norms.
        normalization: table of statistics that latents are normalised by, ``video`` or
            ``video_5frames``; None for latents as they are.
        compat: names of `QUIRKS` that it shall have; None for those of its public weights.

    Raises:
        GulliverError: an unknown table or quirk, or a table that needs pieces without them.
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
        self.normalization = _checked_table(normalization, self.micro_frames, latent_channels)
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
        """Frames of a piece that is encoded by itself; None for a clip as one."""
        return MICRO_FRAMES if "micro_frames" in self.compat else None

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns channels, frames, rows and columns of the latents of a clip.

        Raises:
            GulliverError: the sizes do not fit; the nearest that do are named.
        """
        count = check_causal(self, frames)
        if self.micro_frames is not None and frames > 1:
            whole, rest = divmod(frames - 1, self.micro_frames - 1)
            steps = self.compression[0]
            count = whole * self._piece + (rest // steps + 1 if rest else 0)
        return self.latent_channels, count, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes ``[B, 3, 4 k + 1, H, W]`` to normalised latents."""
        self.latent_shape(*video.shape[2:])
        if self.micro_frames is None:
            return self.stream_encoder(video)
        return torch.cat(list(self.encode_pieces([video])), 2)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalised latents; `num_frames` may say how many frames they are of."""
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        if self.micro_frames is None:
            return self.stream_decoder(latents)
        return torch.cat(list(self.decode_pieces([latents])), 2)

    def moments(self, video: Tensor) -> Tensor:
        """Returns mean and log-variance of a piece ``[B, 2 C, ...]``, not normalised."""
        return self.encoder(video)

    def encode_pieces(self, clips: Iterable[Tensor], frames: int | None = None) -> Iterator[Tensor]:
        """Encodes stretches of a clip of any length, piece by piece, as the public code does."""
        for piece in regrouped(clips, MICRO_FRAMES, overlap=1):
            yield self.stream_encoder(piece)

    def decode_pieces(
        self, latents: Iterable[Tensor], frames: int | None = None
    ) -> Iterator[Tensor]:
        """Decodes stretches of a clip's latents piece by piece; see `encode_pieces`.

        The frame that two pieces share is the mean of both decodings.
        """
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
        """Encodes any stretch of a clip as one."""
        mean = self.encoder(video).chunk(2, 1)[0]
        if self.normalization is None:
            return mean
        shift, scale = self._statistics(mean)
        return (mean - shift) / scale

    def stream_decoder(self, latents: Tensor) -> Tensor:
        """Decodes any stretch of a clip's latents as one."""
        if self.normalization is not None:
            shift, scale = self._statistics(latents)
            latents = latents * scale + shift
        return self.decoder(latents)

    @property
    def _piece(self) -> int:
        """Latent frames of a whole piece."""
        return (MICRO_FRAMES - 1) // self.compression[0] + 1

    def _statistics(self, x: Tensor) -> list[Tensor]:
        """Means and deviations of the latents of a clip, or of a piece where they are many."""
        assert self.normalization is not None
        tables = STATISTICS[self.normalization]
        made = [torch.tensor(t, dtype=x.dtype, device=x.device) for t in tables]
        # [C] of a clip, or [C, t] of the latent frames of a piece.
        return [
            t.view(1, -1, 1, 1, 1) if t.dim() == 1 else t[None, :, : x.shape[2], None, None]
            for t in made
        ]


def _checked_table(name: str | None, micro_frames: int | None, channels: int) -> str | None:
    if name is None:
        return None
    if name not in STATISTICS:
        raise GulliverError(f"normalization={name!r}: {nearest(name, STATISTICS)}")
    if channels != len(STATISTICS[name][0]):
        raise GulliverError(
            f"normalization={name!r} is of latents of {len(STATISTICS[name][0])} channels, these "
            f"have {channels}: pass normalization=None"
        )
    if name == "video_5frames" and micro_frames is None:
        raise GulliverError(
            "normalization='video_5frames' is of pieces of 17 frames: leave 'micro_frames' in "
            "compat, or take 'video'"
        )
    return name
