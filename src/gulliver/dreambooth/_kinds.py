"""Pipelines of diffusers that can be taught: the conditions that a prompt becomes.

A `PipelineKind` has what is particular to one: the name of its denoiser, the conditions that the
text encoders' answers become, and how the denoiser is called. All else is `_diffusers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Conditions = dict[str, Tensor]
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
"""Layers that adapters go into where none are named, as in diffusers' scripts."""
T5_LENGTH = 256
"""Tokens that Stable Diffusion 3's pipeline reserves for a T5."""


@dataclass(frozen=True)
class PipelineKind:
    """A pipeline."""

    # Name of the denoiser in the pipeline.
    network: str
    # Names of its text encoders, in order.
    encoders: tuple[str, ...]
    # Function of the encoders' outputs and the denoiser's configuration, for all
    # conditions of prompts.
    conditions: Callable[[Sequence[Any], Any], Conditions]
    # Function that calls the denoiser with noisy latents, times, conditions and the side of the
    # picture in pixels.
    denoise: Callable[[nn.Module, Tensor, Tensor, Conditions, int], Tensor]
    # Names of the conditions among a pipeline's arguments.
    names: Mapping[str, str]
    # Whether the empty prompt is zeros, unless the pipeline says otherwise.
    empty_is_zero: bool = False
    # Beginnings of the names of the encoders' parameters that no condition depends on.
    unused: Callable[[int], tuple[str, ...]] = lambda layers: ()
    # Layers that adapters go into.
    targets: tuple[str, ...] = ATTENTION


def _of_one(outputs: Sequence[Any], config: Any) -> Conditions:
    return {"states": outputs[0][0]}


def _of_two(outputs: Sequence[Any], config: Any) -> Conditions:
    states = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return {"states": states, "pooled": outputs[1][0]}


def _of_three(outputs: Sequence[Any], config: Any) -> Conditions:
    """Two CLIPs, and zeros where a T5 would answer."""
    found = _of_two(outputs, config)
    states = found["states"]
    width = config.joint_attention_dim
    states = F.pad(states, (0, width - states.shape[-1]))
    pooled = torch.cat([output[0] for output in outputs], dim=-1)
    return {"states": torch.cat([states, _t5(states, width)], dim=-2), "pooled": pooled}


def _t5(states: Tensor, width: int) -> Tensor:
    return states.new_zeros(len(states), T5_LENGTH, width)


def _plain(unet: nn.Module, noisy: Tensor, times: Tensor, given: Conditions, side: int) -> Tensor:
    return unet(noisy, times, encoder_hidden_states=given["states"]).sample


def _with_sizes(
    unet: nn.Module, noisy: Tensor, times: Tensor, given: Conditions, side: int
) -> Tensor:
    # Original size, corner of the crop, size: those that the pipeline takes by default.
    sizes = torch.tensor([[side, side, 0, 0, side, side]], dtype=noisy.dtype, device=noisy.device)
    added = {"text_embeds": given["pooled"], "time_ids": sizes.expand(len(noisy), -1)}
    states = given["states"]
    return unet(noisy, times, encoder_hidden_states=states, added_cond_kwargs=added).sample


def _joint(model: nn.Module, noisy: Tensor, times: Tensor, given: Conditions, side: int) -> Tensor:
    return model(
        hidden_states=noisy,
        timestep=times,
        encoder_hidden_states=given["states"],
        pooled_projections=given["pooled"],
    ).sample


def _last_of_first(layers: int) -> tuple[str, ...]:
    """Names what no condition needs where the first encoder stops before its last layer."""
    first, layer = "text_encoder.", f"encoder.layers.{layers - 1}."
    return tuple(f"{first}{inner}{part}" for inner in ("", "text_model.") for part in (
        layer, "final_layer_norm."
    ))  # fmt: skip


STATES, POOLED = {"states": "prompt_embeds"}, {"pooled": "pooled_prompt_embeds"}
KINDS = {
    "StableDiffusionPipeline": PipelineKind("unet", ("text_encoder",), _of_one, _plain, STATES),
    "StableDiffusionXLPipeline": PipelineKind(
        "unet",
        ("text_encoder", "text_encoder_2"),
        _of_two,
        _with_sizes,
        STATES | POOLED,
        empty_is_zero=True,
        unused=_last_of_first,
    ),
    "StableDiffusion3Pipeline": PipelineKind(
        "transformer", ("text_encoder", "text_encoder_2"), _of_three, _joint, STATES | POOLED
    ),
}
