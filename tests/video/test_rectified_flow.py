"""Rectified flow against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.video import RectifiedFlow

SIDES = {"height": torch.tensor([32.0, 32.0]), "width": torch.tensor([48.0, 48.0])}


def test_the_loss_is_the_mean_square_of_velocity_error_over_generated_frames() -> None:
    draw = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(2, 3, 4, 2, 2, generator=draw).double() for _ in range(2))
    t = torch.tensor([250.0, 900.0]).double()
    mask = torch.tensor([[True, False, True, True], [True, True, True, True]])
    seen: dict[str, Tensor] = {}

    def model(x: Tensor, timesteps: Tensor, **inputs: Tensor) -> Tensor:
        seen.update(x=x, t=timesteps)
        return torch.cat([x * 0.5, x * 99], dim=1)  # twice the channels: the second half is ignored

    flow = RectifiedFlow()
    found = flow.loss(model, x0, {}, noise=noise, timesteps=t, mask=mask)
    for b in range(2):
        total, count = 0.0, 0
        for f in range(4):
            s = float(t[b]) / 1000
            x_t = (1 - s) * x0[b, :, f] + s * noise[b, :, f] if mask[b, f] else x0[b, :, f]
            torch.testing.assert_close(seen["x"][b, :, f], x_t)
            if mask[b, f]:
                total += float((0.5 * x_t - (x0[b, :, f] - noise[b, :, f])).square().mean())
                count += 1
        assert float(found[b]) == pytest.approx(total / count, rel=1e-12)
    assert torch.equal(seen["t"], t)
    every = flow.loss(model, x0, {}, noise=noise, timesteps=t)
    assert torch.allclose(every[1], found[1])


@pytest.mark.parametrize("method", ["uniform", "logit-normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_levels_follow_their_law(method: str, shift: float) -> None:
    flow = RectifiedFlow(sample_method=method, loc=0.3, scale=0.8, shift=shift)
    draw = torch.Generator().manual_seed(1)
    levels = flow.sample_timesteps(40_000, generator=draw, height=8, width=8, num_frames=1).double()
    for q in (0.1, 0.5, 0.9):
        normal = 0.3 + 0.8 * float(torch.special.ndtri(torch.tensor(q).double()))
        t = q if method == "uniform" else 1 / (1 + math.exp(-normal))
        expected = 1000 * shift * t / (1 - t + shift * t)
        assert float(torch.quantile(levels, q)) == pytest.approx(expected, rel=0.02)


def test_the_warp_multiplies_the_odds_by_size() -> None:
    flow = RectifiedFlow(use_timestep_transform=True, shift=1.5)
    t = torch.linspace(0.01, 0.99, 9).double()
    warped = flow.warp(t, 720, 1280, 15)
    ratio = 1.5 * math.sqrt(720 * 1280 / 512**2) * math.sqrt(15)
    torch.testing.assert_close(warped / (1 - warped), ratio * t / (1 - t))
    ends = flow.timesteps(7, 720, 1280, 15)
    assert ends[0] == 1000
    assert ends[-1] == 0
    assert len(ends) == 8
    assert bool((ends.diff() < 0).all())


def test_published_warps_are_those_of_their_versions() -> None:
    t = torch.linspace(0.01, 0.99, 9).double()

    def odds(rule: str, height: int, width: int, latents: int, area: float = 256.0) -> Tensor:
        flow = RectifiedFlow(use_timestep_transform=True, transform=rule, token_area=area)
        warped = flow.warp(t, height, width, latents)
        return warped / (1 - warped) * (1 - t) / t

    for height, width in ((160, 256), (720, 1280), (2048, 512)):
        space = math.sqrt(height * width / 512**2)
        for frames in (1, 17, 51, 60, 102, 204, 408):
            # Pieces of 17 frames are 5 latents, and of the last each four frames begin another.
            latents = frames // 17 * 5 + math.ceil(frames % 17 / 4)
            expected = space * math.sqrt(1 if frames == 1 else frames // 17 * 5)
            found = odds("1.2", height, width, latents)
            torch.testing.assert_close(found, torch.full_like(t, expected))
        for frames in (1, 5, 49, 113):
            latents = (frames - 1) // 4 + 1
            expected = space * math.sqrt(1 if frames == 1 else (frames - 1) // 4)
            found = odds("1.3", height, width, latents)
            torch.testing.assert_close(found, torch.full_like(t, expected))
            for pixels in (16, 32):  # 8 x 8 pixels of a latent in patches of 2 x 2; 32 x 32 in 1
                tokens = (height // pixels) * (width // pixels)
                slope = (3 - 1) / (4096 - 256)
                expected = (slope * tokens + 1 - slope * 256) * math.sqrt(latents)
                if height % pixels == 0:
                    found = odds("2.0", height, width, latents, pixels**2)
                    torch.testing.assert_close(found, torch.full_like(t, expected))
    with pytest.raises(GulliverError, match=r"has 4; .*--flow\.shift-rule"):
        odds("1.2", 32, 32, 4)


def test_euler_reaches_the_law_of_a_gaussian_with_its_exact_velocity() -> None:
    mean, std = 2.0, 0.5

    def velocity(x: Tensor, timesteps: Tensor, **inputs: Tensor) -> Tensor:
        # E[x0 - noise | x_t] for x0 ~ N(mean, std^2), noise ~ N(0, 1).
        t = (timesteps / 1000).view(-1, 1, 1, 1, 1)
        variance = (1 - t) ** 2 * std**2 + t**2
        return mean + ((1 - t) * std**2 - t) / variance * (x - (1 - t) * mean)

    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(2, 1, 1, 100, 100, generator=draw).double()
    inputs = {"y": torch.zeros(2, 1, 1, 1), **SIDES}
    flow = RectifiedFlow()
    errors = []
    for steps in (10, 20, 40):
        x = flow.sample(velocity, noise, inputs, steps=steps)
        # The flow of a Gaussian is linear: noise goes to mean + std * noise.
        errors.append(float((x - (mean + std * noise)).abs().max()))
    assert errors[2] < 0.1
    assert errors[0] / errors[2] == pytest.approx(4, rel=0.35)  # Euler: first order


def test_guidance_moves_away_from_the_captionless_velocity() -> None:
    calls: list[Tensor] = []

    def model(x: Tensor, timesteps: Tensor, y: Tensor, **inputs: Tensor) -> Tensor:
        calls.append(y)
        return y.sum(dim=(1, 2, 3)).view(-1, 1, 1, 1, 1).expand_as(x)

    noise = torch.zeros(2, 1, 1, 1, 1)
    y = torch.tensor([3.0, 5.0]).view(2, 1, 1, 1)
    null = torch.tensor([1.0, 1.0]).view(2, 1, 1, 1)
    inputs = {"y": y, "mask": None, **SIDES}
    flow = RectifiedFlow()
    x = flow.sample(model, noise, inputs, null_inputs={"y": null}, steps=4, cfg_scale=2.5)
    torch.testing.assert_close(x.flatten(), torch.tensor([1 + 2.5 * 2, 1 + 2.5 * 4]))
    assert calls[0].flatten().tolist() == [3, 5, 1, 1]
    plain = flow.sample(model, noise, inputs, steps=4)
    torch.testing.assert_close(plain.flatten(), torch.tensor([3.0, 5.0]))
    with pytest.raises(GulliverError, match="null_inputs"):
        flow.sample(model, noise, inputs, cfg_scale=2.0)


def test_given_frames_are_seen_clean_and_stay_as_they_are() -> None:
    given = torch.full((2, 1, 3, 2, 2), 7.0)
    mask = torch.tensor([[False, True, True], [True, False, True]])

    def model(x: Tensor, timesteps: Tensor, x_mask: Tensor, **inputs: Tensor) -> Tensor:
        assert torch.equal(x_mask, mask)
        still = ~mask[:, None, :, None, None].expand_as(x)
        assert (x[still] == 7).all()
        return torch.ones_like(x)

    inputs = {"y": torch.zeros(2, 1, 1, 1), **SIDES}
    done: list[tuple[int, int]] = []
    x = RectifiedFlow().sample(
        model, torch.zeros_like(given), inputs, steps=3, given=given, mask=mask,
        progress=lambda *n: done.append(n),
    )  # fmt: skip
    expected = torch.where(mask, 1.0, 7.0)[:, None, :, None, None].expand_as(x)
    torch.testing.assert_close(x, expected)
    assert done == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(GulliverError, match="both"):
        RectifiedFlow().sample(model, given, inputs, given=given)
