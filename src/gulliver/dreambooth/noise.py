"""Training noise as defined by a scheduler's configuration, and the supported pipelines.

Three objectives, as in diffusers' training scripts: with a beta schedule the network predicts the
noise (``epsilon``) or the velocity (``v_prediction``); with flow matching, noise minus image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest

EPSILON, VELOCITY, FLOW = "epsilon", "v_prediction", "flow"
FLOWS = ("FlowMatchEulerDiscreteScheduler",)


@dataclass(frozen=True)
class NoisySamples:
    """Noisy latents with timesteps, targets and loss weights."""

    # Network input, ``[N, ...]``.
    inputs: Tensor
    # Timesteps as passed to the network, ``[N]``.
    times: Tensor
    # Target of the prediction.
    target: Tensor
    # Loss weight of each sample, ``[N]``.
    weights: Tensor


class Noise:
    """The training noise schedule of a base model."""

    def __init__(self, values: Mapping[str, Any], snr_gamma: float | None = None) -> None:
        from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

        name = values.get("_class_name", "")
        self.snr_gamma = snr_gamma
        if name in FLOWS:
            if snr_gamma is not None:
                raise GulliverError("--snr-gamma does not apply to flow models; omit it")
            flow: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(values))
            self.kind, self.levels = FLOW, flow.sigmas.double().tolist()
            self.times: list[float] = flow.timesteps.double().tolist()
            return
        if "beta_schedule" not in values:
            raise GulliverError(
                f"the base model's scheduler {name or '(without a name)'} has no beta_schedule "
                f"and is not {' or '.join(FLOWS)}; its training objective is unknown"
            )
        kinds, asked = (EPSILON, VELOCITY), values.get("prediction_type", EPSILON)
        if asked not in kinds:
            raise GulliverError(
                f"the base model's scheduler has the unknown prediction_type {asked!r}: "
                f"{nearest(asked, kinds)}"
            )
        self.kind = asked
        betas: Any = DDPMScheduler.from_config(dict(values))
        self.levels = betas.alphas_cumprod.double().tolist()
        self.times = list(map(float, range(len(self.levels))))

    def added(self, latents: Tensor, generators: Sequence[torch.Generator]) -> NoisySamples:
        """Adds noise to latents at random timesteps, which are sampled before the noise."""
        index = torch.cat([self._index(generator) for generator in generators])
        noise = torch.cat([_normal(latents[:1].shape, generator) for generator in generators])
        noise = noise.to(latents.device, latents.dtype)
        # Created here, not cached: when a step is traced with shapes only, it must be a fake
        # tensor.
        level = torch.tensor(self.levels, dtype=torch.float64)[index]
        times = torch.tensor(self.times, dtype=torch.float64)[index].to(latents.device)
        weights = self._weights(level).to(latents.device)
        level = level.to(latents.device, latents.dtype)
        level = level.view(-1, *[1] * (latents.ndim - 1))
        if self.kind == FLOW:
            inputs = (1 - level) * latents + level * noise
            return NoisySamples(inputs, times.float(), noise - latents, weights)
        signal, spread = level.sqrt(), (1 - level).sqrt()
        inputs = signal * latents + spread * noise
        target = noise if self.kind == EPSILON else signal * noise - spread * latents
        return NoisySamples(inputs, times.long(), target, weights)

    def _index(self, generator: torch.Generator) -> Tensor:
        count = len(self.levels)
        if self.kind == FLOW:
            # Intermediate times are harder: logit-normal sampling, as for Stable Diffusion 3.
            return (torch.randn(1, generator=generator).sigmoid() * count).long()
        return torch.randint(count, (1,), generator=generator)

    def _weights(self, level: Tensor) -> Tensor:
        if self.snr_gamma is None:
            return torch.ones_like(level)
        ratio = level / (1 - level)
        most = ratio.clamp(max=self.snr_gamma)
        return most / (ratio if self.kind == EPSILON else ratio + 1)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator)


# Supported diffusers pipelines, and how each builds the denoiser's conditions from prompts.
#
# A `PipelineKind` describes the differences between them: the name of the denoiser, the conditions
# built from the text encoders' outputs, and how the denoiser is called. Everything else is in
# `diffusers_base.py`.


Conditions = dict[str, Tensor]
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
"""Default layers to adapt, as in diffusers' scripts."""
T5_LENGTH = 256
"""Tokens that Stable Diffusion 3's pipeline reserves for T5."""


@dataclass(frozen=True)
class PipelineKind:
    """Properties of a supported pipeline class."""

    # Name of the denoiser in the pipeline.
    network: str
    # Names of its text encoders, in order.
    encoders: tuple[str, ...]
    # Builds all conditions from the encoders' outputs and the denoiser's configuration.
    conditions: Callable[[Sequence[Any], Any], Conditions]
    # Calls the denoiser with noisy latents, timesteps, conditions and the side of the picture in
    # pixels.
    denoise: Callable[[nn.Module, Tensor, Tensor, Conditions, int], Tensor]
    # Names of the conditions among a pipeline's arguments.
    names: Mapping[str, str]
    # Whether the empty prompt is encoded as zeros by default.
    empty_is_zero: bool = False
    # Name prefixes of encoder parameters that no condition depends on.
    unused: Callable[[int], tuple[str, ...]] = lambda layers: ()
    # Layers to adapt.
    targets: tuple[str, ...] = ATTENTION


def _of_one(outputs: Sequence[Any], config: Any) -> Conditions:
    return {"states": outputs[0][0]}


def _of_two(outputs: Sequence[Any], config: Any) -> Conditions:
    states = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return {"states": states, "pooled": outputs[1][0]}


def _of_three(outputs: Sequence[Any], config: Any) -> Conditions:
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
    # Original size, crop corner and size: the pipeline's defaults.
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
    """Returns names of parameters that stay unused because the last layer is skipped."""
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
