"""Rectified flow: straight paths from noise to data.

A point on the path is x_t = (1 - t) x0 + t noise with t in [0, 1]; the model learns the velocity
x0 - noise that leads along it to the data. Sampling follows the velocity from t = 1 to 0.

Sources: https://arxiv.org/abs/2209.03003 (rectified flow), https://arxiv.org/abs/2403.03206
(logit-normal levels, resolution shift).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.video._guidance import Guidance
from gulliver.video._warp import RULES, ClipSize

Model = Callable[..., Tensor]
Preview = Callable[[int, int, Tensor], None]
"""Function called with (steps done, steps, estimate of the clean latents [B, C, T, H, W])."""
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
        model_inputs: Mapping[str, Any],
        *,
        null_y: Tensor | None = None,
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
            null_y: embedding of no caption or of a negative prompt, of y's shape; short for
                ``null_inputs={"y": null_y}``.
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
            GulliverError: guidance without null_inputs; only one of given and mask; guidance by
                given frames that there are not.

        [Note: edit ratios] A given frame with mask value r is shown without noise, and left as it
        is, down to level r; there it is mixed with the noise that its place in `noise` holds, which
        nothing else has used, and is generated from then on: the smaller r, the nearer it stays to
        what was given. Nothing is drawn on the way, so a clip does not depend on its batch.
        """
        guidance = cfg_scale if isinstance(cfg_scale, Guidance) else Guidance(cfg_scale)
        null = {**({} if null_y is None else {"y": null_y}), **(null_inputs or {})}
        _check_branches(guidance, null, imageless_inputs, given, mask)
        changes = [model_inputs, null, imageless_inputs or {}][: guidance.branches]
        inputs = stacked(list(accumulate(changes, lambda old, new: {**old, **new})))
        if timesteps is None:
            height, width = float(model_inputs["height"][0]), float(model_inputs["width"][0])
            timesteps = self.timesteps(steps, height, width, noise.shape[2])
        levels = [float(level) for level in timesteps]
        steps = len(levels) - 1
        frames = None if given is None or mask is None else _GivenFrames(self, given, noise, mask)
        x = noise if frames is None else frames.begin()
        for step, level in enumerate(levels[:-1]):
            shown = [x] * guidance.branches
            if frames is not None:
                x = frames.join(x, level)
                hidden = guidance.branches == 3 and imageless_inputs is None
                shown, inputs["x_mask"] = frames.branches(x, guidance.branches, hidden)
            t = noise.new_full((len(shown) * len(noise),), level)
            answer = self._velocity(model(torch.cat(shown), t, **inputs), noise.shape[1])
            answers = answer.to(noise.dtype).chunk(len(shown))
            velocity = guidance.combine(answers, step, steps)
            if preview is not None:
                clean = x + level / self.num_timesteps * velocity
                preview(step + 1, steps, clean if frames is None else frames.keep(clean, x))
            moved = x + (level - levels[step + 1]) / self.num_timesteps * velocity
            x = moved if frames is None else frames.keep(moved, x)
            if progress is not None:
                progress(step + 1, steps)
        return x

    @staticmethod
    def _velocity(output: Tensor, channels: int) -> Tensor:
        """Takes the first half of the channels where the model predicts a variance too."""
        if output.shape[1] not in (channels, 2 * channels):
            raise GulliverError(
                f"the model gives {output.shape[1]} channels for latents of {channels}: "
                "expected as many or twice as many"
            )
        return output[:, :channels]


class _GivenFrames:
    """Given frames while a clip is sampled: which of them are generated already."""

    def __init__(self, flow: RectifiedFlow, given: Tensor, noise: Tensor, mask: Tensor) -> None:
        self._flow, self._noise, self._mask = flow, noise, mask
        self._given = self._noisy = given.to(noise)
        self._active = mask >= 1

    def begin(self) -> Tensor:
        """Returns noise, and given frames as they are."""
        return torch.where(_frames(self._active), self._noise, self._given)

    def join(self, x: Tensor, level: float) -> Tensor:
        """Adds noise of a level to the frames that are generated from that level on."""
        levels = self._noise.new_full((len(x),), level)
        self._noisy = self._flow.add_noise(self._given, self._noise, levels)
        # Ratios and levels are rounded: a ratio of 0.3 is reached at 300.00001 too.
        active = self._active | (self._mask + 1e-6 >= level / self._flow.num_timesteps)
        x = torch.where(_frames(active & ~self._active), self._noisy, x)
        self._active = active
        return x

    def branches(self, x: Tensor, count: int, hidden: bool) -> tuple[list[Tensor], Tensor]:
        """Returns what each branch is shown, and x_mask of all of them."""
        shown, masks = [x] * count, [self._active] * count
        if hidden:
            shown[-1] = torch.where(_frames(self._active), x, self._noisy)
            masks[-1] = torch.ones_like(self._active)
        return shown, torch.cat(masks)

    def keep(self, moved: Tensor, x: Tensor) -> Tensor:
        """Takes the step for frames that are generated, and leaves given ones as they were."""
        return torch.where(_frames(self._active), moved, x)


def _check_branches(
    guidance: Guidance,
    null: Mapping[str, Any],
    imageless: Mapping[str, Any] | None,
    given: Tensor | None,
    mask: Tensor | None,
) -> None:
    if guidance.branches > 1 and not null:
        raise GulliverError(f"cfg_scale {guidance.text:g} needs null_y, what stands for no caption")
    if (given is None) != (mask is None):
        raise GulliverError("given frames need both `given` and `mask`")
    if guidance.branches == 3 and given is None and imageless is None:
        raise GulliverError(
            f"image guidance {guidance.image:g} needs given frames: pass given and mask, or "
            "imageless_inputs for a model that is told of them by inputs"
        )


def stacked(branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins inputs of the branches into those of one batch; what is no tensor is the first's."""
    stacked = dict(branches[0])
    for name, value in stacked.items():
        values = [branch[name] for branch in branches]
        if isinstance(value, Tensor):
            stacked[name] = torch.cat([one.to(value) for one in values])
        elif any(isinstance(one, Tensor) for one in values):
            raise GulliverError(f"{name} is a tensor without caption: give it with caption too")
    return stacked


def _frames(mask: Tensor) -> Tensor:
    """Views a mask [B, T] as one over [B, C, T, H, W]."""
    return mask[:, None, :, None, None]
