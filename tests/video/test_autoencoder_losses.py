"""Losses and figures of autoencoders against their definitions, in float64, with gradients."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl

from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.video.autoencoder_config import AutoencoderLossConfig
from gulliver.video.autoencoders.losses import (
    AutoencoderLoss,
    PatchDiscriminator,
    Posterior,
    adaptive_weight,
    check_perceptual,
    discriminator_loss,
    generator_loss,
    load_perceptual,
    psnr,
    ssim,
)


def clips(frames: int = 3, height: int = 12, width: int = 14) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    shape = (2, 3, frames, height, width)
    video = torch.rand(shape, dtype=torch.float64) * 2 - 1
    return video, (video + 0.2 * torch.randn(shape).double()).requires_grad_()


def features(clip: Tensor) -> list[Tensor]:
    """Two layers of a network without weights."""
    rolled = clip + clip.roll(1, dims=-1) * clip.roll(1, dims=1)
    return [clip.square() + 0.1, torch.cat([rolled, clip.cos()], dim=1)[..., ::2]]


def naive_perceptual(video: Tensor, decoded: Tensor) -> Tensor:
    """Squared distances of unit vectors by the angle between them."""
    layers = []
    for one, other in zip(features(decoded), features(video), strict=True):
        lengths = one.pow(2).sum(dim=1).sqrt() * other.pow(2).sum(dim=1).sqrt()
        layers.append(2 - 2 * ((one * other).sum(dim=1) / lengths).mean())
    return (layers[0] + layers[1]) / 2


@pytest.mark.parametrize("kind", ["mse", "l1"])
def test_the_terms_are_their_definitions_with_gradients(kind: str) -> None:
    video, decoded = clips(2, 4, 6)
    moments = torch.randn(2, 10, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    config = AutoencoderLossConfig(
        reconstruction=kind,  # type: ignore[arg-type]
        learnt_variance=True,
        perceptual="x:y",
        perceptual_weight=0.7,
        kl=0.3,
    )
    loss = AutoencoderLoss(config, features).double()
    with torch.no_grad():
        loss.log_variance.fill_(0.4)
    noise = torch.randn(2, 5, 2, 2, 3, dtype=torch.float64)
    posterior = Posterior.of(moments, 5)
    terms = loss(video, decoded, posterior)
    total = terms.reconstruction + terms.regularisation + posterior.sample(noise, 9.0).sum()

    power = 2 if kind == "mse" else 1
    error = (video - decoded).abs().pow(power).sum() / video.numel()
    error = error + 0.7 * naive_perceptual(video, decoded)
    spread = loss.log_variance
    gauss = Normal(moments[:, :5], (moments[:, 5:] / 2).exp())
    wanted = error / spread.exp() + spread
    wanted = wanted + 0.3 * torch_kl(gauss, Normal(0.0, 1.0)).mean()
    wanted = wanted + (gauss.mean + gauss.stddev * noise).sum()
    torch.testing.assert_close(total, wanted.squeeze(), rtol=1e-12, atol=1e-12)
    inputs = [decoded, moments, loss.log_variance]
    for found, right in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_point_posterior_uses_noise_and_penalty() -> None:
    video, decoded = clips(1)
    mean = torch.randn(2, 5, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    terms = AutoencoderLoss(AutoencoderLossConfig(latent_pull=0.5))(
        video, decoded, Posterior.of(mean, 5)
    )
    torch.testing.assert_close(terms.regularisation, 0.5 * (mean**2).sum() / mean.numel())
    noise = torch.ones_like(mean)
    torch.testing.assert_close(Posterior.of(mean, 5).sample(noise, 0.25), mean + 0.25)


def test_hinge_losses_and_the_adaptive_weight_are_their_definitions() -> None:
    torch.manual_seed(0)
    real, made = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wanted = torch.zeros((), dtype=torch.float64)
    for one, other in zip(real.flatten(), made.flatten(), strict=True):
        wanted = wanted + (max(1 - one, 0 * one) + max(1 + other, 0 * other)) / 24
    found = discriminator_loss(real, made)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, [real, made]), torch.autograd.grad(wanted, [real, made])
    )
    torch.testing.assert_close(generator_loss(made), -made.sum() / 12)
    gradients = torch.tensor([[3.0, 4.0], [0.0, 0.5]], dtype=torch.float64)
    assert float(adaptive_weight(*gradients)) == pytest.approx(5 / (0.5 + 1e-4))
    assert float(adaptive_weight(gradients[0], gradients[1] * 0)) == 1e4


def test_a_discriminator_looks_at_patches_of_each_clip_alone() -> None:
    torch.manual_seed(0)
    network = PatchDiscriminator(8).double()
    for shape in ((1, 8, 16), (5, 24, 8), (13, 16, 16)):
        video = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)
        logits = network(video)
        assert logits.shape == (2, 1, (shape[0] + 3) // 4, shape[1] // 8, shape[2] // 8)
        torch.testing.assert_close(network(video[1:]), logits[1:])
        frozen = network.frozen(video)
        torch.testing.assert_close(frozen, logits)
        wanted = torch.autograd.grad(logits.sum(), video)
        frozen.sum().backward()
        torch.testing.assert_close(video.grad, wanted[0])
    assert all(parameter.grad is None for parameter in network.parameters())


def naive_ssim(x: Tensor, y: Tensor) -> float:
    """One channel of one frame, in [0, 1], window by window."""
    weights = [
        [math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)]
        for i in range(11)
    ]
    window = torch.tensor(weights, dtype=torch.float64)
    window /= window.sum()
    found = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = (v[top : top + 11, left : left + 11] for v in (x, y))
            ma, mb = (a * window).sum(), (b * window).sum()
            va, vb = ((a - ma) ** 2 * window).sum(), ((b - mb) ** 2 * window).sum()
            both = ((a - ma) * (b - mb) * window).sum()
            c1, c2 = 0.01**2, 0.03**2
            found.append(
                (2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2))
            )
    return float(sum(found) / len(found))


def test_psnr_and_ssim_of_each_frame_are_those_of_their_definitions() -> None:
    video, decoded = clips(2, 12, 15)
    shown = decoded.detach()
    levels = [((v.clamp(-1, 1) + 1) / 2) for v in (video, shown)]
    found, noise = ssim(video, shown), psnr(video, shown)
    assert found.shape == noise.shape == (2, 2)
    for clip in range(2):
        for frame in range(2):
            x, y = (v[clip, :, frame] for v in levels)
            wanted = sum(naive_ssim(x[c], y[c]) for c in range(3)) / 3
            assert float(found[clip, frame]) == pytest.approx(wanted, abs=1e-9)
            error = sum((x - y).flatten() ** 2) / x.numel()
            assert float(noise[clip, frame]) == pytest.approx(10 * math.log10(1 / error))


def test_ssim_is_that_of_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    video, decoded = clips(1, 24, 32)
    x, y = (((v.detach().clamp(-1, 1) + 1) / 2)[0, :, 0].numpy() for v in (video, decoded))
    wanted = metrics.structural_similarity(
        x, y, data_range=1.0, channel_axis=0, gaussian_weights=True, sigma=1.5,
        use_sample_covariance=False,
    )  # fmt: skip
    assert float(ssim(video, decoded)[0, 0]) == pytest.approx(wanted, abs=1e-9)


MODULE = """
import torch
class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv3d(3, 4, 3)
    def forward(self, clip):
        return [self.layer(clip)]
def blind(clip):
    with torch.no_grad():
        return clip * 2
number = 3
"""


def test_perceptual_networks_are_found_and_tried_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "networks_of_this_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    device, place = torch.device("cpu"), "networks_of_this_test"
    network = load_perceptual(f"{place}:Layers", device)
    assert isinstance(network, nn.Module)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    check_perceptual(network, [Bucket(5, 16, 16)], device)
    with pytest.raises(GulliverError, match=r"--loss\.perceptual.* 1x16x16: RuntimeError"):
        check_perceptual(network, [Bucket(5, 16, 16), Bucket(1, 16, 16)], device)
    with pytest.raises(GulliverError, match="with a gradient"):
        check_perceptual(load_perceptual(f"{place}:blind", device), [Bucket(1, 8, 8)], device)
    for name in ("number", "nothing"):
        with pytest.raises(GulliverError, match=f"no function, module or class '{name}'"):
            load_perceptual(f"{place}:{name}", device)
    with pytest.raises(GulliverError, match="ModuleNotFoundError: No module named"):
        load_perceptual("no_such_module:x", device)
