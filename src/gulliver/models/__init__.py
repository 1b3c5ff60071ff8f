"""Networks as plain modules that know nothing of parallelism.

The public models are a table, `CONFIGURATIONS`; `build` makes one of them by name. Their blocks are
one library: `_blocks.py`, `_attention.py`, `_embeddings.py`, `_clips.py`. Public autoencoders are a
table, too, `AUTOENCODERS`, and each speaks the protocol `Autoencoder`; read `_autoencoders.py`.
"""

from gulliver.models._attention import Mix
from gulliver.models._autoencoders import (
    AUTOENCODERS,
    Autoencoder,
    AutoencoderConfiguration,
    build_autoencoder,
    check_causal,
    check_latents,
    check_length,
    check_space,
    regrouped,
)
from gulliver.models._configurations import CONFIGURATIONS, Configuration, build
from gulliver.models._embeddings import CaptionEmbedder
from gulliver.models._frames import OnFrames
from gulliver.models._identify import Look, fields_of, look_of
from gulliver.models._identify_autoencoders import autoencoder_fields_of, public_name
from gulliver.models._making import (
    CONFIGS,
    MMDiTConfig,
    STDiT2Config,
    STDiT3Config,
    STDiTConfig,
    make_of_fields,
)
from gulliver.models._packing import pack_latents, places_of, unpack_latents
from gulliver.models._quirks import QUIRKS, QUIRKS_OF
from gulliver.models.autoencoder import AUTOENCODER_SIZES, VideoAutoencoder
from gulliver.models.autoencoder_causal import CausalAutoencoder
from gulliver.models.autoencoder_frames import FrameAutoencoder
from gulliver.models.autoencoder_pipeline import PipelineAutoencoder
from gulliver.models.mmdit import MMDiT
from gulliver.models.stdit import STDIT3_SIZES, STDiT3, stdit3
from gulliver.models.stdit1 import STDiT
from gulliver.models.stdit2 import STDiT2

__all__ = [
    "AUTOENCODERS",
    "AUTOENCODER_SIZES",
    "CONFIGS",
    "CONFIGURATIONS",
    "QUIRKS",
    "QUIRKS_OF",
    "STDIT3_SIZES",
    "Autoencoder",
    "AutoencoderConfiguration",
    "CaptionEmbedder",
    "CausalAutoencoder",
    "Configuration",
    "FrameAutoencoder",
    "Look",
    "MMDiT",
    "MMDiTConfig",
    "Mix",
    "OnFrames",
    "PipelineAutoencoder",
    "STDiT",
    "STDiT2",
    "STDiT2Config",
    "STDiT3",
    "STDiT3Config",
    "STDiTConfig",
    "VideoAutoencoder",
    "autoencoder_fields_of",
    "build",
    "build_autoencoder",
    "check_causal",
    "check_latents",
    "check_length",
    "check_space",
    "fields_of",
    "look_of",
    "make_of_fields",
    "pack_latents",
    "places_of",
    "public_name",
    "regrouped",
    "stdit3",
    "unpack_latents",
]
