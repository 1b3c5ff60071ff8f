"""The autoencoder interface, the table of public autoencoders, and shared checks.

`build_autoencoder` creates one by name. All encode to *normalized* latents, as used to train
diffusion models, and decode them. Encoding returns the mean of the posterior; to sample from the
posterior, use the `moments` of published autoencoders.

A causal autoencoder encodes clips of 4 k + 1 frames, of which the first is encoded separately. Two
published ones encode a long clip in independent chunks of 17 frames; `regrouped` splits a stream
into such chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from gulliver.errors import GulliverError, check_known
from gulliver.models.configurations import make_of_fields

if TYPE_CHECKING:
    from torch import Tensor, nn


class Autoencoder(Protocol):
    """Interface of all video autoencoders, which are modules."""

    @property
    def compression(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the clip per latent position."""
        ...

    @property
    def latent_channels(self) -> int: ...

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Returns the latent shape of a clip: channels, frames, rows and columns.

        Raises:
            GulliverError: the sizes do not fit; the message suggests the nearest that do.
        """
        ...

    def encode(self, video: Tensor) -> Tensor:
        """Encodes ``[B, 3, T, H, W]`` in [-1, 1] to normalized latents ``[B, C, t, h, w]``."""
        ...

    def decode(self, latents: Tensor, num_frames: int | None = None) -> Tensor:
        """Decodes normalized latents to a clip of `num_frames` frames."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Self: ...

    def eval(self) -> Self: ...


@dataclass(frozen=True)
class AutoencoderConfiguration:
    """Configuration of a public autoencoder."""

    release: str
    # Name of its class in `gulliver.models` or diffusers.
    kind: str
    # Frames, rows and columns of pixels per latent.
    compression: tuple[int, int, int]
    latent_channels: int
    # Frames, height and width of a typical clip, in pixels.
    clip: tuple[int, int, int]
    fields: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def of_diffusers(self) -> bool:
        """Whether diffusers, an optional dependency, defines the class."""
        return self.kind.startswith("AutoencoderKL")


SD = AutoencoderConfiguration(
    "Open-Sora 1.0, 1.1",
    "FrameAutoencoder",
    (1, 8, 8),
    4,
    (16, 512, 512),
    note="each frame separately",
)

AUTOENCODERS: dict[str, AutoencoderConfiguration] = {
    "SD-VAE": SD,
    "SDXL-VAE": replace(
        SD, release="SDXL, PixArt", clip=(1, 1024, 1024), fields={"scaling_factor": 0.13025}
    ),
    "FLUX-VAE": replace(
        SD,
        release="FLUX.1",
        latent_channels=16,
        clip=(1, 768, 768),
        fields={
            "latent_channels": 16,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
        },
    ),
    "OpenSora-VAE-v1.2": AutoencoderConfiguration(
        "Open-Sora 1.2",
        "PipelineAutoencoder",
        (4, 8, 8),
        4,
        (51, 720, 1280),
        note="a picture autoencoder per frame, then a causal temporal one; pieces of 17 frames",
    ),
    "OpenSora-VAE-v1.3": AutoencoderConfiguration(
        "Open-Sora 1.3",
        "CausalAutoencoder",
        (4, 8, 8),
        16,
        (113, 360, 640),
        note="causal in time; pieces of 17 frames that share one",
    ),
    "HunyuanVideo-VAE": AutoencoderConfiguration(
        "Open-Sora 2.0, HunyuanVideo",
        "AutoencoderKLHunyuanVideo",
        (4, 8, 8),
        16,
        (129, 720, 1280),
        note="from diffusers; without the mask of its middle block",
    ),
    "CogVideoX-VAE": AutoencoderConfiguration(
        "CogVideoX",
        "AutoencoderKLCogVideoX",
        (4, 8, 8),
        16,
        (49, 480, 720),
        {
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "block_out_channels": (128, 256, 256, 512),
            "latent_channels": 16,
            "layers_per_block": 3,
            "scaling_factor": 0.7,
        },
        note="from diffusers; pieces of 8 frames that pass on their last frames",
    ),
    "Wan2.1-VAE": AutoencoderConfiguration(
        "Wan 2.1",
        "AutoencoderKLWan",
        (4, 8, 8),
        16,
        (81, 480, 832),
        note="from diffusers; pieces of 4 frames that pass on their last frames",
    ),
}
"""Public autoencoders by name."""


def build_autoencoder(name: str, **overrides: Any) -> nn.Module:
    """Builds a public autoencoder whose class is in `gulliver.models`."""
    check_known("autoencoder", name, AUTOENCODERS)
    from gulliver import models

    configuration = AUTOENCODERS[name]
    if configuration.of_diffusers:
        raise GulliverError(
            f"{name} is a diffusers class; load its folder with gulliver.video.load_autoencoder"
        )
    kind = getattr(models, configuration.kind)
    return make_of_fields(kind, {**configuration.fields, **overrides})


def check_space(what: Autoencoder, height: int, width: int) -> tuple[int, int]:
    """Returns the latent rows and columns for an image size."""
    _, *steps = what.compression
    sizes = (height, width)
    if any(size < step or size % step for size, step in zip(sizes, steps, strict=True)):
        right = "x".join(
            str(max(1, round(size / step)) * step) for size, step in zip(sizes, steps, strict=True)
        )
        raise GulliverError(
            f"{height}x{width} does not fit the autoencoder; use multiples of {steps[0]}, such as "
            f"{right}"
        )
    return height // steps[0], width // steps[1]


def check_causal(what: Autoencoder, frames: int) -> int:
    """Returns the number of latent frames of a clip with causal encoding."""
    step = what.compression[0]
    if frames < 1 or (frames - 1) % step:
        right = max(0, round((frames - 1) / step)) * step + 1
        raise GulliverError(
            f"{frames} frames do not fit the autoencoder; use {step} k + 1 frames, such as {right}"
        )
    return (frames - 1) // step + 1


def check_latents(what: Autoencoder, latents: Tensor) -> None:
    if latents.dim() != 5 or latents.shape[1] != what.latent_channels:
        raise GulliverError(
            f"latents of shape {tuple(latents.shape)} do not belong to this autoencoder; its "
            f"latents are [B, {what.latent_channels}, T, H, W]"
        )


def check_length(what: Autoencoder, latents: Tensor, num_frames: int | None) -> None:
    if num_frames is None:
        return
    _, rows, columns = what.compression
    height, width = latents.shape[3] * rows, latents.shape[4] * columns
    wanted = what.latent_shape(num_frames, height, width)[1]
    if wanted != latents.shape[2]:
        raise GulliverError(
            f"{latents.shape[2]} latent frames do not match a clip of {num_frames} frames, which "
            f"has {wanted} of them"
        )


def regrouped(
    parts: Iterable[Tensor], size: int, overlap: int = 0, first: int | None = None
) -> Iterator[Tensor]:
    """Regroups a stream into chunks of equal length; the last one may be shorter."""
    import torch

    held, due = None, first or size
    for part in parts:
        held = part if held is None else torch.cat([held, part], 2)
        while held.shape[2] > due:
            yield held[:, :, :due]
            held, due = held[:, :, due - overlap :], size
    if held is None or not held.shape[2]:
        raise GulliverError("the clip has no frames; pass at least one")
    yield held
