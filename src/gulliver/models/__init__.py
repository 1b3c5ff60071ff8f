"""Plain modules without any parallelism.

`CONFIGURATIONS` lists the public models and `AUTOENCODERS` the public autoencoders; `build` creates
a model by name.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.models.autoencoder import VideoAutoencoder
    from gulliver.models.autoencoder_causal import CausalAutoencoder
    from gulliver.models.autoencoder_frames import FrameAutoencoder
    from gulliver.models.autoencoder_pipeline import PipelineAutoencoder
    from gulliver.models.autoencoders import Autoencoder
    from gulliver.models.clips import pack_latents, token_positions, unpack_latents
    from gulliver.models.clips import token_positions as places_of  # noqa: F401
    from gulliver.models.configurations import (
        CONFIGURATIONS,
        QUIRKS,
        MMDiTConfig,
        STDiT2Config,
        STDiT3Config,
        STDiTConfig,
        build,
    )
    from gulliver.models.mmdit import MMDiT
    from gulliver.models.stdit import STDiT, STDiT2, STDiT3, stdit3

__all__ = [
    "CONFIGURATIONS",
    "QUIRKS",
    "Autoencoder",
    "CausalAutoencoder",
    "FrameAutoencoder",
    "MMDiT",
    "MMDiTConfig",
    "PipelineAutoencoder",
    "STDiT",
    "STDiT2",
    "STDiT2Config",
    "STDiT3",
    "STDiT3Config",
    "STDiTConfig",
    "VideoAutoencoder",
    "build",
    "pack_latents",
    "stdit3",
    "token_positions",
    "unpack_latents",
]

__getattr__, __dir__ = lazy_exports(__name__)
