"""The small autoencoder: causal, exact in its tricks, any size, and good enough after training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gulliver.comm import World
from gulliver.data import Bucket
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.models.autoencoder import CausalConv3d, fold, unfold
from gulliver.video import Run, load_autoencoder
from gulliver.video.config import AutoencoderConfig
from gulliver.video.digits import MovingDigits
from gulliver.video.public_models import save_autoencoder
from gulliver.video.sources import train_autoencoder


def test_the_folded_convolution_is_conv3d_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer = CausalConv3d(3, 5).double()
    x = torch.randn(2, 4, 3, 6, 7).double().requires_grad_()
    out = layer(x)
    weight = layer.conv.weight.detach().view(5, 3, 3, 3, 3).transpose(1, 2).clone().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    padded = torch.cat([twin[:, :1], twin[:, :1], twin], dim=1).transpose(1, 2)
    expected = F.conv3d(padded, weight, layer.conv.bias.detach(), padding=(0, 1, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-11, atol=1e-11)
    found = layer.conv.weight.grad.view(5, 3, 3, 3, 3).transpose(1, 2)
    torch.testing.assert_close(found, weight.grad, rtol=1e-11, atol=1e-11)


def test_latents_are_causal() -> None:
    torch.manual_seed(0)
    model = VideoAutoencoder(width=16).double()
    video = torch.randn(1, 3, 13, 8, 8).double().requires_grad_()
    latents = model.encode(video)
    for k in range(latents.shape[2]):
        (gradient,) = torch.autograd.grad(latents[:, :, k].sum(), video, retain_graph=True)
        assert (gradient[:, :, 4 * k + 1 :] == 0).all()
        assert (gradient[:, :, max(0, 4 * k - 3) : 4 * k + 1] != 0).any()


def test_a_longer_clip_begins_with_the_latents_of_a_shorter_one() -> None:
    model = VideoAutoencoder(width=16).double()
    video = torch.randn(2, 3, 13, 8, 12).double()
    whole = model.encode(video)
    for frames in (1, 5, 9):
        torch.testing.assert_close(
            model.encode(video[:, :, :frames]), whole[:, :, : frames // 4 + 1]
        )
    decoded = model.decode(whole)
    torch.testing.assert_close(model.decode(whole[:, :, :2]), decoded[:, :, :5])


def test_folding_round_trips_with_documented_sizes() -> None:
    model = VideoAutoencoder(width=8)
    for frames, height, width in ((1, 4, 8), (5, 24, 40), (17, 16, 12)):
        video = torch.randn(2, 3, frames, height, width)
        assert torch.equal(unfold(fold(video)), video)
        latents = model.encode(video)
        assert latents.shape[1:] == model.latent_shape(frames, height, width)
        assert model.decode(latents).shape == video.shape


def test_training_learns_normalises_and_survives_a_file(tmp_path: Path) -> None:
    shapes = {Bucket(5, 32, 32): 1.0, Bucket(1, 32, 32): 1.0}
    dataset = MovingDigits("train", 600, shapes=shapes)
    config = AutoencoderConfig(steps=120, batch_size=8)
    world = World(0, 1, 0, torch.device("cpu"))
    model, figures = train_autoencoder(config, dataset, world, 0, tmp_path / "run")
    losses = [line["loss"] for line in Run(tmp_path / "run").log.read()]
    assert len(losses) == 120
    assert sum(losses[-10:]) < 0.4 * sum(losses[:10])
    assert figures["psnr"] > 16
    assert figures["clips"] == "held-out handwriting"
    clips = MovingDigits("train", 64, seed=1, shapes={Bucket(5, 32, 32): 1.0})
    latents = model.encode(clips.batch(list(range(64)))).detach()
    assert abs(float(latents.mean())) < 0.3
    assert 0.6 < float(latents.std()) < 1.5
    path = tmp_path / "a.safetensors"
    save_autoencoder(path, model, figures)
    again = load_autoencoder(path)
    assert torch.equal(again.encode(clips[0].video[None]), model.encode(clips[0].video[None]))


def test_other_files_are_no_autoencoders(tmp_path: Path) -> None:
    from gulliver.checkpoint.files import write_tensors

    write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(GulliverError, match="not a video autoencoder"):
        load_autoencoder(tmp_path / "x.safetensors")
    with pytest.raises(GulliverError, match="does not exist"):
        load_autoencoder(tmp_path / "y.safetensors")
