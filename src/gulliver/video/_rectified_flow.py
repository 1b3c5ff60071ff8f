"""Rectified flow: straight paths from noise to data.

A point on the path is x_t = (1 - t) x0 + t noise with t in [0, 1]; the model learns the velocity
x0 - noise that leads along it to the data. Sampling follows the velocity from t = 1 to 0.

Sources: https://arxiv.org/abs/2209.03003 (rectified flow), https://arxiv.org/abs/2403.03206
(logit-normal levels, resolution shift).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.video._warp import RULES, ClipSize

Model = Callable[..., Tensor]
METHODS = ("uniform", "logit-normal")


class RectifiedFlow:
    """Noise levels, the training loss and the sampler.

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

    def loss(
        self,
        model: Model,
        x0: Tensor,
        model_inputs: dict[str, Any],
        *,
        noise: Tensor,
        timesteps: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Computes the mean square error of each clip's velocity.

        Args:
            model: function called as model(x_t, timesteps, **model_inputs); of twice x0's channels
                the first half counts.
            x0: latents [B, C, T, H, W].
            model_inputs: conditions, by keyword of the model.
            noise: noise of x0's shape.
            timesteps: levels [B].
            mask: mask [B, T], True for frames to generate. Given frames are shown without noise
                and do not count; pass the same as x_mask in `model_inputs`.

        Returns:
            The errors [B].
        """
        x_t = self.point(x0, noise, timesteps, mask)
        return self.error(model(x_t, timesteps, **model_inputs), x0 - noise, mask)

    def point(self, x0: Tensor, noise: Tensor, timesteps: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the model's input: points on the paths, and given frames without noise."""
        x_t = self.add_noise(x0, noise, timesteps)
        return x_t if mask is None else torch.where(_frames(mask), x_t, x0)

    def error(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Computes the mean square error of each clip's velocity, over frames to generate: [B]."""
        velocity = self._velocity(output, target.shape[1])
        error = (velocity - target).square().mean(dim=(1, 3, 4))
        if mask is None:
            return error.mean(dim=1)
        weights = mask.to(error.dtype)
        return (error * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)

    def timesteps(self, steps: int, height: float, width: float, num_frames: int) -> Tensor:
        """Lists the sampler's levels, from `num_timesteps` to 0: float64 [steps + 1]."""
        if steps < 1:
            raise GulliverError(f"sampling needs at least one step, not {steps}")
        even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return self.warp(even, height, width, num_frames) * self.num_timesteps

    @torch.no_grad()
    def sample(
        self,
        model: Model,
        noise: Tensor,
        model_inputs: dict[str, Any],
        *,
        null_y: Tensor | None = None,
        steps: int = 30,
        cfg_scale: float = 1.0,
        given: Tensor | None = None,
        mask: Tensor | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Follows the velocity from noise to data with Euler steps.

        Args:
            model: function called as in `loss`.
            noise: noise [B, C, T, H, W].
            model_inputs: conditions, among them y [B, 1, L, D], height and width [B].
            null_y: embedding of no caption, of y's shape; needed where cfg_scale is not 1.
            steps: number of Euler steps.
            cfg_scale: weight of the caption's velocity over that without caption.
            given: latents of the given frames, of noise's shape; others do not count.
            mask: mask [B, T], True for frames to generate.
            progress: function that is called with (steps done, steps).

        Returns:
            Latents; given frames are exactly as they were.

        Raises:
            GulliverError: guidance without null_y; only one of given and mask.
        """
        if cfg_scale != 1 and null_y is None:
            raise GulliverError(f"cfg_scale {cfg_scale} needs null_y, what stands for no caption")
        if (given is None) != (mask is None):
            raise GulliverError("given frames need both `given` and `mask`")
        height, width = float(model_inputs["height"][0]), float(model_inputs["width"][0])
        inputs = dict(model_inputs)
        if mask is not None:
            inputs["x_mask"] = mask
        if cfg_scale != 1:
            inputs = {k: v if v is None else torch.cat([v, v]) for k, v in inputs.items()}
            inputs["y"] = torch.cat([model_inputs["y"], null_y.to(model_inputs["y"])])  # type: ignore[union-attr]
        x = noise
        levels = self.timesteps(steps, height, width, noise.shape[2])
        for number in range(steps):
            if mask is not None and given is not None:
                x = torch.where(_frames(mask), x, given)
            step = float(levels[number] - levels[number + 1]) / self.num_timesteps
            x = x + step * self._guided(model, x, levels[number], inputs, cfg_scale)
            if progress is not None:
                progress(number + 1, steps)
        if mask is not None and given is not None:
            x = torch.where(_frames(mask), x, given)
        return x

    def _guided(
        self, model: Model, x: Tensor, level: Tensor, inputs: dict[str, Any], cfg_scale: float
    ) -> Tensor:
        """Computes the velocity at x, led away from that without caption where guidance is on."""
        both = torch.cat([x, x]) if cfg_scale != 1 else x
        timesteps = level.to(x).expand(len(both))
        velocity = self._velocity(model(both, timesteps, **inputs), x.shape[1])
        if cfg_scale == 1:
            return velocity.to(x.dtype)
        with_caption, without = velocity.to(x.dtype).chunk(2)
        return without + cfg_scale * (with_caption - without)

    @staticmethod
    def _velocity(output: Tensor, channels: int) -> Tensor:
        """Takes the first half of the channels where the model predicts a variance too."""
        if output.shape[1] not in (channels, 2 * channels):
            raise GulliverError(
                f"the model gives {output.shape[1]} channels for latents of {channels}: "
                "expected as many or twice as many"
            )
        return output[:, :channels]


def _frames(mask: Tensor) -> Tensor:
    """Views a mask [B, T] as one over [B, C, T, H, W]."""
    return mask[:, None, :, None, None]
