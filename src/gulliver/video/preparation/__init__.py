"""Data preparation: from a folder of clips to latents that training reads."""

from gulliver.video._encode_config import EncodeConfig
from gulliver.video.preparation._encode import Encoded, check_encode, encode

__all__ = ["EncodeConfig", "Encoded", "check_encode", "encode"]
