"""Guidance and given frames in the sampler, against float64 loops written down from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.video import Guidance, RectifiedFlow
from tests.parallel.test_stdit_parallel import Case, build, inputs_of

Velocity = Callable[..., Tensor]
STEPS = 7


@dataclass(frozen=True)
class Asked:
    """A way to sample; numbers as the public configurations have them, oscillation sooner."""

    text: float = 2.5
    image: float = 1.0
    text_oscillation: int | None = None
    image_oscillation: int | None = None
    decay: bool = False
    rescale: float = 0.0
    ratios: list[list[float]] | None = None
    negative: bool = False
    by_inputs: bool = False
    warp: dict[str, Any] = field(default_factory=dict)


RATIOS = [[0.0, 1.0, 0.35, 1.0, 0.0], [1.0, 0.8, 1.0, 0.0, 0.62]]
WAYS = {
    "off": Asked(text=1),
    "text": Asked(),
    "warped": Asked(warp={"shift": 1.7, "use_timestep_transform": True}),
    "negative": Asked(negative=True, rescale=0.7),
    "oscillating": Asked(text_oscillation=2, ratios=RATIOS),
    "edited": Asked(text=1, ratios=RATIOS, warp={"shift": 3.0}),
    "image": Asked(image=1.8, ratios=RATIOS, rescale=0.4),
    "image alone": Asked(text=1, image=1.8, ratios=[[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
    "decayed": Asked(
        image=3.0, text_oscillation=3, image_oscillation=2, decay=True, ratios=RATIOS, negative=True
    ),
    "by inputs": Asked(image=3.0, decay=True, by_inputs=True),
}


def naive(
    asked: Asked,
    model: Velocity,
    noise: Tensor,
    inputs: list[list[dict]],
    given: Tensor,
) -> Tensor:
    """Samples one clip after the other, one answer of the model after the other.

    `inputs` holds those of each clip with caption and frames, without caption, and without both.
    """
    clips = []
    for number, branches in enumerate(inputs):
        ratios = None if asked.ratios is None else asked.ratios[number]
        clips.append(_naive_clip(asked, model, noise[number], branches, ratios, given[number]))
    return torch.stack(clips)


def _naive_clip(
    asked: Asked,
    model: Velocity,
    noise: Tensor,
    branches: list[dict],
    ratios: list[float] | None,
    given: Tensor,
) -> Tensor:
    frames = noise.shape[1]
    ratio = asked.warp.get("shift", 1.0)
    if asked.warp.get("use_timestep_transform"):
        sides = float(branches[0]["height"][0] * branches[0]["width"][0])
        ratio *= math.sqrt(sides / 512**2) * math.sqrt(frames)
    even = [1 - n / STEPS for n in range(STEPS + 1)]
    levels = [ratio * t / (1 + (ratio - 1) * t) for t in even]
    x, masked, ratios = noise.clone(), ratios is not None, ratios or [1.0] * frames
    for f in range(frames):
        if ratios[f] < 1:
            x[:, f] = given[:, f]
    going = [ratio == 1 for ratio in ratios]
    for step in range(STEPS):
        t = levels[step]
        noisy = (1 - t) * given + t * noise
        for f in range(frames):
            if not going[f] and ratios[f] >= t:
                x[:, f], going[f] = noisy[:, f], True

        def ask(branch: int, x: Tensor = x, t: float = t, noisy: Tensor = noisy) -> Tensor:
            shown, told = x.clone(), torch.tensor(going)
            if branch == 2 and not asked.by_inputs:
                for f in range(frames):
                    if not going[f]:
                        shown[:, f] = noisy[:, f]
                told = torch.ones(frames, dtype=torch.bool)
            mask = {"x_mask": told[None]} if masked else {}
            level = torch.tensor([1000 * t], dtype=noise.dtype)
            return model(shown[None], level, **branches[branch], **mask)[0, : x.shape[0]]

        def scale(full: float, first: int | None, step: int = step) -> float:
            return full if first is None or step < first or step % 2 == 0 else 1.0

        text = scale(asked.text, asked.text_oscillation)
        image = scale(asked.image, asked.image_oscillation)
        whole = ask(0)
        v = whole
        if asked.image != 1:
            weights = torch.full((frames,), image, dtype=noise.dtype)
            if asked.decay and image > 1:
                top = image + (1 - image) * step / (STEPS - 1)
                for f in range(frames):
                    weights[f] = 1 + (top - 1) * f / (frames - 1)
            one, nothing = ask(1), ask(2)
            v = nothing + weights[None, :, None, None] * (one - nothing) + text * (whole - one)
        elif asked.text != 1:
            v = ask(1) + text * (whole - ask(1))
        if asked.rescale:
            v = v * (asked.rescale * _deviation(whole) / _deviation(v) + 1 - asked.rescale)
        for f in range(frames):
            if going[f]:
                x[:, f] += (t - levels[step + 1]) * v[:, f]
    return x


def _deviation(v: Tensor) -> float:
    mean = float(v.sum()) / v.numel()
    return math.sqrt(float((v - mean).square().sum()) / (v.numel() - 1))


def _linear(x: Tensor, timesteps: Tensor, y: Tensor, mask: Tensor, **inputs: Any) -> Tensor:
    """A velocity that is linear in all that it is told."""
    read = (y * mask[:, None, :, None]).sum(dim=(1, 2)) / mask.sum(dim=1)[:, None]
    v = 0.6 * x.roll(1, 2) - 0.9 * x + 0.3 * timesteps.view(-1, 1, 1, 1, 1) / 1000
    v = v + read.mean(dim=1).view(-1, 1, 1, 1, 1) * x.sign()
    if inputs.get("x_mask") is not None:
        v = v + 0.4 * inputs["x_mask"][:, None, :, None, None]
    if "cond" in inputs:
        v = v + inputs["cond"] * inputs["index"][0]
    return torch.cat([v, v * 9], dim=1)


def _asked_of(
    asked: Asked,
    model: Velocity,
    noise: Tensor,
    inputs: dict[str, Any],
    null: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """What the sampler and the loops make of the same inputs."""
    ratios = None if asked.ratios is None else torch.tensor(asked.ratios)
    imageless = {"cond": torch.zeros_like(noise)} if asked.by_inputs else None
    found = RectifiedFlow(**asked.warp).sample(
        model,
        noise,
        inputs,
        null_inputs=null,
        imageless_inputs=imageless,
        steps=STEPS,
        cfg_scale=Guidance(
            asked.text,
            asked.image,
            asked.text_oscillation,
            asked.image_oscillation,
            asked.decay,
            asked.rescale,
        ),
        given=None if ratios is None else noise.cos(),
        mask=ratios,
    )

    def of_clip(all_of_it: dict[str, Any], number: int) -> dict[str, Any]:
        return {
            name: value[number : number + 1] if isinstance(value, Tensor) else value
            for name, value in all_of_it.items()
        }

    every = [inputs, {**inputs, **null}, {**inputs, **null, **(imageless or {})}]
    branches = [[of_clip(one, number) for one in every] for number in range(len(noise))]
    return found, naive(asked, model, noise, branches, noise.cos())


@pytest.mark.parametrize("way", WAYS)
def test_sampling_follows_the_published_rules_with_a_linear_velocity(way: str) -> None:
    asked = WAYS[way]
    draw = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 3, 5, 2, 4, generator=draw).double()
    y, other = (torch.randn(2, 1, 6, 4, generator=draw).double() for _ in range(2))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    sides = {"height": torch.tensor([720.0] * 2), "width": torch.tensor([1280.0] * 2)}
    inputs: dict[str, Any] = {"y": y, "mask": mask, **sides}
    null: dict[str, Any] = {"y": torch.zeros_like(y)}
    if asked.negative:
        null = {"y": other, "mask": mask.flip(0)}
    if asked.by_inputs:
        inputs.update(cond=noise.sin(), index=[0.7])
    found, expected = _asked_of(asked, _linear, noise, inputs, null)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if asked.ratios is not None:
        kept = torch.tensor(asked.ratios)[:, None, :, None, None].expand_as(noise) == 0
        assert torch.equal(found[kept], noise.cos()[kept])


@pytest.mark.parametrize("way", ["oscillating", "negative", "decayed"])
def test_sampling_follows_the_published_rules_with_a_transformer(way: str) -> None:
    asked = WAYS[way]
    model = build().eval()
    inputs = inputs_of(Case(5, 4, 6))
    noise = inputs.pop("x").detach()
    del inputs["timestep"], inputs["x_mask"]
    inputs["y"] = inputs["y"].detach()
    null = {"y": inputs["y"].roll(1, 2)}
    if asked.negative:
        null["mask"] = inputs["mask"].flip(0)
    with torch.no_grad():
        found, expected = _asked_of(asked, model, noise, inputs, null)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_ratio_that_is_a_level_is_reached_whatever_the_rounding() -> None:
    seen: list[list[bool]] = []

    def model(x: Tensor, timesteps: Tensor, x_mask: Tensor, **inputs: Any) -> Tensor:
        seen.append(x_mask[0].tolist())
        return torch.zeros_like(x)

    noise = torch.zeros(1, 1, 3, 1, 1)
    inputs = {"height": torch.tensor([8.0]), "width": torch.tensor([8.0])}
    for dtype in (torch.float32, torch.float64):
        mask = torch.tensor([[0.3, 0.7, 0.0]], dtype=dtype)
        RectifiedFlow().sample(model, noise, inputs, steps=10, given=noise, mask=mask)
    expected = [[n >= 7, n >= 3, False] for n in range(10)]
    assert seen == expected * 2


def test_levels_may_be_those_of_another_schedule() -> None:
    told: list[float] = []

    def model(x: Tensor, timesteps: Tensor, **inputs: Any) -> Tensor:
        told.append(float(timesteps[0]))
        return torch.ones_like(x)

    levels = torch.tensor([1000.0, 400.0, 0.0])
    x = RectifiedFlow().sample(model, torch.zeros(1, 1, 1, 1, 1), {}, timesteps=levels)
    assert told == [1000, 400]
    assert float(x) == pytest.approx(1)
