"""The public autoencoders: the published networks, names and sizes, and how they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint.files import write_tensors
from gulliver.comm import World, all_reduce
from gulliver.errors import GulliverError
from gulliver.models import (
    Autoencoder,
    CausalAutoencoder,
    FrameAutoencoder,
    VideoAutoencoder,
)
from gulliver.models.autoencoders import AUTOENCODERS, build_autoencoder
from gulliver.parallel.convolution import (
    chunk_convolutions,
    share_autoencoder,
    stream_decode,
    stream_encode,
)
from gulliver.video import load_autoencoder
from tests.pool import Pool
from tests.video import autoencoder_reference as reference
from tests.video.public_autoencoders import CAUSAL, FRAMES, NAMES, TIME, clip, make


def _expected(name: str, w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and the clip that they decode to, by the reference."""
    kind, *how = name.split()
    micro = None if how else 17
    if kind == "frames":
        z = reference.frames_encoded(w, x, shift=0.5)
        return z, reference.frames_decoded(w, z, shift=0.5)
    if kind == "pipeline":
        z = reference.pipeline_encoded(w, x, micro)
        return z, reference.pipeline_decoded(w, z, x.shape[2], micro)
    z = reference.causal_encoded(w, x, not how, micro)
    return z, reference.causal_decoded(w, z, not how, micro)


LENGTHS = {"frames": (3,), "pipeline": (1, 20, 22), "causal": (1, 21)}
"""Lengths with a picture, a last piece that is short, and zeros before the clip."""


@pytest.mark.parametrize("name", NAMES)
def test_each_is_the_published_network_forward_and_backward(name: str) -> None:
    model: Any = make(name)
    parameters = dict(model.named_parameters())
    for frames in LENGTHS[name.split()[0]]:
        x = clip(name, frames, batch=2 if frames < 5 else 1).requires_grad_()
        z = model.encode(x)
        video = model.decode(z, frames)
        assert z.shape[1:] == model.latent_shape(*x.shape[2:])
        assert video.shape == x.shape
        wanted_z, wanted = _expected(name, {**dict(model.named_buffers()), **parameters}, x)
        torch.testing.assert_close(z, wanted_z, rtol=0, atol=1e-12)
        torch.testing.assert_close(video, wanted, rtol=0, atol=1e-12)
        over = [x, *parameters.values()]
        found = torch.autograd.grad(video.square().sum(), over, allow_unused=True)
        right = torch.autograd.grad(wanted.square().sum(), over, allow_unused=True)
        for key, one, other in zip(["x", *parameters], found, right, strict=True):
            # Log-variances of the posterior are not decoded, nor do pictures meet earlier taps.
            zero = torch.zeros(())
            one, other = (zero if g is None else g for g in (one, other))
            assert float((one - other).abs().max()) <= 1e-10 * (1 + float(other.abs().max())), key


def test_statistics_normalise_each_channel() -> None:
    sizes = {**CAUSAL, "latent_channels": 16}
    plain = CausalAutoencoder(**sizes).double()
    model = CausalAutoencoder(**{**sizes, "normalization": "video"}).double()
    model.load_state_dict(plain.state_dict())
    x = clip("causal", 33)
    with torch.no_grad():
        raw, z = plain.encode(x), model.encode(x)
        assert z.shape[2] == 10
        shift = raw[:, 0] - z[:, 0] * 0.949077606
        torch.testing.assert_close(shift, torch.full_like(shift, -0.190169498))
        torch.testing.assert_close(model.decode(z), plain.decode(raw), rtol=0, atol=1e-12)


PUBLISHED = {
    "SD-VAE": 83_653_863,
    "SDXL-VAE": 83_653_863,
    "FLUX-VAE": 83_819_683,
    "OpenSora-VAE-v1.2": 83_653_863 + 309_687_144,
    "OpenSora-VAE-v1.3": 259_163_811,
}
"""Parameters; 1.2's report says 384 M, which is 300 and 84."""
SHAPES = {
    "SD-VAE": {
        "encoder.down_blocks.2.resnets.0.conv_shortcut.weight": (512, 256, 1, 1),
        "decoder.up_blocks.2.upsamplers.0.conv.weight": (256, 256, 3, 3),
        "decoder.mid_block.attentions.0.to_out.0.weight": (512, 512),
        "quant_conv.bias": (8,),
    },
    "OpenSora-VAE-v1.2": {
        "scale": (1, 4, 1, 1, 1),
        "spatial_vae.module.encoder.conv_norm_out.bias": (512,),
        "temporal_vae.encoder.conv_in.conv.weight": (128, 4, 3, 3, 3),
        "temporal_vae.encoder.block_res_blocks.1.0.conv3.conv.weight": (256, 128, 1, 1, 1),
        "temporal_vae.encoder.conv_blocks.2.conv.weight": (256, 256, 3, 3, 3),
        "temporal_vae.encoder.res_blocks.3.norm2.weight": (512,),
        "temporal_vae.encoder.conv2.conv.weight": (8, 512, 1, 1, 1),
        "temporal_vae.decoder.conv1.conv.weight": (512, 4, 3, 3, 3),
        "temporal_vae.decoder.conv_blocks.1.conv.weight": (512, 256, 3, 3, 3),
        "temporal_vae.decoder.conv_out.conv.weight": (4, 128, 3, 3, 3),
        "temporal_vae.post_quant_conv.conv.weight": (4, 4, 1, 1, 1),
    },
    "OpenSora-VAE-v1.3": {
        "encoder.conv_in.conv.weight": (128, 3, 3, 3, 3),
        "encoder.down.0.downsample.conv.weight": (128, 128, 3, 3),
        "encoder.down.2.downsample.conv.conv.weight": (512, 512, 3, 3, 3),
        "encoder.down.1.block.0.nin_shortcut.conv.weight": (256, 128, 1, 1, 1),
        "encoder.mid.attn_1.proj_out.conv.bias": (512,),
        "encoder.conv_out.conv.weight": (32, 512, 3, 3, 3),
        "decoder.up.1.upsample.conv.weight": (256, 256, 3, 3),
        "decoder.up.3.upsample.conv3d.norm2.weight": (512,),
        "decoder.up.0.block.2.conv2.conv.weight": (128, 128, 3, 3, 3),
        "decoder.conv_out.weight": (3, 128, 3, 3, 3),
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_shapes_and_counts_are_the_published_ones(name: str) -> None:
    configuration = AUTOENCODERS[name]
    with torch.device("meta"):
        model: Any = build_autoencoder(name)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    found = {key: tuple(state[key].shape) for key in SHAPES.get(name, {})}
    assert found == SHAPES.get(name, {})
    assert model.compression == configuration.compression
    assert model.latent_channels == configuration.latent_channels
    model.latent_shape(*configuration.clip)


def test_autoencoders_share_one_interface() -> None:
    models: list[Autoencoder] = [VideoAutoencoder(width=8), *(make(name) for name in NAMES)]
    for model in models:
        steps = model.compression
        frames = 1 + 4 * steps[0]
        shape = model.latent_shape(frames, 4 * steps[1], 5 * steps[2])
        assert (shape[0], *shape[2:]) == (model.latent_channels, 4, 5)


def _saved(folder: Path, kind: str, shards: int = 1) -> tuple[Any, Path]:
    model: Any = make(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    folder.mkdir()
    if shards == 1:
        write_tensors(folder / "diffusion_pytorch_model.safetensors", state)
        return model, folder
    names = sorted(state)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = names[number::shards]
        write_tensors(folder / file, {name: state[name] for name in own})
        index |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return model, folder


@pytest.mark.parametrize(("kind", "shards"), [("frames", 1), ("pipeline", 2), ("causal", 1)])
def test_autoencoder_is_detected_from_file(tmp_path: Path, kind: str, shards: int) -> None:
    model, folder = _saved(tmp_path / "a", kind, shards)
    # Groups of norms leave no trace in shapes.
    groups: dict[str, dict[str, Any]] = {
        "frames": {"norm_num_groups": 2, "shift_factor": 0.5},
        "pipeline": {"spatial": FRAMES, "temporal": TIME},
        "causal": {"num_groups": 2, "normalization": None},
    }
    loaded: Any = load_autoencoder(folder, **groups[kind])
    x = clip(kind, 5)
    assert type(loaded) is type(model)
    assert not loaded.training
    torch.testing.assert_close(loaded.encode(x), model.encode(x), rtol=0, atol=0)
    half: Any = load_autoencoder(folder, dtype=torch.float32, **groups[kind])
    assert {p.dtype for p in half.parameters()} == {torch.float32}


def test_a_configuration_says_how_pictures_are_normalised_and_early_names_are_known(
    tmp_path: Path,
) -> None:
    model, folder = _saved(tmp_path / "a", "frames")
    state = dict(model.state_dict())
    for half in ("encoder", "decoder"):
        for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"),
                         ("to_out.0", "proj_attn")):  # fmt: skip
            at = f"{half}.mid_block.attentions.0"
            weight = state.pop(f"{at}.{new}.weight")
            state[f"{at}.{old}.weight"] = weight[:, :, None, None].clone()
            state[f"{at}.{old}.bias"] = state.pop(f"{at}.{new}.bias")
    write_tensors(folder / "diffusion_pytorch_model.safetensors", state)
    config = {"_class_name": "AutoencoderKL", "norm_num_groups": 2, "scaling_factor": 0.5,
              "shift_factor": 0.25, "act_fn": "silu", "sample_size": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    loaded: Any = load_autoencoder(folder)
    x = clip("frames", 2)
    raw = model.encode(x) / 0.18215 + 0.5
    torch.testing.assert_close(loaded.encode(x), (raw - 0.25) * 0.5, rtol=0, atol=1e-12)


F8 = torch.float8_e4m3fn


def test_files_of_something_else_are_named(tmp_path: Path) -> None:
    for name, told in (
        ("temporal_vae.encoder.conv_in.conv.weight", "Open-Sora 1.2, but lack"),
        ("spatial_vae.module.encoder.conv_in.weight", "picture half of Open-Sora 1.2"),
        ("encoder.mid.attn_1.q.weight", "first layout, not diffusers'"),
        ("encoder.down_blocks.0.resnets.0.conv1.conv.weight", "folder with its config.json"),
        ("spatial_blocks.0.attn.qkv.weight", "it looks like an unknown model"),
        ("double_blocks.0.img_attn.qkv.weight", "a FLUX.1 model"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "a T5 text encoder"),
    ):
        write_tensors(tmp_path / "x.safetensors", {name: torch.ones(2, 2)})
        with pytest.raises(GulliverError, match=told) as error:
            load_autoencoder(tmp_path / "x.safetensors")
        assert "\n" not in str(error.value)
    model = FrameAutoencoder(**{**FRAMES, "latent_channels": 16})
    write_tensors(tmp_path / "x.safetensors", dict(model.state_dict()))
    with pytest.raises(GulliverError, match=r"16 latent channels.*scaling_factor"):
        load_autoencoder(tmp_path / "x.safetensors")
    write_tensors(tmp_path / "x.safetensors", dict(make("frames").state_dict()))
    with pytest.raises(GulliverError, match=r"x\.safetensors: norm_num_groups=32 does not divide"):
        load_autoencoder(tmp_path / "x.safetensors")
    state, groups = make("frames").state_dict(), FRAMES["norm_num_groups"]
    name = next(iter(state))
    for dtype, told in ((torch.int32, "is int32"), (F8, "pass dtype=")):
        write_tensors(tmp_path / "x.safetensors", {**state, name: state[name].to(dtype)})
        with pytest.raises(GulliverError, match=told):
            load_autoencoder(tmp_path / "x.safetensors", norm_num_groups=groups)


STRETCHES = ([21], [4, 9, 8], [1, 5, 15], [17, 4])


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_any_stretches_are_the_whole(name: str) -> None:
    model: Any = make(name)
    norms = "passes" if "whole" in name else "refuse"
    x = clip(name, 21, batch=2)
    with torch.no_grad():
        z = model.encode(x)
        video = model.decode(z, 21)
        for sizes in STRETCHES[1:3] if norms == "passes" else STRETCHES:
            made = stream_encode(model, lambda s=sizes: x.split(s, 2), norms, 21)
            torch.testing.assert_close(torch.cat(list(made), 2), z, rtol=0, atol=1e-12)
        for size in (2, 3):
            made = list(stream_decode(model, lambda n=size: z.split(n, 2), norms, 21))
            assert len(made) > 1
            torch.testing.assert_close(torch.cat(made, 2), video, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["pipeline", "pipeline whole"])
def test_stream_accepts_padded_length(name: str) -> None:
    model: Any = make(name)
    norms = "passes" if "whole" in name else "refuse"
    x = clip(name, 22)
    with torch.no_grad():
        z = model.encode(x)
        found = torch.cat(list(stream_encode(model, lambda: x.split(8, 2), norms, frames=22)), 2)
        torch.testing.assert_close(found, z, rtol=0, atol=1e-12)
        found = torch.cat(list(stream_decode(model, lambda: z.split(2, 2), norms, frames=22)), 2)
        torch.testing.assert_close(found, model.decode(z, 22), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["frames", "pipeline", "causal whole"])
def test_convolutions_in_pieces_are_the_whole(name: str) -> None:
    model: Any = make(name)
    x = clip(name, 5)
    with torch.no_grad():
        video = model.decode(model.encode(x), 5)
        chunked = chunk_convolutions(model, budget="4KiB")
        torch.testing.assert_close(model.decode(model.encode(x), 5), video, rtol=0, atol=1e-12)
        assert any(len(plan.boxes) > 1 for plan in chunked.plans.values())


SHARED = (
    ("frames", "time"), ("pipeline", "height"), ("pipeline whole", "time"),
    ("pipeline whole", "channels"), ("causal", "width"), ("causal whole", "height"),
)  # fmt: skip
ALL_SHARED = tuple(
    (name, dim) for name in NAMES for dim in ("samples", "height", "width", "time", "channels")
)


def _run(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the decoded clip, and the gradients of parameters."""
    model.zero_grad()
    video = model.decode(model.encode(x), x.shape[2])
    weights = torch.linspace(0.5, 1.5, video.numel()).view_as(video)
    (video.square() * weights).sum().backward()
    return video.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def _shared(world: World, cases: tuple[tuple[str, str], ...]) -> dict[str, float]:
    errors = {}
    for name, dim in cases:
        model: Any = make(name)
        x = clip(name, 5)
        plain, gradients = _run(model, x)
        shared = share_autoencoder(model, dim=dim)
        video, found = _run(model, x)
        shared.off()
        for gradient in found.values():
            all_reduce(gradient)
        pairs = [(video, plain), *((found[key], gradients[key]) for key in found)]
        errors[f"{name}, {dim}"] = max(
            float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs
        )
    return errors


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, SHARED), pytest.param(3, ALL_SHARED, marks=pytest.mark.full)]
)
def test_ranks_share_each_exactly_forward_and_backward(
    pool: Pool, ranks: int, cases: tuple[tuple[str, str], ...]
) -> None:
    for errors in pool.run(_shared, ranks, cases):
        assert errors == {key: pytest.approx(0, abs=1e-10) for key in errors}
