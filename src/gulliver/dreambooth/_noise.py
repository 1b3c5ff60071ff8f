"""Noise as a scheduler's file says: what a network is shown, what it should answer, and weights.

Three ways to train, each as diffusers' own scripts do it: of a schedule of betas the network says
the noise (``epsilon``) or the velocity (``v_prediction``); of a flow it says noise minus picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest

EPSILON, VELOCITY, FLOW = "epsilon", "v_prediction", "flow"
FLOWS = ("FlowMatchEulerDiscreteScheduler",)


@dataclass(frozen=True)
class Noised:
    """Samples with noise."""

    # What the network is shown ``[N, ...]``.
    inputs: Tensor
    # Times as the network takes them ``[N]``.
    times: Tensor
    # What it should answer.
    target: Tensor
    # Weight of each sample's loss ``[N]``.
    weights: Tensor


class Noise:
    """A noise schedule for training."""

    def __init__(self, values: Mapping[str, Any], snr_gamma: float | None = None) -> None:
        from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

        name = values.get("_class_name", "")
        self.snr_gamma = snr_gamma
        if name in FLOWS:
            if snr_gamma is not None:
                raise GulliverError("--snr-gamma weighs noise schedules: leave it out for a flow")
            flow: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(values))
            self.kind, self.levels = FLOW, flow.sigmas.double().tolist()
            self.times: list[float] = flow.timesteps.double().tolist()
            return
        if "beta_schedule" not in values:
            raise GulliverError(
                f"the base's scheduler {name or '(without a name)'} has no beta_schedule and is "
                f"no {' or '.join(FLOWS)}: how it trains is not known"
            )
        kinds, asked = (EPSILON, VELOCITY), values.get("prediction_type", EPSILON)
        if asked not in kinds:
            raise GulliverError(
                f"the base's scheduler has prediction_type {asked!r}: {nearest(asked, kinds)}"
            )
        self.kind = asked
        betas: Any = DDPMScheduler.from_config(dict(values))
        self.levels = betas.alphas_cumprod.double().tolist()
        self.times = list(map(float, range(len(self.levels))))

    def added(self, latents: Tensor, generators: Sequence[torch.Generator]) -> Noised:
        """Adds noise to latents at a random time of each; draws first the time, then the noise."""
        index = torch.cat([self._index(generator) for generator in generators])
        noise = torch.cat([_normal(latents[:1].shape, generator) for generator in generators])
        noise = noise.to(latents.device, latents.dtype)
        # Made here, not kept: where a step is followed with shapes alone, it must be such a shape.
        level = torch.tensor(self.levels, dtype=torch.float64)[index]
        times = torch.tensor(self.times, dtype=torch.float64)[index].to(latents.device)
        weights = self._weights(level).to(latents.device)
        level = level.to(latents.device, latents.dtype)
        level = level.view(-1, *[1] * (latents.ndim - 1))
        if self.kind == FLOW:
            inputs = (1 - level) * latents + level * noise
            return Noised(inputs, times.float(), noise - latents, weights)
        signal, spread = level.sqrt(), (1 - level).sqrt()
        inputs = signal * latents + spread * noise
        target = noise if self.kind == EPSILON else signal * noise - spread * latents
        return Noised(inputs, times.long(), target, weights)

    def _index(self, generator: torch.Generator) -> Tensor:
        count = len(self.levels)
        if self.kind == FLOW:
            # Times in the middle are harder: logit-normal, as of Stable Diffusion 3's training.
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
