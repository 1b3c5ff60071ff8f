"""Text-to-video: training, generation, evaluation, and a demo of all three."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.jobs.loop import Outcome
    from gulliver.video.autoencoder_config import TrainAutoencoderConfig
    from gulliver.video.caches import Counts, cache_blocks
    from gulliver.video.config import DataConfig, SamplingConfig, TrainConfig
    from gulliver.video.diffusion import Guidance
    from gulliver.video.digits import DIRECTIONS, FPS
    from gulliver.video.flows import RectifiedFlow
    from gulliver.video.generation import connect, extend
    from gulliver.video.kept_latents import LatentCache
    from gulliver.video.kept_latents import LatentCache as KeptLatents  # noqa: F401
    from gulliver.video.pipeline import VideoModel, VideoPipeline
    from gulliver.video.public_models import load_autoencoder, load_model
    from gulliver.video.requests import Request, loop_seed
    from gulliver.video.run import Run
    from gulliver.video.text_encoders import CachedTextEncoder, TextPair, load_text_encoder
    from gulliver.video.text_encoders import CachedTextEncoder as KeptTexts  # noqa: F401
    from gulliver.video.training import Trainer

__all__ = [
    "DIRECTIONS",
    "FPS",
    "CachedTextEncoder",
    "Counts",
    "DataConfig",
    "Guidance",
    "LatentCache",
    "Outcome",
    "RectifiedFlow",
    "Request",
    "Run",
    "SamplingConfig",
    "TextPair",
    "TrainAutoencoderConfig",
    "TrainConfig",
    "Trainer",
    "VideoModel",
    "VideoPipeline",
    "cache_blocks",
    "connect",
    "extend",
    "load_autoencoder",
    "load_model",
    "load_text_encoder",
    "loop_seed",
]

__getattr__, __dir__ = lazy_exports(__name__)
