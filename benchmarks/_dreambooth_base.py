"""Bases of `benchmarks.dreambooth`: the public UNet of Stable Diffusion 2, whole and narrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SD2_UNET: dict[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "norm_eps": 1e-05,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
"""The configuration of stabilityai/stable-diffusion-2-base's denoiser."""
PARAMETERS = 865_910_724  # Its parameters
SCHEDULER = {
    "_class_name": "DDIMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
    "prediction_type": "epsilon",
}
VAE = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "latent_channels": 4,
    "scaling_factor": 0.18215,
}
TEXT = {"max_position_embeddings": 77, "num_hidden_layers": 23, "projection_dim": 512}
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_outline(folder: Path) -> Path:
    """Writes the configurations of Stable Diffusion 2, without weights: enough for a plan."""
    parts = {"unet": SD2_UNET, "vae": VAE, "text_encoder": TEXT}
    for name, values in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(values))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder


def narrow(divisor: int, width: int, side: int) -> dict[str, Any]:
    """The same UNet with a fraction of its channels."""
    channels = [count // divisor for count in SD2_UNET["block_out_channels"]]
    values = {k: v for k, v in SD2_UNET.items() if k != "_class_name"}
    told = {"sample_size": side, "cross_attention_dim": width, "norm_num_groups": 8}
    return {**values, **told, "block_out_channels": channels}


def write_base(folder: Path, divisor: int, side: int, width: int = 64) -> Path:
    """Writes a whole pipeline of random weights around a narrow UNet, and a subject beside it."""
    import numpy as np
    import torch
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from PIL import Image
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    known = {token: number for number, token in enumerate(tokens)}
    text = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    values = {k: v for k, v in SCHEDULER.items() if k != "_class_name"}
    coder: dict[str, Any] = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "latent_channels": 4,
        "norm_num_groups": 4,
    }
    parts: dict[str, Any] = {
        "vae": AutoencoderKL(**coder),
        "text_encoder": CLIPTextModel(text),
        "tokenizer": CLIPTokenizer(vocab=known, merges=[], model_max_length=77),
        "unet": UNet2DConditionModel(**narrow(divisor, width, side)),
        "scheduler": DDIMScheduler(**values),
        "safety_checker": None,
        "feature_extractor": None,
    }
    StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "base")
    (folder / "subject").mkdir()
    draw = np.random.default_rng(0)
    for number in range(4):
        pixels = draw.integers(0, 256, (8 * side, 8 * side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "subject" / f"{number}.png")
    return folder
