"""Gradient noise scale of the Booster, beside per-sample gradients computed by brute force."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import HybridParallelPlugin
from gulliver.booster.booster import Booster
from gulliver.booster.noise import DECAY, signal_of
from gulliver.booster.plugins import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests.covering import grid
from tests.pool import Pool

BATCH, STEPS = 8, 3


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return model.double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin() + torch.randn(
        BATCH, 1, generator=generator, dtype=torch.float64
    )


def sample_gradients(model: nn.Module, step: int) -> Tensor:
    """Gradient of each sample's loss, [BATCH, parameters]."""
    rows = []
    for x, y in zip(*data(step), strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())]))
    return torch.stack(rows)


def brute_force(parts: int) -> tuple[list[float], list[float]]:
    """Signal and variance of each step, as the paper's equations A.2 and A.3 say."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    signals, variances = [], []
    for step in range(STEPS):
        rows = sample_gradients(model, step)
        small, big = BATCH // parts, BATCH
        each = rows.reshape(parts, small, -1).mean(1).square().sum(1).mean()
        whole = rows.mean(0).square().sum()
        signals.append(float((big * whole - small * each) / (big - small)))
        variances.append(float((each - whole) / (1 / small - 1 / big)))
        optimizer.zero_grad()
        x, y = data(step)
        nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return signals, variances


def averaged(values: list[float]) -> float:
    found = weight = 0.0
    for value in values:
        found, weight = DECAY * found + (1 - DECAY) * value, DECAY * weight + 1 - DECAY
    return found / weight


def measured(world: World, stage: int, micro: int) -> tuple[float, float, float]:
    plugin = TorchDDPPlugin(verbose=False)
    if stage:
        plugin = LowLevelZeroPlugin(stage=stage, chunk_mb=0.0003, verbose=False)
    booster = Booster(plugin, gradient_noise=True)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, *_ = booster.boost(model, optimizer)
    share = BATCH // (world.size * micro)
    for step in range(STEPS):
        x, y = (part.reshape(world.size, micro, share, -1)[world.rank] for part in data(step))
        for number in range(micro):
            last = number == micro - 1
            with nullcontext() if last else booster.no_sync(model, optimizer):
                loss = nn.functional.mse_loss(model(x[number]), y[number])
                booster.backward(loss / micro, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = booster.noise_scale(BATCH)
    assert found is not None
    assert found.steps == STEPS
    return found.signal, found.variance, found.scale


@pytest.mark.parametrize(("stage", "ranks", "micro"), grid([0, 1, 2, 3], [1, 2], [1, 2, 4]))
def test_it_is_that_of_per_sample_gradients(pool: Pool, stage: int, ranks: int, micro: int) -> None:
    if ranks * micro == 1:
        with pytest.raises(GulliverError, match=r"gradient_noise.*micro-batches"):
            pool.run(measured, 1, stage, micro)
        return
    signals, variances = brute_force(ranks * micro)
    for signal, variance, scale in pool.run(measured, ranks, stage, micro):
        assert signal == pytest.approx(averaged(signals), rel=1e-6)
        assert variance == pytest.approx(averaged(variances), rel=1e-6)
        if signal > 0:
            assert scale == pytest.approx(averaged(variances) / averaged(signals), rel=1e-6)


def test_both_estimates_have_no_bias() -> None:
    """Over all batches that can be drawn of four samples, with replacement: exactly."""
    rows = sample_gradients(model_of(), 0)[:4]
    true = float(rows.mean(0).square().sum())
    spread = float((rows - rows.mean(0)).square().sum(1).mean())
    for sizes in ((1, 1), (1, 2)):  # alike, and not
        total = sum(sizes)
        evenness = sum((size / total) ** 2 for size in sizes)
        signals, variances = [], []
        for chosen in itertools.product(range(4), repeat=total):
            batch = rows[list(chosen)]
            whole = float(batch.mean(0).square().sum())
            parts = sum(float(p.sum(0).div(total).square().sum()) for p in batch.split(sizes))
            signals.append(signal_of(whole, parts, evenness))
            variances.append(total * (whole - signals[-1]))
        assert sum(signals) / len(signals) == pytest.approx(true, rel=1e-10)
        assert sum(variances) / len(variances) == pytest.approx(spread, rel=1e-10)


def test_noise_scale_without_per_rank_gradients_is_rejected() -> None:
    for plugin, told in (
        (HybridParallelPlugin(tp_size=1, verbose=False), "not supported by HybridParallelPlugin"),
        (GeminiPlugin("1GiB", verbose=False), "not supported by GeminiPlugin"),
        (LowLevelZeroPlugin(step_in_backward=True), "step_in_backward"),
        (LowLevelZeroPlugin(precision="fp16"), "loss scale"),
    ):
        with pytest.raises(GulliverError, match=told):
            Booster(plugin, gradient_noise=True)
    with pytest.raises(GulliverError, match=r"Booster\(gradient_noise=True\)"):
        Booster(TorchDDPPlugin(verbose=False)).noise_scale(8)
