"""The diffusion of 1.0 and 1.1 is what its formulas say, written out here number by number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.video.diffusion import Guidance
from gulliver.video.flows import IDDPM, spaced

SHAPE = (2, 4, 3, 2, 2)


def shares() -> list[float]:
    found, product = [], 1.0
    for n in range(1000):
        product *= 1 - (0.0001 + (0.02 - 0.0001) * n / 999)
        found.append(product)
    return found


def model(x: Tensor, timestep: Tensor, y: Tensor, x_mask: Tensor | None = None) -> Tensor:
    """Some smooth function of everything that a model is told."""
    level = timestep.view(-1, 1, 1, 1, 1) / 1000
    said = y.mean(dim=(1, 2, 3)).view(-1, 1, 1, 1, 1)
    noise = torch.sin(x + level) + 0.3 * said
    if x_mask is not None:
        noise = noise + 0.1 * x_mask[:, None, :, None, None]
    return torch.cat([noise, torch.tanh(0.7 * x - said)], dim=1)


def back(x: float, noise: float, share: float, a: float, before: float) -> tuple[float, float]:
    """Mean and log variance of a step back, as the product of two Gaussians over x_(t-1)."""
    beta = 1 - a / before
    x0 = (x - math.sqrt(1 - a) * noise) / math.sqrt(a)
    if before == 1:
        return x0, 0.0
    precision = (1 - beta) / beta + 1 / (1 - before)
    mean = (math.sqrt(1 - beta) / beta * x + math.sqrt(before) / (1 - before) * x0) / precision
    least = math.log(1 / precision)
    return mean, (share + 1) / 2 * math.log(beta) + (1 - share) / 2 * least


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("channels", "masked"), [(3, True), (None, False)])
def test_sampling_takes_the_steps_that_its_formulas_say(channels: int | None, masked: bool) -> None:
    flow, steps, scale = IDDPM(guided_channels=channels), 7, 3.5
    y, null = drawn((2, 1, 3, 5), 1), drawn((2, 1, 3, 5), 2)
    noise, given = drawn(SHAPE, 3), drawn(SHAPE, 4)
    mask = torch.tensor([[False, True, True], [True, True, False]])
    told: dict = {"given": given, "mask": mask} if masked else {}
    found = flow.sample(
        model,
        noise,
        {"y": y},
        null_inputs={"y": null},
        steps=steps,
        cfg_scale=Guidance(scale, text_oscillation=2),
        step_noise=lambda number: drawn(SHAPE, 10 + number),
        **told,
    )
    taken = [round(n * 999 / (steps - 1)) for n in range(steps)]
    kept = [shares()[n] for n in taken]
    frames = mask[:, None, :, None, None]
    x = torch.where(frames, noise, given) if masked else noise
    for done, number in enumerate(reversed(range(steps))):
        t = torch.full((2,), float(taken[number]), dtype=torch.float64)
        with_y, without = (model(x, t, text, mask if masked else None) for text in (y, null))
        weight = scale if done < 2 or done % 2 == 0 else 1.0
        predicted = with_y.clone()
        led = channels or 4
        predicted[:, :led] = without[:, :led] + weight * (with_y - without)[:, :led]
        before = kept[number - 1] if number else 1.0
        added = drawn(SHAPE, 10 + number)
        moved = torch.empty_like(x)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)):
            at = tuple(place.tolist())
            share = float(predicted[at[0], at[1] + 4, at[2], at[3], at[4]])
            mean, log = back(float(x[at]), float(predicted[at]), share, kept[number], before)
            moved[at] = mean + (math.exp(log / 2) * float(added[at]) if number else 0)
        x = torch.where(frames, moved, x) if masked else moved
    torch.testing.assert_close(found, x, rtol=1e-9, atol=1e-9)
    if masked:
        assert torch.equal(found[0, :, 0], given[0, :, 0])


def test_a_hundred_steps_are_those_of_the_public_configurations() -> None:
    taken = spaced(1000, 100)
    assert taken[:4] == [0, 10, 20, 30]
    assert taken[-3:] == [979, 989, 999]
    assert taken == [round(n * 111 / 11) for n in range(100)]


def likelihood(x: float, mean: float, log_scale: float) -> float:
    def below(value: float) -> float:
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        return 0.5 * (1 + math.tanh(inner))

    upper = below((x - mean + 1 / 255) / math.exp(log_scale))
    lower = below((x - mean - 1 / 255) / math.exp(log_scale))
    if x < -0.999:
        lower = 0.0
    if x > 0.999:
        upper = 1.0
    return math.log(max(upper - lower, 1e-12))


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_error_of_the_noise_and_the_bound_in_bits(masked: bool) -> None:
    flow = IDDPM()
    x0 = drawn(SHAPE, 5).clamp(-1.2, 1.2)
    noise, y = drawn(SHAPE, 6), drawn((2, 1, 3, 5), 7)
    timesteps = torch.tensor([0.0, 640.0])
    mask = torch.tensor([[True, True, False], [False, True, True]]) if masked else None
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def scaled(x: Tensor, timestep: Tensor, **inputs: Tensor) -> Tensor:
        return weight * model(x, timestep, **inputs)

    inputs = {"y": y} if mask is None else {"y": y, "x_mask": mask}
    losses = flow.loss(scaled, x0, inputs, noise=noise, timesteps=timesteps, mask=mask)
    (gradient,) = torch.autograd.grad(losses.sum(), weight)

    def expected(factor: float) -> list[float]:
        return _losses(x0, noise, timesteps, mask, lambda x, t: factor * model(x, t, **inputs))

    assert losses.tolist() == pytest.approx(expected(1.0), rel=1e-9)
    # The noise in the bound is taken as it is, so its gradient is that of the rest.
    step = 1e-5
    high, low = (
        _losses(x0, noise, timesteps, mask, lambda x, t: model(x, t, **inputs), 1 + sign * step)
        for sign in (1, -1)
    )
    numeric = sum(a - b for a, b in zip(high, low, strict=True)) / (2 * step)
    assert float(gradient) == pytest.approx(numeric, rel=1e-5)


def _losses(
    x0: Tensor,
    noise: Tensor,
    timesteps: Tensor,
    mask: Tensor | None,
    call: Callable[[Tensor, Tensor], Tensor],
    factor: float = 1.0,
) -> list[float]:
    """Losses of clips in loops; `factor` scales all of the output but the noise in the bound."""
    kept = shares()
    found = []
    for row in range(len(x0)):
        number = int(timesteps[row])
        a, before = kept[number], kept[number - 1] if number else 1.0
        shown = math.sqrt(a) * x0 + math.sqrt(1 - a) * noise
        if mask is not None:
            shown = torch.where(mask[:, None, :, None, None], shown, x0)
        out = call(shown, timesteps)[row]
        total, count = 0.0, 0
        for place in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE[1:])):
            c, t, h, w = place.tolist()
            if mask is not None and not mask[row, t]:
                continue
            count += 1
            x, data = float(shown[row, c, t, h, w]), float(x0[row, c, t, h, w])
            predicted, share = float(out[c, t, h, w]), factor * float(out[c + 4, t, h, w])
            total += (float(noise[row, c, t, h, w]) - factor * predicted) ** 2
            if number == 0:
                beta = 1 - a
                # The least variance of the last step is that of the one before it.
                next_beta = 1 - kept[1] / kept[0]
                least = math.log(next_beta * (1 - kept[0]) / (1 - kept[1]))
                mean = (x - math.sqrt(1 - a) * predicted) / math.sqrt(a)
                log = (share + 1) / 2 * math.log(beta) + (1 - share) / 2 * least
                total -= likelihood(data, mean, log / 2) / math.log(2)
                continue
            mean, log = back(x, predicted, share, a, before)
            right = (x - math.sqrt(a) * data) / math.sqrt(1 - a)
            wanted, least = back(x, right, -1.0, a, before)
            apart = math.exp(least - log) + (wanted - mean) ** 2 / math.exp(log)
            total += 0.5 * (apart - 1 + log - least) / math.log(2)
        found.append(total / count)
    return found


def test_unsupported_diffusion_options_are_rejected() -> None:
    noise, y = drawn(SHAPE, 1), {"y": drawn((2, 1, 3, 5), 2)}
    with pytest.raises(GulliverError, match="1 sampling steps are not possible"):
        IDDPM().sample(model, noise, y, steps=1)
    with pytest.raises(GulliverError, match="image guidance 3 needs a rectified flow model"):
        IDDPM().sample(model, noise, y, cfg_scale=Guidance(image=3.0))
    with pytest.raises(GulliverError, match="edit ratios need a rectified flow model"):
        IDDPM().sample(model, noise, y, given=noise, mask=torch.full((2, 3), 0.5))
    with pytest.raises(GulliverError, match=r"4 channels for latents of 4; .* pred_sigma=True"):
        IDDPM().sample(lambda x, t, **_: x, noise, y, steps=2)
