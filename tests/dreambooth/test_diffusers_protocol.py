"""Classes of diffusers speak the protocol of autoencoders: their results, streamed and shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint.files import write_tensors
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.models import FrameAutoencoder
from gulliver.parallel.convolution import share_autoencoder, stream_decode, stream_encode
from gulliver.video import load_autoencoder
from gulliver.video.autoencoders.diffusers import DiffusersAutoencoder
from tests.pool import Pool
from tests.video.public_autoencoders import FRAMES

diffusers = pytest.importorskip("diffusers")

CHANNELS = {"block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}


def _module(name: str) -> Any:
    torch.manual_seed(0)
    made = {
        "AutoencoderKL": lambda kind: kind(
            block_out_channels=(4, 8), norm_num_groups=2, layers_per_block=1, shift_factor=0.5,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "AutoencoderKLHunyuanVideo": lambda kind: kind(latent_channels=4, **CHANNELS),
        "AutoencoderKLCogVideoX": lambda kind: kind(
            latent_channels=4, down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4, **CHANNELS,
        ),
        "AutoencoderKLWan": lambda kind: kind(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1,
            latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0],
        ),
    }[name](getattr(diffusers, name))  # fmt: skip
    return made.double().eval()


NAMES = ("AutoencoderKL", "AutoencoderKLHunyuanVideo", "AutoencoderKLCogVideoX", "AutoencoderKLWan")
FACTORS = {
    "AutoencoderKL": (0.5, 0.18215),
    "AutoencoderKLHunyuanVideo": (0.0, 0.476986),
    "AutoencoderKLCogVideoX": (0.0, 1.15258426),
    "AutoencoderKLWan": ([0.1, 0.2, 0.3, 0.4], [1.0, 1 / 2, 1 / 3, 1 / 4]),
}
"""What is taken from latents, and what they are multiplied by, in the pipelines of diffusers."""


def _clip(name: str, frames: int = 9) -> Tensor:
    torch.manual_seed(1)
    side = 8 if name == "AutoencoderKL" else 16
    return torch.randn(1, 3, 3 if name == "AutoencoderKL" else frames, side, 2 * side).double()


def _own(module: Any, x: Tensor, method: str) -> Tensor:
    """What diffusers' own methods give, frame by frame for pictures."""
    if type(module).__name__ == "AutoencoderKL":
        return torch.stack([_own_once(module, frame, method) for frame in x.unbind(2)], 2)
    return _own_once(module, x, method)


def _own_once(module: Any, x: Tensor, method: str) -> Tensor:
    return module.encode(x).latent_dist.mode() if method == "encode" else module.decode(x).sample


@pytest.mark.parametrize("name", NAMES)
def test_a_class_of_diffusers_gives_its_own_results_normalised_and_streams(name: str) -> None:
    module = _module(name)
    model, x = DiffusersAutoencoder(module), _clip(name)
    factors = (torch.tensor(v, dtype=torch.float64) for v in FACTORS[name])
    shift, scale = (v.view(1, -1, 1, 1, 1) for v in factors)
    with torch.no_grad():
        raw = _own(module, x, "encode")
        z = model.encode(x)
        assert z.shape[1:] == model.latent_shape(*x.shape[2:])
        torch.testing.assert_close(z, (raw - shift) * scale, rtol=0, atol=1e-10)
        video = model.decode(z, x.shape[2])
        torch.testing.assert_close(video, _own(module, raw, "decode"), rtol=0, atol=1e-10)
        norms = "passes" if "Hunyuan" in name else "refuse"
        found = stream_encode(model, lambda: x.split(2, 2), norms, x.shape[2])
        torch.testing.assert_close(torch.cat(list(found), 2), z, rtol=0, atol=1e-10)
        found = stream_decode(model, lambda: z.split(2, 2), norms, x.shape[2])
        torch.testing.assert_close(torch.cat(list(found), 2), video, rtol=0, atol=1e-10)


def test_frame_autoencoder_equals_diffusers() -> None:
    module, ours = _module("AutoencoderKL"), FrameAutoencoder(**FRAMES, shift_factor=0.5).double()
    ours.load_state_dict(module.state_dict())
    x = _clip("AutoencoderKL")
    with torch.no_grad():
        z = DiffusersAutoencoder(module).encode(x)
        torch.testing.assert_close(ours.encode(x), z, rtol=0, atol=1e-12)
    with torch.device("meta"):
        whole = diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
        names = FrameAutoencoder().state_dict()
    assert {n: t.shape for n, t in whole.state_dict().items()} == {
        n: t.shape for n, t in names.items()
    }


def test_a_folder_is_loaded_by_the_class_that_it_names(tmp_path: Path) -> None:
    module = _module("AutoencoderKLWan")
    write_tensors(tmp_path / "diffusion_pytorch_model.safetensors", dict(module.state_dict()))
    config = {**module.config, "_class_name": "AutoencoderKLWan"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded: Any = load_autoencoder(tmp_path, dtype=torch.float64)
    x = _clip("AutoencoderKLWan", 5)
    with torch.no_grad():
        torch.testing.assert_close(loaded.encode(x), DiffusersAutoencoder(module).encode(x))
    (tmp_path / "config.json").write_text(json.dumps({**config, "_class_name": "AutoencoderDC"}))
    with pytest.raises(GulliverError, match="'AutoencoderDC'"):
        load_autoencoder(tmp_path)
    with pytest.raises(GulliverError, match="DiffusersAutoencoder"):
        share_autoencoder(DiffusersAutoencoder(module))


def _shared(world: World) -> float:
    model, x = DiffusersAutoencoder(_module(NAMES[1])), _clip(NAMES[1])
    with torch.no_grad():
        plain = model.decode(model.encode(x))
        shared = share_autoencoder(model, dim="height")
        video = model.decode(model.encode(x))
        shared.off()
    return float((video - plain).abs().max())


def test_ranks_share_a_class_of_diffusers(pool: Pool) -> None:
    assert max(pool.run(_shared, 2)) < 1e-10
