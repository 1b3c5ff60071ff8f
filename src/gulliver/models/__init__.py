"""Networks as plain modules that know nothing of parallelism."""

from gulliver.models._attention import Mix
from gulliver.models._embeddings import CaptionEmbedder
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.models.stdit import STDIT3_SIZES, STDiT3, stdit3

__all__ = ["STDIT3_SIZES", "CaptionEmbedder", "Mix", "STDiT3", "VideoAutoencoder", "stdit3"]
