"""Rectified flow with timestep shifts, and IDDPM.

Large clips are still recognizable at noise that would hide small ones, so shifts raise their noise
levels. A shift multiplies the odds t / (1 - t) of a level by a ratio that depends on the clip size;
releases differ in the rule.

Sources: https://arxiv.org/abs/2403.03206 (resolution), https://arxiv.org/abs/2412.20404 (length).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gulliver.errors import GulliverError, check_known
from gulliver.video.diffusion import (
    Diffusion,
    GivenFrames,
    Guidance,
    Model,
    Preview,
    SamplingStep,
    conditions,
    frame_mean,
)


@dataclass(frozen=True)
class ClipSize:
    """Height and width in pixels, and latent frames."""

    # `token_area` is the number of pixels per token of a frame, `base_area` the area of a still
    # with ratio 1.

    height: float
    width: float
    latent_frames: int
    token_area: float = 256.0
    base_area: float = 512.0 * 512.0

    @property
    def side_ratio(self) -> float:
        return math.sqrt(self.height * self.width / self.base_area)


def _by_latent_frames(size: ClipSize) -> float:
    return size.side_ratio * math.sqrt(size.latent_frames)


def _by_whole_pieces(size: ClipSize) -> float:
    """Open-Sora 1.2 rule: frames // 17 * 5, the latent frames of complete autoencoder chunks."""
    frames = 1 if size.latent_frames == 1 else size.latent_frames // 5 * 5
    if frames == 0:
        raise GulliverError(
            "the timestep shift of Open-Sora 1.2 needs at least 5 latent frames, but the clip has "
            f"{size.latent_frames}; use longer clips, or another --flow.shift-rule"
        )
    return size.side_ratio * math.sqrt(frames)


def _by_frames_after_the_first(size: ClipSize) -> float:
    """Open-Sora 1.3 rule: (frames - 1) // 4, the latent frames after the first."""
    return size.side_ratio * math.sqrt(max(1, size.latent_frames - 1))


def _by_tokens(size: ClipSize) -> float:
    """Open-Sora 2.0 rule: linear in the tokens per frame, from 1 at 256 to 3 at 4096."""
    tokens = size.height * size.width / size.token_area
    return (1 + (tokens - 256) * 2 / (4096 - 256)) * math.sqrt(size.latent_frames)


RULES: dict[str, Callable[[ClipSize], float]] = {
    "latent": _by_latent_frames,
    "1.2": _by_whole_pieces,
    "1.3": _by_frames_after_the_first,
    "2.0": _by_tokens,
}
"""Rules by name: Gulliver's own, and those of Open-Sora's versions."""


# Rectified flow: straight paths from noise to data.
#
# A point on the path is x_t = (1 - t) x0 + t noise with t in [0, 1]; the model learns the velocity
# x0 - noise towards the data. Sampling follows the velocity from t = 1 to 0.
#
# Sources: https://arxiv.org/abs/2209.03003 (rectified flow), https://arxiv.org/abs/2403.03206
# (logit-normal levels, resolution shift).


METHODS = ("uniform", "logit-normal")


class RectifiedFlow(Diffusion):
    """Noise levels, the training loss (mean squared error of the velocity) and the sampler.

    Levels are on the model's scale from 0 (data) to `num_timesteps` (noise).

    Args:
        num_timesteps: level of pure noise.
        sample_method: distribution of the levels in training.
        loc: mean of the logit of logit-normal levels.
        scale: standard deviation of that logit.
        shift: factor of the odds t / (1 - t) of every level, in training and sampling.
        use_timestep_transform: whether to also multiply the odds by a ratio that depends on the
            clip size.
        base_area: area in pixels at which that ratio is 1 for a still.
        transform: rule for that ratio, a name in `RULES`; ``latent`` is sqrt(height * width /
            base_area) * sqrt(latent frames).
        token_area: number of pixels per token of a frame, for the rule of 2.0.

    Raises:
        GulliverError: the method is unknown, or the shift is not positive.
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
        check_known("sample_method", sample_method, METHODS)
        if shift <= 0 or scale <= 0:
            raise GulliverError(f"shift and scale must be positive, not {shift} and {scale}")
        self.num_timesteps, self.sample_method = num_timesteps, sample_method
        self.loc, self.scale, self.shift = loc, scale, shift
        self.use_timestep_transform, self.base_area = use_timestep_transform, base_area
        self.transform, self.token_area = transform, token_area

    def warp(self, t: Tensor, height: float, width: float, num_frames: int) -> Tensor:
        """Multiplies the odds of levels `t` in [0, 1] by the shift for this clip size."""
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
        if self.sample_method == "uniform":
            t = torch.rand(batch, generator=generator)
        else:
            t = (torch.randn(batch, generator=generator) * self.scale + self.loc).sigmoid()
        return self.warp(t, height, width, num_frames) * self.num_timesteps

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        t = (timesteps / self.num_timesteps).to(x0.dtype).view(-1, 1, 1, 1, 1)
        return (1 - t) * x0 + t * noise

    def _errors(
        self, output: Tensor, x0: Tensor, x_t: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        return (self._velocity(output, x0.shape[1]) - (x0 - noise)).square()

    def error(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """Computes the mean squared error of each clip's velocity, over generated frames: [B]."""
        return frame_mean((self._velocity(output, target.shape[1]) - target).square(), mask)

    def timesteps(self, steps: int, height: float, width: float, num_frames: int) -> Tensor:
        """Returns the sampler's levels, from `num_timesteps` to 0: float64 [steps + 1]."""
        if steps < 1:
            raise GulliverError(f"steps={steps} must be at least 1")
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
            model: function called as in `loss`, with the guidance branches in one batch, in the
                order of `Guidance.combine`.
            noise: noise [B, C, T, H, W].
            model_inputs: conditioning by keyword of the model; its height and width [B] determine
                the levels unless `timesteps` is given.
            null_inputs: overrides of `model_inputs` without caption, such as y and mask; needed
                for guidance.
            imageless_inputs: further overrides without given frames, such as zeros for cond. None:
                that branch gets the given frames of `mask` with noise.
            steps: number of Euler steps.
            cfg_scale: guidance scale of the caption, or `Guidance`.
            timesteps: levels [steps + 1] from `num_timesteps` to 0; None: `timesteps` of this flow.
            given: latents of the given frames, with noise's shape; other frames are ignored.
            mask: mask [B, T], bool or from 0 to 1: True or 1 for frames to generate, False or 0 for
                given ones. Values in between generate from level mask * num_timesteps.
            progress: function called with (steps done, steps).
            preview: function called with (steps done, steps, estimate): the predicted data at this
                step, with given frames inserted.

        Returns:
            Latents; given frames are unchanged.

        Raises:
            GulliverError: guidance has no null_inputs, only one of given and mask is passed, or
                image guidance has no given frames.
        """
        guidance = cfg_scale if isinstance(cfg_scale, Guidance) else Guidance(cfg_scale)
        branches = conditions(guidance, model_inputs, null_inputs, imageless_inputs)
        frames = GivenFrames.of(self, given, noise, mask)
        hide = guidance.branches == 3 and imageless_inputs is None
        if hide and frames is None:
            raise GulliverError(
                f"image guidance {guidance.image:g} needs given frames; pass given and mask, or "
                "imageless_inputs for a model with frame conditioning inputs"
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
        """Drops the second half of the channels if the model also predicts a variance."""
        if output.shape[1] not in (channels, 2 * channels):
            raise GulliverError(
                f"the model returns {output.shape[1]} channels for latents of {channels}; "
                "expected the same or twice the number"
            )
        return output[:, :channels]


# Improved denoising diffusion: the noise process of Open-Sora 1.0 and 1.1.
#
# A point is x_t = sqrt(a_t) x0 + sqrt(1 - a_t) noise with a_t decreasing over steps t = 0 ... 999.
# The model predicts the noise, and for each element the log variance of the reverse step as an
# interpolation between its lower and upper bound. `IDDPM` has the interface of `RectifiedFlow`, so
# that pipelines and the training loop accept either.


BIN = 1 / 255
"""Half a level of an 8-bit picture with values in [-1, 1], for the likelihood of the data."""


# [Note: respaced steps] Sampling uses few of the 1000 steps. They form a process with the same
# values of a, so its betas are 1 - a_i / a_(i-1); the model receives the original step.
#
# Sources: https://arxiv.org/abs/2102.09672 (learned variances, respacing),
# https://arxiv.org/abs/2006.11239 (linear schedule).
def linear_betas(count: int) -> Tensor:
    """Returns linearly increasing betas, from 0.0001 to 0.02 for 1000 steps: float64 [count]."""
    scale = 1000 / count
    return torch.linspace(scale * 0.0001, scale * 0.02, count, dtype=torch.float64)


def spaced(count: int, steps: int) -> list[int]:
    """Selects `steps` of `count` steps, evenly from the first to the last."""
    if not 2 <= steps <= count:
        raise GulliverError(
            f"{steps} sampling steps are not possible with {count} training steps; use 2 to {count}"
        )
    stride, place, taken = (count - 1) / (steps - 1), 0.0, []
    for _ in range(steps):
        # Accumulated instead of multiplied, like the reference code: halves round the same way.
        taken.append(round(place))
        place += stride
    return taken


class Process(NamedTuple):
    """Coefficients of a diffusion process of N steps, each float64 [N]."""

    # Cumulative signal power a.
    kept: Tensor
    # Factor of x0 in the mean of the reverse step.
    of_data: Tensor
    # Factor of x_t in that mean.
    of_point: Tensor
    # Lower bound of the reverse step's log variance.
    least: Tensor
    # Upper bound of the reverse step's log variance.
    most: Tensor


def process_of(kept: Tensor) -> Process:
    """Computes the coefficients from cumulative signal powers `kept` [N]."""
    before = torch.cat([torch.ones_like(kept[:1]), kept[:-1]])
    betas = 1 - kept / before
    variance = betas * (1 - before) / (1 - kept)
    # The last reverse step has zero variance, which has no logarithm.
    variance = torch.cat([variance[1:2], variance[1:]])
    of_data = betas * before.sqrt() / (1 - kept)
    of_point = (1 - before) * (kept / before).sqrt() / (1 - kept)
    return Process(kept, of_data, of_point, variance.log(), betas.log())


class IDDPM(Diffusion):
    """Improved DDPM: noise process, training loss and sampler."""

    def __init__(self, num_timesteps: int = 1000, guided_channels: int | None = None) -> None:
        betas = linear_betas(num_timesteps)
        self.num_timesteps, self.guided_channels = num_timesteps, guided_channels
        self.process = process_of((1 - betas).cumprod(0))

    def sample_timesteps(
        self, batch: int, *, generator: torch.Generator | None = None, **clip: float
    ) -> Tensor:
        del clip
        return torch.randint(self.num_timesteps, (batch,), generator=generator).float()

    def add_noise(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        kept = _at(self.process.kept, timesteps, x0)
        return kept.sqrt() * x0 + (1 - kept).sqrt() * noise

    def _errors(
        self, output: Tensor, x0: Tensor, x_t: Tensor, noise: Tensor, timesteps: Tensor
    ) -> Tensor:
        """Returns the squared error of the noise plus the variational bound, in bits."""
        predicted, share = _halves(output, x0)
        # The bound trains only the variance: the predicted noise is detached.
        bits = self._bits(x0, x_t, timesteps, predicted.detach(), share)
        return (noise - predicted).square() + bits

    def _bits(
        self, x0: Tensor, x_t: Tensor, timesteps: Tensor, noise: Tensor, share: Tensor
    ) -> Tensor:
        """Computes the bound in bits per element: a KL divergence, or the likelihood at step 0."""
        of_data, of_point, least = (
            _at(values, timesteps, x0)
            for values in (self.process.of_data, self.process.of_point, self.process.least)
        )
        wanted = of_data * x0 + of_point * x_t
        mean, log_variance = self._back(self.process, x_t, timesteps, noise, share)
        apart = (wanted - mean).square() * (-log_variance).exp()
        divergence = 0.5 * (log_variance - least - 1 + (least - log_variance).exp() + apart)
        likelihood = _discrete_likelihood(x0, mean, 0.5 * log_variance)
        last = (timesteps == 0).view(-1, 1, 1, 1, 1)
        return torch.where(last, -likelihood, divergence) / math.log(2)

    @staticmethod
    def _back(
        process: Process, x_t: Tensor, steps: Tensor, noise: Tensor, share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance of a reverse step from x_t at steps [B] of a process."""
        kept, of_data, of_point, least, most = (_at(values, steps, x_t) for values in process)
        x0 = _clean(kept, x_t, noise)
        share = (share + 1) / 2
        return of_data * x0 + of_point * x_t, share * most + (1 - share) * least

    def sample(
        self,
        model: Model,
        noise: Tensor,
        model_inputs: Mapping[str, Any],
        *,
        null_inputs: Mapping[str, Any] | None = None,
        steps: int = 100,
        cfg_scale: float | Guidance = 1.0,
        given: Tensor | None = None,
        mask: Tensor | None = None,
        step_noise: Callable[[int], Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
        preview: Preview | None = None,
    ) -> Tensor:
        guidance = cfg_scale if isinstance(cfg_scale, Guidance) else Guidance(cfg_scale)
        if guidance.image != 1:
            raise GulliverError(
                f"image guidance {guidance.image:g} needs a rectified flow model; omit it"
            )
        if mask is not None and bool(((mask > 0) & (mask < 1)).any()):
            raise GulliverError("edit ratios need a rectified flow model; use ratio 0")
        branches = conditions(guidance, model_inputs, null_inputs)
        frames = GivenFrames.of(self, given, noise, mask)
        plan = self._steps(steps, guidance, step_noise)
        return self._follow(model, noise, branches, plan, frames, progress, preview)

    def _steps(
        self, steps: int, guidance: Guidance, step_noise: Callable[[int], Tensor] | None
    ) -> list[SamplingStep]:
        taken = spaced(self.num_timesteps, steps)
        process = process_of(self.process.kept[taken])

        def step(number: int) -> SamplingStep:
            def advance(x: Tensor, answers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
                halves = [_halves(answer, x) for answer in answers]
                predicted, share = self._guided(guidance, halves, steps - 1 - number, steps)
                at = torch.full((len(x),), number, device=x.device)
                clean = _clean(_at(process.kept, at, x), x, predicted)
                back, log_variance = self._back(process, x, at, predicted, share)
                if number:
                    drawn = torch.randn_like(x) if step_noise is None else step_noise(number).to(x)
                    back = back + (0.5 * log_variance).exp() * drawn
                return clean, back

            # The model receives the step of the full process.
            return SamplingStep(float(taken[number]), advance)

        return [step(number) for number in reversed(range(steps))]

    def _guided(
        self, guidance: Guidance, answers: Sequence[tuple[Tensor, Tensor]], step: int, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Applies guidance to the noise; the variance is that of the branch with caption."""
        noise, share = answers[0]
        led = noise.shape[1] if self.guided_channels is None else self.guided_channels
        away = guidance.combine([answer[:, :led] for answer, _ in answers], step, steps)
        return torch.cat([away, noise[:, led:]], dim=1), share


def _at(values: Tensor, steps: Tensor, like: Tensor) -> Tensor:
    """Gathers values at steps [B], in a shape that broadcasts over [B, C, T, H, W]."""
    picked = values.to(steps.device)[steps.long()]
    return picked.to(torch.promote_types(like.dtype, torch.float32)).view(-1, 1, 1, 1, 1)


def _clean(kept: Tensor, x_t: Tensor, noise: Tensor) -> Tensor:
    return (1 / kept).sqrt() * x_t - (1 / kept - 1).sqrt() * noise


def _halves(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    if output.shape[1] != 2 * x.shape[1]:
        raise GulliverError(
            f"the model returns {output.shape[1]} channels for latents of {x.shape[1]}; noise and "
            "variance need twice as many, so build it with pred_sigma=True"
        )
    noise, share = output.to(x.dtype).chunk(2, dim=1)
    return noise, share


def _discrete_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log likelihood of values with 256 levels, under Gaussians with an approximate CDF."""
    apart, narrow = x - mean, (-log_scale).exp()
    above, below = _normal(narrow * (apart + BIN)), _normal(narrow * (apart - BIN))
    # The outermost levels include everything beyond.
    inside = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return inside.clamp(min=1e-12).log()


def _normal(x: Tensor) -> Tensor:
    """The standard normal CDF, using GELU's tanh approximation."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
