"""Diffusers' autoencoders, by their own classes: without masks, streamed, shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.comm import World
from gulliver.parallel.convolution import (
    chunk_convolutions,
    share_autoencoder,
    stream_decode,
    stream_encode,
    without_masks,
)
from tests.pool import Pool

pytest.importorskip("diffusers")


def _hunyuan() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    torch.manual_seed(0)
    sizes = {"block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}
    return AutoencoderKLHunyuanVideo(latent_channels=4, **sizes).double().eval()


def _images() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=2, **blocks).double().eval()


CLIP = (1, 3, 9, 32, 24)


def test_hunyuans_middle_block_needs_no_mask_forward_and_backward() -> None:
    vae, x = _hunyuan(), torch.randn(CLIP).double().requires_grad_()
    plain = vae.encoder(x)
    wanted = torch.autograd.grad(plain.square().sum(), [x, *vae.encoder.parameters()])
    with without_masks(vae):
        made = vae.encoder(x)
    found = torch.autograd.grad(made.square().sum(), [x, *vae.encoder.parameters()])
    torch.testing.assert_close(made, plain, rtol=0, atol=1e-10)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_hunyuans_autoencoder_streams_with_passes_and_in_pieces() -> None:
    vae, x = _hunyuan(), torch.randn(CLIP).double()
    with torch.no_grad():
        moments = vae.quant_conv(vae.encoder(x))
        z = moments.chunk(2, 1)[0]
        video = vae.decoder(vae.post_quant_conv(z))
        chunked = chunk_convolutions(vae, budget="64KiB")
        found = torch.cat(list(stream_encode(vae, lambda: x.split([5, 4], 2), "passes")), 2)
        torch.testing.assert_close(found, moments, rtol=0, atol=1e-10)
        found = torch.cat(list(stream_decode(vae, lambda: z.split([2, 1], 2), "passes")), 2)
        torch.testing.assert_close(found, video, rtol=0, atol=1e-10)
        assert any(len(plan.boxes) > 1 for plan in chunked.plans.values())


def _errors(world: World) -> dict[str, float]:
    found = {}
    for make, shape, dims in (
        (_hunyuan, CLIP, ("height", "width", "time")),
        (_images, (2, 3, 24, 20), ("height", "width")),
    ):
        vae = make()
        torch.manual_seed(1)
        x = torch.randn(shape).double()

        def run(vae: Any = vae, x: Tensor = x) -> Tensor:
            return vae.decoder(vae.post_quant_conv(vae.quant_conv(vae.encoder(x)).chunk(2, 1)[0]))

        with torch.no_grad():
            plain = run()
            for dim in dims:
                shared = share_autoencoder(vae, dim=dim)
                found[f"{make.__name__} {dim}"] = float((run() - plain).abs().max())
                shared.off()
    return found


def test_diffusers_autoencoders_are_shared_exactly(pool: Pool) -> None:
    for errors in pool.run(_errors, 2):
        assert errors == {key: pytest.approx(0, abs=1e-10) for key in errors}
