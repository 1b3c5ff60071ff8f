"""Rectified flow: straight paths from noise to data.

A point on the path is x_t = (1 - t) x0 + t noise with t in [0, 1]; the model learns the velocity
x0 - noise that leads along it to the data. Sampling follows the velocity from t = 1 to 0.

Sources: https://arxiv.org/abs/2209.03003 (rectified flow), https://arxiv.org/abs/2403.03206
(logit-normal levels, resolution shift).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.video._diffusion import (
    Diffusion,
    GivenFrames,
    Model,
    Preview,
    SamplingStep,
    conditions,
    frame_mean,
)
from gulliver.video._guidance import Guidance
from gulliver.video._warp import RULES, ClipSize

METHODS = ("uniform", "logit-normal")


class RectifiedFlow(Diffusion):
    """Noise levels, the training loss (mean square error of the velocity) and the sampler.

    Levels are on the model's scale from 0 (data) to `num_timesteps` (noise).

    Args:
        num_timesteps: level of pure noise.
        sample_method: law of the levels in training.
        loc: mean of the logit of logit-normal levels.
        scale: standard deviation of that logit.
        shift: factor of the odds t / (1 - t) of every level, in training and sampling.
        use_timestep_transform: whether to multiply the odds by a ratio of the clip's size as well.
        base_area: area in pixels at which that ratio is 1 for a still.
        transform: how it is taken from the size, a name of `_warp.RULES`; ``latent`` is
            sqrt(height * width / base_area) * sqrt(latent frames).
        token_area: number of pixels under one token of a frame, which the rule of 2.0 counts.

    Raises:
        GulliverError: an unknown method or rule, or a shift that is not positive.
    """

    def __init__(
        self,
        num_timesteps: int = 1000,
        sample_method: Literal["uniform", "logit-normal"] = "uniform",
        loc: float = 0.0,
        scale: float = 1.0,
        shift: float = 1.0,
        use_timestep_transform: bool = False,
        base_area: float = 512.0 * 512.0,
        transform: str = "latent",
        token_area: float = 256.0,
    ) -> None:
        if sample_method not in METHODS:
            raise GulliverError(
                f"unknown sample_method {sample_method!r}: {nearest(sample_method, METHODS)}"
            )
        if transform not in RULES:
            raise GulliverError(f"unknown transform {transform!r}: {nearest(transform, RULES)}")
        if shift <= 0 or scale <= 0:
            raise GulliverError(f"shift and scale must be positive, not {shift} and {scale}")
        self.num_timesteps, self.sample_method = num_timesteps, sample_method
        self.loc, self.scale, self.shift = loc, scale, shift
        self.use_timestep_transform, self.base_area = use_timestep_transform, base_area
        self.transform, self.token_area = transform, token_area

    def warp(self, t: Tensor, height: float, width: float, num_frames: int) -> Tensor:
        """Multiplies the odds of levels `t` in [0, 1] as the clip's size asks for.

        Args:
            t: levels, of any shape.
            height: height of the clip in pixels.
            width: width of the clip in pixels.
            num_frames: number of latent frames.
        """
        ratio = self.shift
        if self.use_timestep_transform:
            size = ClipSize(height, width, num_frames, self.token_area, self.base_area)
            ratio *= RULES[self.transform](size)
        return ratio * t / (1 + (ratio - 1) * t)

    def sample_timesteps(
        self,
        batch: int,
        *,
        generator: torch.Generator | None = None,
        height: float,
        width: float,
        num_frames: int,
    ) -> Tensor:
        """Draws a level for each of `batch` clips, on the model's scale: [batch]."""
        if self.sample_method == "uniform":
            t = torch.rand(batch, generator=generator)
        else:
            t = (torch.randn(batch, generator=generator) * self.scale + self.loc).sigmoid()
        return self.warp(t, height, width, num_frames) * self.num_timesteps

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Mixes x0 and noise [B, C, T, H, W]: points of the paths at levels `timesteps` [B]."""
        t = (timesteps / self.num_timesteps).to(x0.dtype).view(-1, 1, 1, 1, 1)
        return (1 - t) * x0 + t * noise

    def _errors(
        self, output: Tensor, x0: Tensor, x_t: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        return (self._velocity(output, x0.shape[1]) - (x0 - noise)).square()

    def error(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Computes the mean square error of each clip's velocity, over frames to generate: [B]."""
        return frame_mean((self._velocity(output, target.shape[1]) - target).square(), mask)

    def timesteps(self, steps: int, height: float, width: float, num_frames: int) -> Tensor:
        """Lists the sampler's levels, from `num_timesteps` to 0: float64 [steps + 1]."""
        if steps < 1:
            raise GulliverError(f"sampling needs at least one step, not {steps}")
        even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return self.warp(even, height, width, num_frames) * self.num_timesteps

    def sample(
        self,
        model: Model,
        noise: Tensor,
        model_inputs: Mapping[str, Any],
        *,
        null_inputs: Mapping[str, Any] | None = None,
        imageless_inputs: Mapping[str, Any] | None = None,
        steps: int = 30,
        cfg_scale: float | Guidance = 1.0,
        timesteps: Tensor | None = None,
        given: Tensor | None = None,
        mask: Tensor | None = None,
        progress: Callable[[int, int], None] | None = None,
        preview: Preview | None = None,
    ) -> Tensor:
        """Follows the velocity from noise to data with Euler steps.

        Args:
            model: function called as in `loss`, with the branches of guidance in one batch, in the
                order of `Guidance.combine`.
            noise: noise [B, C, T, H, W].
            model_inputs: conditions by keyword of the model; height and width [B] among them decide
                the levels where `timesteps` does not.
            null_inputs: conditions that differ without caption, such as y and mask; needed where
                guidance is on.
            imageless_inputs: conditions that differ further without given frames, such as zeros for
                cond. None: that branch is shown the given frames of `mask` as noisy as the others.
            steps: number of Euler steps.
            cfg_scale: weight of the caption's velocity over that without caption, or `Guidance`.
            timesteps: levels [steps + 1] from `num_timesteps` to 0; None: `timesteps` of this flow.
            given: latents of the given frames, of noise's shape; others do not count.
            mask: mask [B, T], bool or from 0 to 1: True or 1 for frames to generate, False or 0 for
                given ones. A given frame joins once mask * num_timesteps reaches the level.
            progress: function that is called with (steps done, steps).
            preview: function that is called with (steps done, steps, estimate): the data that the
                velocity of the step leads to, with given frames as they are.

        Returns:
            Latents; given frames are exactly as they were.

        Raises:
            GulliverError: guidance without null_inputs; only one of given and mask; image guidance
                without given frames.
        """
        guidance = cfg_scale if isinstance(cfg_scale, Guidance) else Guidance(cfg_scale)
        branches = conditions(guidance, model_inputs, null_inputs, imageless_inputs)
        frames = GivenFrames.of(self, given, noise, mask)
        hide = guidance.branches == 3 and imageless_inputs is None
        if hide and frames is None:
            raise GulliverError(
                f"image guidance {guidance.image:g} needs given frames: pass given and mask, or "
                "imageless_inputs for a model that is told of them by inputs"
            )
        if timesteps is None:
            height, width = float(model_inputs["height"][0]), float(model_inputs["width"][0])
            timesteps = self.timesteps(steps, height, width, noise.shape[2])
        plan = self._steps(timesteps, guidance, noise.shape[1])
        return self._follow(model, noise, branches, plan, frames, progress, preview, hide)

    def _steps(self, timesteps: Tensor, guidance: Guidance, channels: int) -> list[SamplingStep]:
        levels = [float(level) for level in timesteps]

        def step(number: int) -> SamplingStep:
            level, after = levels[number], levels[number + 1]

            def advance(x: Tensor, answers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
                velocities = [self._velocity(answer, channels) for answer in answers]
                velocity = guidance.combine(velocities, number, len(levels) - 1)
                clean = x + level / self.num_timesteps * velocity
                return clean, x + (level - after) / self.num_timesteps * velocity

            return SamplingStep(level, advance)

        return [step(number) for number in range(len(levels) - 1)]

    @staticmethod
    def _velocity(output: Tensor, channels: int) -> Tensor:
        """Takes the first half of the channels where the model predicts a variance too."""
        if output.shape[1] not in (channels, 2 * channels):
            raise GulliverError(
                f"the model gives {output.shape[1]} channels for latents of {channels}: "
                "expected as many or twice as many"
            )
        return output[:, :channels]
