"""Layers of image autoencoders, with the names of diffusers' `AutoencoderKL`.

Start with `FrameEncoder` and `FrameDecoder`; `on_frames` applies them to every frame of a clip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from gulliver.errors import GulliverError
from gulliver.models.autoencoders import check_latents, check_length, check_space

EPS = 1e-6


class FrameResidual(nn.Module):
    """Residual block: norm, SiLU and convolution, twice; ``[N, C, H, W]``."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs, EPS)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outputs, EPS)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class FrameAttention(nn.Module):
    """Single-head attention over the pixels of an image."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.group_norm(x.flatten(2)).transpose(1, 2)
        q, k, v = (layer(tokens).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        made = self.to_out[0](F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + made.transpose(1, 2).unflatten(2, tuple(x.shape[2:]))


class FrameMiddle(nn.Module):
    """Middle block: attention between two residual blocks."""

    def __init__(self, channels: int, groups: int, attends: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(FrameResidual(channels, channels, groups) for _ in range(2))
        self.attentions = nn.ModuleList([FrameAttention(channels, groups)] if attends else [])

    def forward(self, x: Tensor) -> Tensor:
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class FrameDownsample(nn.Module):
    """Halves rows and columns; pads only at the bottom and right."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class FrameUpsample(nn.Module):
    """Doubles rows and columns."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _level(inputs: int, outputs: int, groups: int, layers: int) -> nn.Module:
    level = nn.Module()
    widths = [inputs] + [outputs] * layers
    level.resnets = nn.ModuleList(FrameResidual(a, b, groups) for a, b in pairwise(widths))
    return level


def _through(level: nn.Module, resampler: str, x: Tensor) -> Tensor:
    for block in [*level.get_submodule("resnets").children()]:
        x = block(x)
    for block in getattr(level, resampler, ()):
        x = block(x)
    return x


class FrameEncoder(nn.Module):
    """Encodes images ``[N, C, H, W]``."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        channels: Sequence[int],
        layers: int,
        groups: int,
        attends: bool,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(inputs, channels[0], 3, padding=1)
        levels = []
        for before, own in zip([channels[0], *channels], channels, strict=False):
            levels.append(_level(before, own, groups, layers))
            levels[-1].downsamplers = nn.ModuleList([FrameDownsample(own)])
        del levels[-1].downsamplers
        self.down_blocks = nn.ModuleList(levels)
        self.mid_block = FrameMiddle(channels[-1], groups, attends)
        self.conv_norm_out = nn.GroupNorm(groups, channels[-1], EPS)
        self.conv_out = nn.Conv2d(channels[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = _through(level, "downsamplers", x)
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))


class FrameDecoder(nn.Module):
    """Decodes images ``[N, C, H, W]``."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        channels: Sequence[int],
        layers: int,
        groups: int,
        attends: bool,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(inputs, channels[-1], 3, padding=1)
        self.mid_block = FrameMiddle(channels[-1], groups, attends)
        widths, levels = [*reversed(channels)], []
        for before, own in zip([widths[0], *widths], widths, strict=False):
            levels.append(_level(before, own, groups, layers + 1))
            levels[-1].upsamplers = nn.ModuleList([FrameUpsample(own)])
        del levels[-1].upsamplers
        self.up_blocks = nn.ModuleList(levels)
        self.conv_norm_out = nn.GroupNorm(groups, channels[0], EPS)
        self.conv_out = nn.Conv2d(channels[0], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(x))
        for level in self.up_blocks:
            x = _through(level, "upsamplers", x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


def on_frames(call: Callable[[Tensor], Tensor], clip: Tensor, at_once: int | None = None) -> Tensor:
    """Applies a function of images to all frames of clips ``[B, C, T, H, W]``."""
    frames = clip.transpose(1, 2).flatten(0, 1)
    # A part of a clip (`gulliver.parallel.convolution`) is already split along some dim.
    if at_once and not has_torch_function((frames,)) and not torch.is_grad_enabled():
        made = torch.cat([call(some) for some in frames.split(at_once)])
    else:
        made = call(frames)
    return made.unflatten(0, (clip.shape[0], clip.shape[2])).transpose(1, 2)


class OnFrames(nn.Module):
    """Applies a sequence of image modules to all frames of clips; see `on_frames`."""

    # The modules are registered elsewhere under their public names, and must not be registered
    # here.

    def __init__(self, parts: Iterable[nn.Module | None], at_once: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(part for part in parts if part is not None))
        self.at_once = at_once

    def forward(self, clip: Tensor) -> Tensor:
        return on_frames(self.parts, clip, self.at_once)


# Picture autoencoders applied to every frame: those of Stable Diffusion, SDXL and FLUX.
#
# The state dict uses the names of diffusers' `AutoencoderKL`, without requiring diffusers.
# Open-Sora 1.0 and 1.1 encode clips with it; 1.2 uses it before its temporal autoencoder.
#
# Shapes: videos ``[B, 3, T, H, W]`` in [-1, 1]; latents ``[B, C, T, H / 8, W / 8]``.


class FrameAutoencoder(nn.Module):
    """Image autoencoder that encodes every frame separately.

    Args:
        latent_channels: channels of the latents.
        block_out_channels: channels of each resolution, finest first.
        layers_per_block: residual blocks per resolution of the encoder; the decoder has one more.
        norm_num_groups: groups of all norms.
        in_channels: channels of images.
        out_channels: channels of decoded images.
        use_quant_conv: whether a convolution follows the encoder.
        use_post_quant_conv: whether a convolution precedes the decoder.
        mid_block_add_attention: whether the middle blocks have attention.
        scaling_factor: factor that normalizes latents.
        shift_factor: offset subtracted before scaling; None for 0.
        frames_at_once: number of frames computed together when no gradients are needed.

    Raises:
        GulliverError: the groups do not divide the channels.
    """

    def __init__(
        self,
        latent_channels: int = 4,
        block_out_channels: Sequence[int] = (128, 256, 512, 512),
        layers_per_block: int = 2,
        norm_num_groups: int = 32,
        in_channels: int = 3,
        out_channels: int = 3,
        use_quant_conv: bool = True,
        use_post_quant_conv: bool = True,
        mid_block_add_attention: bool = True,
        scaling_factor: float = 0.18215,
        shift_factor: float | None = None,
        frames_at_once: int = 4,
    ) -> None:
        super().__init__()
        if any(width % norm_num_groups for width in block_out_channels):
            raise GulliverError(
                f"norm_num_groups={norm_num_groups} does not divide "
                f"block_out_channels={tuple(block_out_channels)}; use the number of groups that "
                "the weights were trained with"
            )
        self.latent_channels = latent_channels
        side = 2 ** (len(block_out_channels) - 1)
        self.compression = (1, side, side)
        self.scaling_factor, self.shift_factor = scaling_factor, shift_factor or 0.0
        sizes = (block_out_channels, layers_per_block, norm_num_groups, mid_block_add_attention)
        self.encoder = FrameEncoder(in_channels, 2 * latent_channels, *sizes)
        self.decoder = FrameDecoder(latent_channels, out_channels, *sizes)
        both, one = 2 * latent_channels, latent_channels
        self.quant_conv = nn.Conv2d(both, both, 1) if use_quant_conv else None
        self.post_quant_conv = nn.Conv2d(one, one, 1) if use_post_quant_conv else None
        # In a dict, so that no module has a second name in the state dict.
        self.networks = {
            "encoder": OnFrames((self.encoder, self.quant_conv), frames_at_once),
            "decoder": OnFrames((self.post_quant_conv, self.decoder), frames_at_once),
        }

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        return self.latent_channels, frames, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        """Encodes ``[B, 3, T, H, W]`` to normalized latents ``[B, C, T, H / 8, W / 8]``."""
        self.latent_shape(*video.shape[2:])
        return self.stream_encoder(video)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents; `num_frames` is the expected number of decoded frames."""
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        return self.stream_decoder(latents)

    def moments(self, video: Tensor) -> Tensor:
        return self.networks["encoder"](video)

    def stream_encoder(self, video: Tensor) -> Tensor:
        mean = self.moments(video).chunk(2, 1)[0]
        return (mean - self.shift_factor) * self.scaling_factor

    def stream_decoder(self, latents: Tensor) -> Tensor:
        return self.networks["decoder"](latents / self.scaling_factor + self.shift_factor)
