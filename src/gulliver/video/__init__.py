"""Text-to-video: training, generation, evaluation, and a demo of all three."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.jobs.loop import Outcome as Outcome
    from gulliver.video.autoencoder_config import TrainAutoencoderConfig as TrainAutoencoderConfig
    from gulliver.video.caches import Counts as Counts
    from gulliver.video.caches import cache_blocks as cache_blocks
    from gulliver.video.config import DataConfig as DataConfig
    from gulliver.video.config import SamplingConfig as SamplingConfig
    from gulliver.video.config import TrainConfig as TrainConfig
    from gulliver.video.diffusion import Guidance as Guidance
    from gulliver.video.digits import DIRECTIONS as DIRECTIONS
    from gulliver.video.digits import FPS as FPS
    from gulliver.video.flows import RectifiedFlow as RectifiedFlow
    from gulliver.video.generation import connect as connect
    from gulliver.video.generation import extend as extend
    from gulliver.video.kept_latents import LatentCache as KeptLatents  # noqa: F401
    from gulliver.video.kept_latents import LatentCache as LatentCache
    from gulliver.video.pipeline import VideoModel as VideoModel
    from gulliver.video.pipeline import VideoPipeline as VideoPipeline
    from gulliver.video.public_models import load_autoencoder as load_autoencoder
    from gulliver.video.public_models import load_model as load_model
    from gulliver.video.requests import Request as Request
    from gulliver.video.requests import loop_seed as loop_seed
    from gulliver.video.run import Run as Run
    from gulliver.video.text_encoders import CachedTextEncoder as CachedTextEncoder
    from gulliver.video.text_encoders import CachedTextEncoder as KeptTexts  # noqa: F401
    from gulliver.video.text_encoders import TextPair as TextPair
    from gulliver.video.text_encoders import load_text_encoder as load_text_encoder
    from gulliver.video.training import Trainer as Trainer

__getattr__, __dir__ = lazy_exports(__name__)
