"""Networks as plain modules that know nothing of parallelism.

The public models are a table, `CONFIGURATIONS`; `build` makes one of them by name. Their blocks are
one library: `_blocks.py`, `_attention.py`, `_embeddings.py`, `_clips.py`.
"""

from gulliver.models._attention import Mix
from gulliver.models._configurations import CONFIGURATIONS, Configuration, build
from gulliver.models._embeddings import CaptionEmbedder
from gulliver.models._identify import Look, fields_of, look_of
from gulliver.models._packing import pack_latents, places_of, unpack_latents
from gulliver.models._quirks import QUIRKS, QUIRKS_OF
from gulliver.models.autoencoder import AUTOENCODER_SIZES, VideoAutoencoder
from gulliver.models.mmdit import MMDiT
from gulliver.models.stdit import STDIT3_SIZES, STDiT3, stdit3
from gulliver.models.stdit1 import STDiT
from gulliver.models.stdit2 import STDiT2

__all__ = [
    "AUTOENCODER_SIZES",
    "CONFIGURATIONS",
    "QUIRKS",
    "QUIRKS_OF",
    "STDIT3_SIZES",
    "CaptionEmbedder",
    "Configuration",
    "Look",
    "MMDiT",
    "Mix",
    "STDiT",
    "STDiT2",
    "STDiT3",
    "VideoAutoencoder",
    "build",
    "fields_of",
    "look_of",
    "pack_latents",
    "places_of",
    "stdit3",
    "unpack_latents",
]
