"""Plain modules without any parallelism.

`CONFIGURATIONS` lists the public models and `AUTOENCODERS` the public autoencoders; `build` creates
a model by name.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.models.autoencoder import VideoAutoencoder as VideoAutoencoder
    from gulliver.models.autoencoder_causal import CausalAutoencoder as CausalAutoencoder
    from gulliver.models.autoencoder_frames import FrameAutoencoder as FrameAutoencoder
    from gulliver.models.autoencoder_pipeline import PipelineAutoencoder as PipelineAutoencoder
    from gulliver.models.autoencoders import Autoencoder as Autoencoder
    from gulliver.models.clips import pack_latents as pack_latents
    from gulliver.models.clips import token_positions as places_of  # noqa: F401
    from gulliver.models.clips import token_positions as token_positions
    from gulliver.models.clips import unpack_latents as unpack_latents
    from gulliver.models.configurations import CONFIGURATIONS as CONFIGURATIONS
    from gulliver.models.configurations import QUIRKS as QUIRKS
    from gulliver.models.configurations import MMDiTConfig as MMDiTConfig
    from gulliver.models.configurations import STDiT2Config as STDiT2Config
    from gulliver.models.configurations import STDiT3Config as STDiT3Config
    from gulliver.models.configurations import STDiTConfig as STDiTConfig
    from gulliver.models.configurations import build as build
    from gulliver.models.mmdit import MMDiT as MMDiT
    from gulliver.models.stdit import STDiT as STDiT
    from gulliver.models.stdit import STDiT2 as STDiT2
    from gulliver.models.stdit import STDiT3 as STDiT3
    from gulliver.models.stdit import stdit3 as stdit3

__getattr__, __dir__ = lazy_exports(__name__)
