"""Adapts diffusers' autoencoder classes to the interface of `gulliver.models`.

    autoencoder = DiffusersAutoencoder(AutoencoderKLHunyuanVideo.from_pretrained(folder))

The networks run unchanged, but without diffusers' blended tiles for long clips, and without the
mask of HunyuanVideo's middle block. CogVideoX and Wan process a clip in chunks and pass on the
last frames of each, as do `encode_pieces` and `decode_pieces`. diffusers is optional, and imported
only for its classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.errors import GulliverError, nearest
from gulliver.models.autoencoder_frames import OnFrames
from gulliver.models.autoencoders import (
    check_causal,
    check_latents,
    check_length,
    check_space,
    regrouped,
)
from gulliver.parallel.convolution.networks import without_masks

KNOWN = (
    "AutoencoderKL",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLWan",
)
"""Classes whose results are tested against diffusers' own."""


def load_diffusers(path: Path, config: dict[str, Any]) -> DiffusersAutoencoder:
    name = config["_class_name"]
    if name not in KNOWN:
        raise GulliverError(f"{path} has the unsupported class {name!r}: {nearest(name, KNOWN)}")
    try:
        import diffusers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise GulliverError(
            f"{path} is a diffusers {name}; install it with pip install diffusers"
        ) from None
    module = getattr(diffusers, name).from_config(config)
    load_huggingface(module, path)
    return DiffusersAutoencoder(module)


class DiffusersAutoencoder(nn.Module):
    """Encodes and decodes with a diffusers module of one of the classes in `KNOWN`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        if type(module).__name__ not in KNOWN:
            name = type(module).__name__
            raise GulliverError(f"{name} is not a supported class: {nearest(name, KNOWN)}")
        self.module = module
        config = module.config
        self.latent_channels = int(config.get("latent_channels") or config.get("z_dim"))
        self.compression = _compression(module)
        self.networks: dict[str, nn.Module] = {}
        takes = inspect.signature(module.encoder.forward).parameters
        if "conv_cache" in takes:
            self._pieces: Any = _CogPieces(module)
        elif "feat_cache" in takes:
            self._pieces = _WanPieces(module)
        else:
            self._pieces = None
            halves = (
                (module.encoder, module.quant_conv),
                (module.post_quant_conv, module.decoder),
            )
            made = [
                OnFrames(parts, 4) if self.compression[0] == 1 else _OptionalSequential(*parts)
                for parts in halves
            ]
            self.networks = dict(zip(("encoder", "decoder"), made, strict=True))

    @property
    def micro_frames(self) -> int | None:
        """Frames per chunk; None if clips are not chunked."""
        return None if self._pieces is None else self._pieces.frames

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        count = check_causal(self, frames) if self.compression[0] > 1 else max(1, frames)
        return self.latent_channels, count, *check_space(self, height, width)

    def encode(self, video: Tensor) -> Tensor:
        self.latent_shape(*video.shape[2:])
        if self._pieces is None:
            with without_masks(self.module):
                return self.stream_encoder(video)
        return torch.cat(list(self.encode_pieces([video], video.shape[2])), 2)

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents; `num_frames` is the expected number of decoded frames."""
        check_latents(self, latents)
        check_length(self, latents, num_frames)
        if self._pieces is None:
            with without_masks(self.module):
                return self.stream_decoder(latents)
        frames = (latents.shape[2] - 1) * self.compression[0] + 1
        return torch.cat(list(self.decode_pieces([latents], frames)), 2)

    def encode_pieces(self, clips: Iterable[Tensor], frames: int | None = None) -> Iterator[Tensor]:
        """Encodes a stream of frames in chunks, as diffusers does."""
        for moments in self._pieces.encoded(clips, frames):
            yield self._normalised(moments.chunk(2, 1)[0])

    def decode_pieces(
        self, latents: Iterable[Tensor], frames: int | None = None
    ) -> Iterator[Tensor]:
        yield from self._pieces.decoded((self._raw(part) for part in latents), frames)

    def stream_encoder(self, video: Tensor) -> Tensor:
        """Encodes a clip without splitting it into chunks."""
        return self._normalised(self.networks["encoder"](video).chunk(2, 1)[0])

    def stream_decoder(self, latents: Tensor) -> Tensor:
        return self.networks["decoder"](self._raw(latents))

    def _normalised(self, latents: Tensor) -> Tensor:
        shift, scale = self._statistics(latents)
        return (latents - shift) * scale

    def _raw(self, latents: Tensor) -> Tensor:
        shift, scale = self._statistics(latents)
        return latents / scale + shift

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.module.config
        shift = config.get("latents_mean") or config.get("shift_factor") or 0.0
        spread = config.get("latents_std") or 1.0
        shift, spread = (
            torch.tensor(v, dtype=x.dtype, device=x.device).view(1, -1, 1, 1, 1)
            for v in (shift, spread)
        )
        return shift, (config.get("scaling_factor") or 1.0) / spread


def _compression(module: Any) -> tuple[int, int, int]:
    config = module.config
    time = config.get("temporal_compression_ratio") or config.get("scale_factor_temporal") or 1
    side = config.get("spatial_compression_ratio") or config.get("scale_factor_spatial")
    side = side or 2 ** (len(config["block_out_channels"]) - 1)
    return int(time), int(side), int(side)


class _OptionalSequential(nn.Sequential):
    """A sequence that skips entries that are None."""

    def __init__(self, *parts: nn.Module | None) -> None:
        super().__init__(*(part for part in parts if part is not None))


class _CogPieces:
    """CogVideoX: chunks of 8 frames (2 latent frames); the first chunk includes the remainder."""

    def __init__(self, module: Any) -> None:
        self.module, self.frames = module, module.num_sample_frames_batch_size

    def encoded(self, clips: Iterable[Tensor], frames: int | None) -> Iterator[Tensor]:
        first = self.frames + (1 if frames is None else frames % self.frames)
        yield from self._passed_on(clips, self.frames, first, None, self.module.encoder)

    def decoded(self, latents: Iterable[Tensor], frames: int | None) -> Iterator[Tensor]:
        size = self.module.num_latent_frames_batch_size
        step = self.module.config.temporal_compression_ratio
        first = size + (1 if frames is None else math.ceil(frames / step) % size)
        before = self.module.post_quant_conv
        yield from self._passed_on(latents, size, first, before, self.module.decoder)

    def _passed_on(
        self, parts: Iterable[Tensor], size: int, first: int, before: Any, network: Any
    ) -> Iterator[Tensor]:
        after = self.module.quant_conv if network is self.module.encoder else None
        cache = None
        for piece in regrouped(parts, size, first=first):
            made, cache = network(piece if before is None else before(piece), conv_cache=cache)
            yield made if after is None else after(made)


class _WanPieces:
    """Wan: the first frame alone, then chunks of 4 frames (1 latent frame)."""

    frames = 4

    def __init__(self, module: Any) -> None:
        self.module = module

    def encoded(self, clips: Iterable[Tensor], frames: int | None) -> Iterator[Tensor]:
        module, size = self.module, self.module.config.patch_size
        module.clear_cache()
        cache = module._enc_feat_map
        for piece in regrouped(clips, 4, first=1):
            if size is not None:
                piece = _patches(module).patchify(piece, patch_size=size)
            made = module.encoder(piece, feat_cache=cache, feat_idx=[0])
            yield module.quant_conv(made)
        module.clear_cache()

    def decoded(self, latents: Iterable[Tensor], frames: int | None) -> Iterator[Tensor]:
        module, size = self.module, self.module.config.patch_size
        module.clear_cache()
        cache = module._feat_map
        for number, piece in enumerate(regrouped(latents, 1)):
            raw = module.post_quant_conv(piece)
            first = {"first_chunk": True} if number == 0 else {}
            made = module.decoder(raw, feat_cache=cache, feat_idx=[0], **first)
            if size is not None:
                made = _patches(module).unpatchify(made, patch_size=size)
            yield made.clamp(-1, 1)
        module.clear_cache()


def _patches(module: Any) -> Any:
    return inspect.getmodule(type(module))
