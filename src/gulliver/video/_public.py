"""The public names of `gulliver.video`, imported when one of them is asked for."""

from gulliver.jobs import console
from gulliver.jobs._loop import Outcome
from gulliver.options import resolved
from gulliver.video._autoencoder_config import (
    AutoencoderDataConfig,
    AutoencoderLossConfig,
    AutoencoderModelConfig,
    TrainAutoencoderConfig,
    check_autoencoder_config,
)
from gulliver.video._autoencoder_job import AutoencoderOutcome, run_autoencoder
from gulliver.video._autoencoder_training import save_autoencoder
from gulliver.video._build import check_start
from gulliver.video._caches import (
    BlockCache,
    Broadcast,
    Counts,
    FirstBlock,
    cache_blocks,
    psnr,
    read_strategy,
)
from gulliver.video._config import (
    AutoencoderConfig,
    DataConfig,
    DemoConfig,
    FlowConfig,
    ModelConfig,
    OptimizerConfig,
    PlannerConfig,
    SamplesConfig,
    SamplingConfig,
    TrainConfig,
    ValidationConfig,
    check_clip,
    check_config,
    from_plain,
    parse_shapes,
)
from gulliver.video._demo import demonstrate
from gulliver.video._diffusers_autoencoders import DiffusersAutoencoder
from gulliver.video._diffusion import Preview
from gulliver.video._digits import DIGITS, DIRECTIONS, FPS, MovingDigits, compose, sentence
from gulliver.video._encoded import with_encoded
from gulliver.video._evaluate import Evaluation, evaluate
from gulliver.video._generate import VideoModel, connect, extend
from gulliver.video._guidance import Guidance
from gulliver.video._judges import Judges, Scores, train_judges
from gulliver.video._kept_latents import KeptLatents
from gulliver.video._mask_strings import SHORT_FORMS, parse_mask_strategy
from gulliver.video._media import (
    check_output,
    fit,
    read_frames,
    to_frames,
    write_clip,
    write_gif,
)
from gulliver.video._pipeline import VideoPipeline, open_run
from gulliver.video._plugins import check_ranks
from gulliver.video._prompts import loop_prompts, read_prompt, read_prompts
from gulliver.video._public_autoencoders import load_autoencoder
from gulliver.video._public_models import check_kind, load_model
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._requests import Request, check_request, loop_seed
from gulliver.video._run import Run
from gulliver.video._shared import split_ranks
from gulliver.video._sources import train_autoencoder
from gulliver.video._text_encoders import (
    ClipTextEncoder,
    EncodedText,
    KeptTexts,
    T5TextEncoder,
    TextEncoder,
    TextPair,
    check_encoder,
    load_text_encoder,
)
from gulliver.video._train import train
from gulliver.video._training import Trainer
from gulliver.video._words import WordEncoder, unknown_words, words_of

__all__ = [
    "DIGITS",
    "DIRECTIONS",
    "FPS",
    "SHORT_FORMS",
    "AutoencoderConfig",
    "AutoencoderDataConfig",
    "AutoencoderLossConfig",
    "AutoencoderModelConfig",
    "AutoencoderOutcome",
    "BlockCache",
    "Broadcast",
    "ClipTextEncoder",
    "Counts",
    "DataConfig",
    "DemoConfig",
    "DiffusersAutoencoder",
    "EncodedText",
    "Evaluation",
    "FirstBlock",
    "FlowConfig",
    "Guidance",
    "Judges",
    "KeptLatents",
    "KeptTexts",
    "ModelConfig",
    "MovingDigits",
    "OptimizerConfig",
    "Outcome",
    "PlannerConfig",
    "Preview",
    "RectifiedFlow",
    "Request",
    "Run",
    "SamplesConfig",
    "SamplingConfig",
    "Scores",
    "T5TextEncoder",
    "TextEncoder",
    "TextPair",
    "TrainAutoencoderConfig",
    "TrainConfig",
    "Trainer",
    "ValidationConfig",
    "VideoModel",
    "VideoPipeline",
    "WordEncoder",
    "cache_blocks",
    "check_autoencoder_config",
    "check_clip",
    "check_config",
    "check_encoder",
    "check_kind",
    "check_output",
    "check_ranks",
    "check_request",
    "check_start",
    "compose",
    "connect",
    "console",
    "demonstrate",
    "evaluate",
    "extend",
    "fit",
    "from_plain",
    "load_autoencoder",
    "load_model",
    "load_text_encoder",
    "loop_prompts",
    "loop_seed",
    "open_run",
    "parse_mask_strategy",
    "parse_shapes",
    "psnr",
    "read_frames",
    "read_prompt",
    "read_prompts",
    "read_strategy",
    "resolved",
    "run_autoencoder",
    "save_autoencoder",
    "sentence",
    "split_ranks",
    "to_frames",
    "train",
    "train_autoencoder",
    "train_judges",
    "unknown_words",
    "with_encoded",
    "words_of",
    "write_clip",
    "write_gif",
]
