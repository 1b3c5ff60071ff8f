"""Diffusion processes, and guidance by caption and given frames, as in Open-Sora 1.2 to 2.0.

With guidance the model is called up to three times per step, in this order: with caption and given
frames, without a caption, and without both. The velocity is extrapolated away from the
unconditional velocities:

    v = v0 + image * (v1 - v0) + text * (v2 - v1)      (v0 without both, v1 frames only, v2 all)

With an image scale of 1 the third call cancels and is skipped. *Oscillation* sets a scale to 1 in
every second step after the first few, which reduces saturation at large scales. *Decay* reduces the
image scale to 1 (2.0: one step before the end) and ramps it over the frames from 1, so that frames
near the given first one can move. *Rescale* partly restores the standard deviation of v2.

Sources: https://arxiv.org/abs/2207.12598 (guidance), https://arxiv.org/abs/2211.09800 (two scales),
https://arxiv.org/abs/2305.08891 (rescale), Open-Sora 1.3 and 2.0 (oscillation, decay).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, GUIDANCE, SHARE, Options
from gulliver.video.config import SamplingConfig


@dataclass(frozen=True)
class Guidance(Options):
    """Guidance scales per step."""

    text: Annotated[float, GUIDANCE] = 1.0
    """Caption scale; 1 disables it."""
    image: Annotated[float, GUIDANCE] = 1.0
    """Scale of the given frames; 1 disables it."""
    text_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Number of first steps after which every second one has text scale 1; None: all steps have the
    full scale.
    """
    image_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Same for the image scale."""
    image_decay: bool = False
    """Whether the image scale decreases to 1 over the steps and increases from 1 over frames."""
    rescale: Annotated[float, SHARE] = 0.0
    """Weight of restoring the standard deviation of the fully conditioned velocity."""

    @property
    def branches(self) -> int:
        if self.image != 1:
            return 3
        return 1 if self.text == 1 else 2

    def text_scale(self, step: int) -> float:
        return _oscillating(self.text, step, self.text_oscillation)

    def image_scale(self, step: int, steps: int, frames: int) -> float | Tensor:
        """Returns the image scale at a step: a number for all frames, or float64 [frames]."""
        scale = _oscillating(self.image, step, self.image_oscillation)
        if not self.image_decay or scale <= 1:
            return scale
        highest = torch.linspace(scale, 1, steps, dtype=torch.float64)[step]
        return torch.linspace(1, float(highest), frames, dtype=torch.float64)

    def combine(self, answers: Sequence[Tensor], step: int, steps: int) -> Tensor:
        """Combines the velocities [B, C, T, H, W] of the branches at a step, counted from 0."""
        whole, *without = answers
        if not without:
            return whole
        base = without[0]
        if len(without) == 2:
            scale = self.image_scale(step, steps, whole.shape[2])
            if isinstance(scale, Tensor):
                scale = scale.to(whole).view(-1, 1, 1)
            base = without[1] + scale * (without[0] - without[1])
        velocity = base + self.text_scale(step) * (whole - without[0])
        if not self.rescale:
            return velocity
        dims = tuple(range(1, whole.ndim))
        factor = whole.std(dims, keepdim=True) / velocity.std(dims, keepdim=True)
        return velocity * (self.rescale * factor + (1 - self.rescale))


def _oscillating(scale: float, step: int, first: int | None) -> float:
    return scale if first is None or step < first or step % 2 == 0 else 1.0


def check_oscillation(sampling: SamplingConfig) -> None:
    """Raises an error for an oscillation that starts too late to change any step."""
    # Separate from `guidance_of`, because a model's default number of steps requires the model. Odd
    # steps oscillate, so with an odd number of steps the last one does not.
    most = sampling.steps // 2 * 2
    for name in ("guidance_oscillation", "guidance_image_oscillation"):
        first = getattr(sampling, name)
        if first is not None and first >= most:
            right = f"give less than {most}, or omit it" if most else "omit it"
            raise GulliverError(
                f"--{name.replace('_', '-')} {first} has no effect with --steps {sampling.steps}; "
                f"{right}"
            )


def guidance_of(sampling: SamplingConfig) -> Guidance:
    settings = {
        "--guidance": ("guidance_oscillation",),
        "--guidance-image": ("guidance_image_oscillation", "guidance_image_decay"),
    }
    for option, names in settings.items():
        off = getattr(sampling, option[2:].replace("-", "_")) == 1
        for name in names if off else ():
            if getattr(sampling, name) not in (None, False):
                raise GulliverError(
                    f"--{name.replace('_', '-')} has no effect with {option} 1; pass a scale such "
                    "as 3"
                )
    guidance = Guidance(
        text=sampling.guidance,
        image=sampling.guidance_image,
        text_oscillation=sampling.guidance_oscillation,
        image_oscillation=sampling.guidance_image_oscillation,
        image_decay=sampling.guidance_image_decay,
        rescale=sampling.guidance_rescale,
    )
    if guidance.rescale and guidance.branches == 1:
        raise GulliverError("--guidance-rescale has no effect with guidance 1; omit it")
    return guidance


# Common parts of rectified flow and IDDPM: the masked loss and the sampling loop.
#
# A diffusion defines how noise is mixed in (`add_noise`), the error of the model's output
# (`_errors`), and the steps from noise to data (`_steps`). Batching of guidance branches, given
# frames and previews are shared here.


Model = Callable[..., Tensor]
Preview = Callable[[int, int, Tensor], None]
"""Function called with (steps done, steps, estimate of the clean latents [B, C, T, H, W])."""


@dataclass(frozen=True)
class SamplingStep:
    """One step of a sampler."""

    level: float
    """Noise level passed to the model."""
    advance: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
    """Maps the latents and the model's outputs, one per guidance branch, to the estimate of the
    clean latents and the latents after the step.
    """


class Diffusion(ABC):
    """A noise process with its training loss and its sampler."""

    num_timesteps: int

    @abstractmethod
    def sample_timesteps(
        self,
        batch: int,
        *,
        generator: torch.Generator | None = None,
        height: float,
        width: float,
        num_frames: int,
    ) -> Tensor:
        """Draws a noise level for each of `batch` clips of one size: [batch]."""

    @abstractmethod
    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Mixes x0 and noise [B, C, T, H, W] at levels `timesteps` [B]."""

    @abstractmethod
    def _errors(
        self, output: Tensor, x0: Tensor, x_t: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        """Computes the elementwise error of a model's output: [B, C, T, H, W]."""

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
        """Computes the training loss of each clip.

        Args:
            model: function called as model(x_t, timesteps, **model_inputs).
            x0: latents [B, C, T, H, W].
            model_inputs: conditioning, by keyword of the model.
            noise: noise of x0's shape.
            timesteps: levels [B].
            mask: mask [B, T], True for frames to generate. Given frames are passed without noise
                and do not count; pass the same mask as x_mask in `model_inputs`.

        Returns:
            The losses [B].
        """
        x_t = self.point(x0, noise, timesteps, mask)
        output = model(x_t, timesteps, **model_inputs)
        return frame_mean(self._errors(output, x0, x_t, noise, timesteps), mask)

    def point(self, x0: Tensor, noise: Tensor, timesteps: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the model's input: noisy latents, and given frames without noise."""
        x_t = self.add_noise(x0, noise, timesteps)
        return x_t if mask is None else torch.where(over_pixels(mask), x_t, x0)

    @torch.no_grad()
    def _follow(
        self,
        model: Model,
        noise: Tensor,
        branches: Sequence[Mapping[str, Any]],
        steps: Sequence[SamplingStep],
        frames: GivenFrames | None,
        progress: Callable[[int, int], None] | None,
        preview: Preview | None,
        hide_given: bool = False,
    ) -> Tensor:
        """Samples from noise to data; `hide_given` adds noise to the last branch's given frames."""
        inputs, x = stacked(branches), noise if frames is None else frames.begin()
        for done, step in enumerate(steps, 1):
            shown = [x] * len(branches)
            if frames is not None:
                x = frames.join(x, step.level)
                shown, inputs["x_mask"] = frames.branches(x, len(branches), hide_given)
            t = noise.new_full((len(shown) * len(noise),), step.level)
            answers = model(torch.cat(shown), t, **inputs).to(noise.dtype).chunk(len(shown))
            clean, moved = step.advance(x, answers)
            if preview is not None:
                preview(done, len(steps), clean if frames is None else frames.keep(clean, x))
            x = moved if frames is None else frames.keep(moved, x)
            if progress is not None:
                progress(done, len(steps))
        return x


class GivenFrames:
    """Given frames during sampling, including those that are kept only down to a noise level."""

    # [Note: edit ratios] A given frame with mask value r is kept without noise down to level r.
    # There it is mixed with its part of `noise`, which has not been used before, and is generated
    # from then on: the smaller r, the closer it stays to the given frame. No random numbers are
    # drawn in between, so a clip does not depend on its batch.

    def __init__(self, diffusion: Diffusion, given: Tensor, noise: Tensor, mask: Tensor) -> None:
        self._diffusion, self._noise, self._mask = diffusion, noise, mask
        self._given = self._noisy = given.to(noise)
        self._active = mask >= 1

    @classmethod
    def of(
        cls, diffusion: Diffusion, given: Tensor | None, noise: Tensor, mask: Tensor | None
    ) -> GivenFrames | None:
        if given is None and mask is None:
            return None
        if given is None or mask is None:
            raise GulliverError("conditioning on given frames needs both `given` and `mask`")
        return cls(diffusion, given, noise, mask)

    def begin(self) -> Tensor:
        return self.keep(self._noise, self._given)

    def join(self, x: Tensor, level: float) -> Tensor:
        """Adds noise to the given frames whose regeneration starts at this level."""
        levels = self._noise.new_full((len(x),), level)
        self._noisy = self._diffusion.add_noise(self._given, self._noise, levels)
        # Ratios and levels are rounded: a ratio of 0.3 is also reached at 300.00001. A ratio of 0
        # is never reached, although IDDPM's last step is at level 0.
        reached = (self._mask > 0) & (self._mask + 1e-6 >= level / self._diffusion.num_timesteps)
        active = self._active | reached
        x = torch.where(over_pixels(active & ~self._active), self._noisy, x)
        self._active = active
        return x

    def branches(self, x: Tensor, count: int, hidden: bool) -> tuple[list[Tensor], Tensor]:
        """Returns the input of each branch, and the x_mask of all branches."""
        shown, masks = [x] * count, [self._active] * count
        if hidden:
            shown[-1] = torch.where(over_pixels(self._active), x, self._noisy)
            masks[-1] = torch.ones_like(self._active)
        return shown, torch.cat(masks)

    def keep(self, moved: Tensor, x: Tensor) -> Tensor:
        """Takes given frames from `x` and generated frames from `moved`."""
        return torch.where(over_pixels(self._active), moved, x)


def conditions(
    guidance: Guidance,
    inputs: Mapping[str, Any],
    null: Mapping[str, Any] | None,
    imageless: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns the conditioning of each branch: that of the previous one, with overrides."""
    if guidance.branches > 1 and not null:
        raise GulliverError(
            f"cfg_scale {guidance.text:g} needs null_inputs, the conditioning without captions"
        )
    changes = [inputs, null or {}, imageless or {}][: guidance.branches]
    return list(accumulate(map(dict, changes), lambda old, new: old | new))


def stacked(branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = dict(branches[0])
    for name, value in found.items():
        values = [branch[name] for branch in branches]
        if isinstance(value, Tensor):
            found[name] = torch.cat([one.to(value) for one in values])
        elif any(isinstance(one, Tensor) for one in values):
            raise GulliverError(
                f"{name} is a tensor in the unconditional inputs, so it must also be one in the "
                "conditional inputs"
            )
    return found


def frame_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Averages [B, C, T, H, W] over generated frames: [B]."""
    of_frames = values.mean(dim=(1, 3, 4))
    if mask is None:
        return of_frames.mean(dim=1)
    weights = mask.to(of_frames.dtype)
    return (of_frames * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def over_pixels(mask: Tensor) -> Tensor:
    """Reshapes a mask [B, T] to broadcast over [B, C, T, H, W]."""
    return mask[:, None, :, None, None]
