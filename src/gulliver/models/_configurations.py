"""The public models as one table: name, release, class, fields, and what a latent of it is.

`build` makes one of them. The pages of the documentation, `gulliver models` and the tests read this
table, so what is said of a model is said once. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gulliver.errors import GulliverError, nearest
from gulliver.models._making import make_of_fields

if TYPE_CHECKING:
    from torch import nn

XL = {"hidden_size": 1152, "depth": 28, "num_heads": 16}
THREE_B = {"hidden_size": 1872, "depth": 28, "num_heads": 26}
T5 = "t5-v1_1-xxl"


@dataclass(frozen=True)
class Configuration:
    """A public model."""

    release: str
    # Name of its class in `gulliver.models`.
    kind: str
    fields: Mapping[str, Any]
    # Frames, rows and columns of pixels that a latent stands for.
    compression: tuple[int, int, int]
    # Frames, height and width of a usual clip, in pixels.
    clip: tuple[int, int, int]
    # Frames that its autoencoder takes at once, each with a first latent of its own.
    chunk: int | None = None
    # Text encoders whose vectors it reads.
    text: tuple[str, ...] = (T5,)
    # What it can be given besides the text.
    conditions: tuple[str, ...] = ()
    note: str = ""

    def latent(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Returns latent frames, rows and columns of a clip in pixels."""
        time, *space = self.compression
        whole, rest = divmod(frames, self.chunk or max(frames, 1))
        parts = [self.chunk or frames] * whole + ([rest] if rest else [])
        rows, columns = (
            -(-size // step) for size, step in zip((height, width), space, strict=True)
        )
        return sum(-(-part // time) for part in parts), rows, columns


IMAGE = {"image_conditioning": True, "kernel_size": (8, 8, -1), "use_spatial_rope": True}
V1_3 = {"in_channels": 16, **IMAGE}
MODERN = {"fused_qkv": False, "use_liger_rope": True, "cond_embed": True}
GIVEN = ("frames at noise 0 (x_mask)",)

CONFIGURATIONS: dict[str, Configuration] = {
    "STDiT-XL/2": Configuration(
        "Open-Sora 1.0",
        "STDiT",
        {**XL, "input_size": (16, 32, 32), "space_scale": 0.5},
        (1, 8, 8),
        (16, 256, 256),
        note="one size of clip; positions are buffers of the weights",
    ),
    "STDiT-XL/2-512": Configuration(
        "Open-Sora 1.0",
        "STDiT",
        {**XL, "input_size": (16, 64, 64)},
        (1, 8, 8),
        (16, 512, 512),
        note="one size of clip; positions are buffers of the weights",
    ),
    "STDiT2-XL/2": Configuration(
        "Open-Sora 1.1",
        "STDiT2",
        XL,
        (1, 8, 8),
        (16, 240, 426),
        conditions=GIVEN,
        note="told height, width, aspect ratio, number of frames and fps",
    ),
    "STDiT3-XL/2": Configuration(
        "Open-Sora 1.2",
        "STDiT3",
        XL,
        (4, 8, 8),
        (51, 240, 426),
        chunk=17,
        conditions=GIVEN,
        note="told fps; spatial and temporal blocks in turns",
    ),
    "STDiT3-3B/2": Configuration(
        "Open-Sora 1.2",
        "STDiT3",
        THREE_B,
        (4, 8, 8),
        (51, 240, 426),
        chunk=17,
        conditions=GIVEN,
        note="told fps; spatial and temporal blocks in turns",
    ),
    "STDiT3-XL/2-v1.3": Configuration(
        "Open-Sora 1.3",
        "STDiT3",
        {**XL, **V1_3},
        (4, 8, 8),
        (113, 360, 640),
        conditions=(*GIVEN, "latents of given frames (cond)"),
        note="temporal blocks attend in windows of 8 x 8 x all frames",
    ),
    "STDiT3-3B/2-v1.3": Configuration(
        "Open-Sora 1.3",
        "STDiT3",
        {**THREE_B, **V1_3},
        (4, 8, 8),
        (113, 360, 640),
        conditions=(*GIVEN, "latents of given frames (cond)"),
        note="temporal blocks attend in windows of 8 x 8 x all frames",
    ),
    "MMDiT-11B": Configuration(
        "Open-Sora 2.0",
        "MMDiT",
        MODERN,
        (4, 8, 8),
        (129, 192, 336),
        text=(T5, "clip-vit-large-patch14"),
        conditions=("mask and latents of given frames (cond)",),
        note="19 double and 38 single blocks; latents of HunyuanVideo's autoencoder",
    ),
    "MMDiT-11B-DC": Configuration(
        "Open-Sora 2.0",
        "MMDiT",
        {**MODERN, "in_channels": 128, "patch_size": 1},
        (4, 32, 32),
        (128, 768, 768),
        text=(T5, "clip-vit-large-patch14"),
        conditions=("mask and latents of given frames (cond)",),
        note="the same on latents of the deep-compression autoencoder",
    ),
    "FLUX.1-dev": Configuration(
        "FLUX.1",
        "MMDiT",
        {"guidance_embed": True},
        (1, 8, 8),
        (1, 768, 768),
        text=(T5, "clip-vit-large-patch14"),
        note="the picture model that 2.0 starts from, and takes first frames of",
    ),
}
"""Public models by name."""


def build(name: str, **overrides: Any) -> nn.Module:
    """Builds a public model, with any field of its configuration changed.

    Args:
        name: name in `CONFIGURATIONS`.
        overrides: arguments of its class.

    Raises:
        GulliverError: the name or a field is unknown, the nearest is named; or there is no such
            model, the field at fault is named.
    """
    if name not in CONFIGURATIONS:
        raise GulliverError(f"unknown model {name!r}: {nearest(name, CONFIGURATIONS)}")
    from gulliver import models

    configuration = CONFIGURATIONS[name]
    kind = getattr(models, configuration.kind)
    return make_of_fields(kind, {**configuration.fields, **overrides})
