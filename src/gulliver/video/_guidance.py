"""Classifier-free guidance by caption and by given frames, as Open-Sora 1.2 to 2.0 sample.

The model is asked up to three times at each step, in this order: with caption and given frames,
without caption, and without both. The velocity leads away from what it says without:

    v = v0 + image * (v1 - v0) + text * (v2 - v1)      (v0 without both, v1 frames only, v2 all)

With an image scale of 1 the third answer cancels and is not asked for. *Oscillation* sets a scale
to 1 in every second step after the first few: less saturated colours at large scales. *Decay* lets
the image scale end at 1 (2.0: one step short of it) and ramps it over the frames from 1, so that
frames near the given first one are free to move. *Rescale* pulls the standard deviation of the
velocity back towards that of v2.

Sources: https://arxiv.org/abs/2207.12598 (guidance), https://arxiv.org/abs/2211.09800 (two scales),
https://arxiv.org/abs/2305.08891 (rescale), Open-Sora 1.3 and 2.0 (oscillation, decay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, GUIDANCE, SHARE, Options
from gulliver.video._config import SamplingConfig


@dataclass(frozen=True)
class Guidance(Options):
    """Scales of guidance at each step."""

    text: Annotated[float, GUIDANCE] = 1.0
    """Weight of the caption's velocity over that without caption; 1 turns it off."""
    image: Annotated[float, GUIDANCE] = 1.0
    """Weight of the given frames' velocity over that without them; 1 turns it off."""
    text_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Number of first steps after which every second has text scale 1; None: all steps have the
    full scale."""
    image_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """The same for the image scale."""
    image_decay: bool = False
    """Whether the image scale falls over the steps to 1, and rises over the frames from 1."""
    rescale: Annotated[float, SHARE] = 0.0
    """Share by which the standard deviation is set back to that of the answer with caption and
    frames."""

    @property
    def branches(self) -> int:
        """Number of times that the model is asked in a step."""
        if self.image != 1:
            return 3
        return 1 if self.text == 1 else 2

    def text_scale(self, step: int) -> float:
        """Returns the weight of the caption at a step, numbered from 0."""
        return _oscillating(self.text, step, self.text_oscillation)

    def image_scale(self, step: int, steps: int, frames: int) -> float | Tensor:
        """Returns the weight of the given frames at a step: of all frames, or float64 [frames]."""
        scale = _oscillating(self.image, step, self.image_oscillation)
        if not self.image_decay or scale <= 1:
            return scale
        highest = torch.linspace(scale, 1, steps, dtype=torch.float64)[step]
        return torch.linspace(1, float(highest), frames, dtype=torch.float64)

    def combine(self, answers: Sequence[Tensor], step: int, steps: int) -> Tensor:
        """Combines the answers of a step.

        Args:
            answers: velocities [B, C, T, H, W] with caption and frames, without caption, and
                without both; as many as `branches`.
            step: number of the step, from 0.
            steps: number of steps.

        Returns:
            The velocity [B, C, T, H, W].
        """
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
    """Refuses an oscillation that would begin after the last step that it could change."""
    # Apart from `guidance_of`, since a model's own number of steps is known only with the model.
    # Odd steps oscillate, so an odd number of steps has a last one that does not.
    most = sampling.steps // 2 * 2
    for name in ("guidance_oscillation", "guidance_image_oscillation"):
        first = getattr(sampling, name)
        if first is not None and first >= most:
            right = f"give less than {most}, or leave it out" if most else "leave it out"
            raise GulliverError(
                f"--{name.replace('_', '-')} {first} has no effect with --steps "
                f"{sampling.steps}: {right}"
            )


def guidance_of(sampling: SamplingConfig) -> Guidance:
    """Returns the guidance that sampling options ask for."""
    settings = {
        "--guidance": ("guidance_oscillation",),
        "--guidance-image": ("guidance_image_oscillation", "guidance_image_decay"),
    }
    for option, names in settings.items():
        off = getattr(sampling, option[2:].replace("-", "_")) == 1
        for name in names if off else ():
            if getattr(sampling, name) not in (None, False):
                raise GulliverError(
                    f"--{name.replace('_', '-')} with {option} 1: that guidance is off, give it a "
                    "weight such as 3"
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
        raise GulliverError(
            "--guidance-rescale with guidance 1: there is nothing to rescale, leave it out"
        )
    return guidance
