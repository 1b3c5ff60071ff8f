"""Small pipelines of diffusers with random weights, and a tokenizer whose words stand here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from gulliver.memory.symbolic import ActivationPeak

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = ("a", "photo", "of", "dog", "cat", "sks", "in", "the", "snow")
WIDTH, LENGTH, SIDE = 16, 12, 16


@contextmanager
def unplanned() -> Iterator[None]:
    """Says a number for the activations of a step, instead of following one: half of a run's time.

    Plans have tests of their own.
    """
    with patch(
        "gulliver.dreambooth.planning.activation_peak",
        lambda *told, **more: ActivationPeak(1 << 20),
    ):
        yield


def make_tokenizer() -> CLIPTokenizer:
    """Words and letters; what is not known is spelt."""
    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = [START, END, *letters, *(f"{c}</w>" for c in letters)]
    merges = list[tuple[str, str]]()
    for word in WORDS:
        left = word[0] if len(word) > 1 else f"{word}</w>"
        for number, letter in enumerate(word[1:], 1):
            right = letter if number < len(word) - 1 else f"{letter}</w>"
            if (left, right) not in merges:
                merges.append((left, right))
            left += right
            vocabulary += [] if left in vocabulary else [left]
    table = {token: number for number, token in enumerate(vocabulary)}
    return CLIPTokenizer(vocab=table, merges=merges, model_max_length=LENGTH)


def text_encoder(kind: Any, words: int, seed: int, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=words,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        projection_dim=WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        **changes,
    )
    return kind(config).eval()


def tiny_vae(channels: int = 4, **changes: Any) -> AutoencoderKL:
    torch.manual_seed(3)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=SIDE,
        **changes,
    ).eval()


def tiny_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "sample_size": SIDE // 2,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**{**values, **changes}).eval()


def scheduler(prediction: str = "epsilon") -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction,
    )


def save_sd(folder: Path, prediction: str = "epsilon", unet: Mapping[str, Any] = {}) -> Path:
    """A Stable Diffusion; v-prediction is that of version 2."""
    tokenizer = make_tokenizer()
    pipeline = StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=text_encoder(CLIPTextModel, len(tokenizer), 1),
        tokenizer=tokenizer,
        unet=tiny_unet(**unet),
        scheduler=scheduler(prediction),
        safety_checker=None,  # type: ignore[arg-type]
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def save_sdxl(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    unet = tiny_unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=WIDTH + 6 * 4,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=text_encoder(CLIPTextModel, len(tokenizer), 1),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, len(tokenizer), 2),
        tokenizer=tokenizer,
        tokenizer_2=make_tokenizer(),
        unet=unet,
        scheduler=scheduler(),  # type: ignore[arg-type]
    )
    pipeline.save_pretrained(folder)
    return folder


def save_sd3(folder: Path) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(5)
    transformer = SD3Transformer2DModel(
        sample_size=SIDE // 2,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=4,
    ).eval()
    pipeline = StableDiffusion3Pipeline(
        vae=tiny_vae(shift_factor=0.06),
        text_encoder=text_encoder(CLIPTextModelWithProjection, len(tokenizer), 1),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, len(tokenizer), 2),
        text_encoder_3=None,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        tokenizer_2=make_tokenizer(),
        tokenizer_3=None,  # type: ignore[arg-type]
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    pipeline.save_pretrained(folder)
    return folder


def save_subject(folder: Path, count: int = 3) -> Path:
    """Pictures of coloured squares."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.full((20 + number, 24, 3), 30 * number + 40, np.uint8)
        pixels[5:15, 6:18] = (200, 60 * number, 90)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder
