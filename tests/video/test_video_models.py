"""The public video models compute what their definitions say, and are what public tables list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models import (
    CONFIGURATIONS,
    QUIRKS,
    MMDiT,
    STDiT,
    STDiT2,
    STDiT3,
    build,
    pack_latents,
    token_positions,
    unpack_latents,
)
from gulliver.models.configurations import QUIRKS_OF
from gulliver.models.identify import fields_of, look_of
from tests.video import video_models_reference as reference

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "caption_channels": 10,
    "model_max_length": 7,
    "class_dropout_prob": 0.0,
}


def shaken(model: nn.Module) -> nn.Module:
    """The model in float64, with no zeros and ones of the initialisation, which hide mistakes."""
    draw = torch.Generator().manual_seed(1)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=draw).double()
                parameter.add_(0.1 * noise)
    return model


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def text(lengths: list[int], channels: int = 10) -> dict[str, Tensor]:
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    return {"y": drawn(len(lengths), 1, 7, channels, seed=3), "mask": mask}


def check_equal(model: nn.Module, inputs: dict[str, Any], written_out: Any) -> None:
    """Compares forward and the gradient of every parameter and floating-point input."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for name in trained:
        state[name].requires_grad_()
    mine = {k: _leaf(v) for k, v in inputs.items()}
    theirs = {k: _leaf(v) for k, v in inputs.items()}
    found, expected = model(**mine), written_out(state, **theirs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weight = drawn(*expected.shape, seed=9)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for name, parameter in model.named_parameters():
        if name in trained:
            wanted = state[name].grad
            wanted = torch.zeros_like(parameter) if wanted is None else wanted
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-8, msg=name)
    for name, value in mine.items():
        if isinstance(value, Tensor) and value.requires_grad and theirs[name].grad is not None:
            torch.testing.assert_close(
                value.grad, theirs[name].grad, rtol=1e-8, atol=1e-8, msg=name
            )


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_(value.ndim > 2)


@pytest.mark.parametrize(
    ("size", "lengths", "scales"),
    [((3, 4, 6), [7, 7], (1.0, 1.0)), ((2, 2, 4), [1, 5, 2], (0.5, 2 / 3))],
)
def test_the_first_form_equals_the_written_out_model(size, lengths, scales) -> None:
    torch.manual_seed(0)
    space, time = scales
    model = STDiT(**SMALL, input_size=size, space_scale=space, time_scale=time)
    shaken(model)
    # Buffers are of single precision, as in the public weights; their values are compared below.
    count = len(lengths)
    inputs = {"x": drawn(count, 3, *size), "timestep": torch.rand(count).double() * 999}
    inputs |= text(lengths)
    codes = reference_codes(model, space, time)
    torch.testing.assert_close(model.pos_embed, codes[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(model.pos_embed_temporal, codes[1], rtol=0, atol=1e-6)
    model.pos_embed.copy_(codes[0])
    model.pos_embed_temporal.copy_(codes[1])
    kinds = {"heads": 2, "depth": 2, "patch": (1, 2, 2), "space_scale": space, "time_scale": time}
    check_equal(model, inputs, lambda s, **i: reference.stdit(s, **i, **kinds))


def reference_codes(model: STDiT, space: float, time: float) -> tuple[Tensor, Tensor]:
    """Positions in double precision, from the same library in that precision."""
    from gulliver.models.blocks import sines, spatial_positions

    frames, height, width = model.input_size
    size = (height // 2, width // 2, 24, space, torch.device("cpu"), torch.float64)
    places = spatial_positions(*size, square=False)[None]
    return places, sines(torch.arange(frames).double() / time, 24)[None]


@pytest.mark.parametrize(
    ("shape", "lengths", "given", "quirks"),
    [
        ((3, 4, 6), [7, 7], False, True),
        ((4, 3, 5), [2, 7, 4], True, True),
        ((1, 5, 2), [1, 6], False, False),
        ((3, 6, 3), [3, 5], True, False),
    ],
)
def test_the_second_form_equals_the_written_out_model(shape, lengths, given, quirks) -> None:
    torch.manual_seed(0)
    model = shaken(STDiT2(**SMALL, input_sq_size=24, compat=None if quirks else ()))
    count = len(lengths)
    x_mask = torch.rand(count, shape[0], generator=torch.Generator().manual_seed(5)) > 0.5
    inputs = {
        "x": drawn(count, 3, *shape),
        "timestep": torch.rand(count).double() * 999,
        **text(lengths),
        "x_mask": x_mask if given else torch.ones_like(x_mask),
        "num_frames": torch.full((count,), float(shape[0])).double(),
        "height": (torch.arange(count) * 8.0 + 8 * shape[1]).double(),
        "width": torch.full((count,), 8.0 * shape[2]).double(),
        "ar": (torch.rand(count) + 0.5).double(),
        "fps": (torch.rand(count) * 30).double(),
    }
    kinds = {"heads": 2, "depth": 2, "patch": (1, 2, 2), "input_sq_size": 24, "quirks": quirks}
    check_equal(model, inputs, lambda s, **i: reference.stdit2(s, **i, **kinds))
    if not given:
        plain = model(**dict(inputs, x_mask=None))
        torch.testing.assert_close(plain, model(**inputs), rtol=1e-12, atol=1e-12)


WINDOWS = [
    # latent, caption lengths, window, spatial codes, given frames, frames at noise 0, quirks
    ((2, 8, 8), [7, 7], (2, 2, -1), True, [], False, True),
    ((3, 5, 9), [2, 6], (2, 3, -1), True, [0, 2], False, True),
    ((3, 3, 6), [4, 1], (4, 2, 2), False, [1], True, False),
    ((1, 6, 2), [5, 3], (-1, -1, 1), True, [], True, True),
]


@pytest.mark.parametrize(
    ("shape", "lengths", "window", "spatial", "given", "still", "quirks"), WINDOWS
)
def test_the_third_form_with_windows_equals_the_written_out_model(
    shape, lengths, window, spatial, given, still, quirks
) -> None:
    torch.manual_seed(0)
    changes = {"kernel_size": window, "use_spatial_rope": spatial, "image_conditioning": True}
    model = STDiT3(**SMALL, **changes, input_sq_size=24, compat=None if quirks else ())
    assert all(not p.any() for n, p in model.named_parameters() if n.startswith("x_embedder_cond"))
    model, count = shaken(model), len(lengths)
    x_mask = torch.rand(count, shape[0], generator=torch.Generator().manual_seed(5)) > 0.5
    cond = drawn(count, 3, *shape, seed=6) if given else None
    inputs = {
        "x": drawn(count, 3, *shape),
        "timestep": torch.rand(count).double() * 1000,
        **text(lengths),
        "x_mask": x_mask if still else torch.ones_like(x_mask),
        "fps": (torch.rand(count) * 30).double(),
        "cond": cond,
        "cond_mask": None if cond is None else torch.ones_like(cond),
        "y_null": drawn(count, 1, 7, 10, seed=8) if len(given) > 1 else None,
    }
    height, width = 8.0 * shape[1], 8.0 * shape[2]
    kinds = {
        "heads": 2, "depth": 2, "patch": (1, 2, 2), "input_sq_size": 24, "window": window,
        "spatial_rope": spatial, "quirks": quirks, "height": height, "width": width,
        "given": given,
    }  # fmt: skip

    class Called(nn.Module):
        """The model with what is no tensor filled in."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **values: Any) -> Tensor:
            sides = {"height": [height] * count, "width": [width] * count}
            return self.inner(**values, **sides, mask_index=given or None)

    def written_out(s: dict[str, Tensor], **values: Any) -> Tensor:
        plain = {name.removeprefix("inner."): value for name, value in s.items()}
        return reference.stdit3(plain, **values, **kinds)

    called = Called()
    if not given:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "cond" not in name.split(".")[0])
    check_equal(called, inputs, written_out)


JOINT: dict[str, Any] = {
    "in_channels": 12,
    "vec_in_dim": 6,
    "context_in_dim": 10,
    "hidden_size": 24,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": (4, 4, 4),
}


@pytest.mark.parametrize(
    ("changes", "latent"),
    [
        ({}, (2, 4, 6)),
        ({"fused_qkv": False, "use_liger_rope": True, "cond_embed": True}, (3, 2, 4)),
        ({"guidance_embed": True, "qkv_bias": False, "axes_dim": (2, 6, 4)}, (1, 2, 6)),
    ],
)
def test_the_joint_model_equals_the_written_out_model(changes, latent) -> None:
    torch.manual_seed(0)
    fields = {**JOINT, **changes}
    model = shaken(MMDiT(**fields))
    img = pack_latents(drawn(2, 3, *latent))
    ids = token_positions(2, latent).double()
    inputs = {
        "img": img,
        "img_ids": ids,
        "txt": drawn(2, 5, 10, seed=2),
        "txt_ids": torch.zeros(2, 5, 3).double(),
        "timesteps": torch.rand(2).double(),
        "y_vec": drawn(2, 6, seed=4),
        "cond": drawn(2, img.shape[1], 16, seed=5) if "cond_embed" in changes else None,
        "guidance": torch.rand(2).double() * 5 if "guidance_embed" in changes else None,
    }
    kinds = {
        "heads": 2, "depth": 2, "singles": 2, "axes": fields["axes_dim"],
        "fused": fields.get("fused_qkv", True), "halves": fields.get("use_liger_rope", False),
    }  # fmt: skip
    check_equal(model, inputs, lambda s, **i: reference.mmdit(s, **i, **kinds))


def test_latents_are_packed_by_square_and_unpacked() -> None:
    x = drawn(2, 3, 2, 4, 6)
    tokens = pack_latents(x)
    assert tokens.shape == (2, 2 * 2 * 3, 12)
    # Frame 1, second row and third column of squares; channel by channel, row by row.
    assert torch.equal(tokens[1, 6 + 3 + 2], x[1, :, 1, 2:4, 4:6].reshape(-1))
    assert token_positions(1, (2, 4, 6))[0, 11].tolist() == [1, 1, 2]
    assert torch.equal(unpack_latents(tokens, (2, 4, 6)), x)
    with pytest.raises(GulliverError, match="3 x 6 are not divisible by patch_size=2"):
        pack_latents(x[:, :, :, :3])


# Parameters of the reference page: 724M (in units of 2^20), about 700M, 1.1B, 3B, 11B.
PUBLIC = {
    "STDiT-XL/2": (759_620_768, 550),
    "STDiT-XL/2-512": (759_620_768, 550),
    "STDiT2-XL/2": (767_452_100, 707),
    "STDiT3-XL/2": (1_207_643_972, 973),
    "STDiT3-3B/2": (3_182_211_572, 973),
    "STDiT3-XL/2-v1.3": (1_207_959_692, 977),
    "STDiT3-3B/2-v1.3": (3_182_724_572, 977),
    "MMDiT-11B": (11_891_390_528, 1082),
    "MMDiT-11B-DC": (11_891_971_200, 1082),
    "FLUX.1-dev": (11_901_408_320, 780),
}


def public_shapes(name: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {k: tuple(v.shape) for k, v in build(name).state_dict().items()}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_public_configurations_have_the_public_sizes_and_are_told_from_their_shapes(
    name: str,
) -> None:
    configuration = CONFIGURATIONS[name]
    with torch.device("meta"):
        model = build(name)
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert (sum(p.numel() for p in model.parameters()), len(shapes)) == PUBLIC[name]
    kind, fields = fields_of(shapes)
    if kind == "STDiT":
        fields["input_size"] = configuration.fields["input_size"]
    assert kind == configuration.kind
    with torch.device("meta"):
        again = type(model)(**fields).state_dict()
    assert {k: tuple(v.shape) for k, v in again.items()} == shapes
    assert {type(model).__name__} <= QUIRKS_OF.keys()
    assert configuration.release.removeprefix("Open-Sora ") in _looks(shapes)


def _looks(shapes: dict[str, tuple[int, ...]]) -> str:
    look = look_of(shapes)
    assert look is not None
    return look.told


def linears(*names: str) -> set[str]:
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")}


def test_state_dict_names_are_those_of_the_public_weights() -> None:
    embedders = linears("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "t_block.1",
                        "y_embedder.y_proj.fc1", "y_embedder.y_proj.fc2",
                        "final_layer.linear")  # fmt: skip
    embedders |= {"y_embedder.y_embedding", "final_layer.scale_shift_table"}
    block = linears("attn.qkv", "attn.proj", "attn_temp.qkv", "attn_temp.proj",
                    "cross_attn.q_linear", "cross_attn.kv_linear", "cross_attn.proj", "mlp.fc1",
                    "mlp.fc2") | {"scale_shift_table"}  # fmt: skip

    def stacked(block: set[str], path: str, depth: int) -> set[str]:
        return {f"{path}.{n}.{name}" for n in range(depth) for name in block}

    first = {"pos_embed", "pos_embed_temporal"} | embedders | stacked(block, "blocks", 28)
    assert public_shapes("STDiT-XL/2").keys() == first
    norms = {f"{a}.{n}_norm.weight" for a in ("attn", "attn_temp") for n in "qk"}
    second = stacked(block | norms | {"scale_shift_table_temporal"}, "blocks", 28) | embedders
    second |= linears("t_block_temp.1") | {"rope.freqs"}
    for name in ("csize", "ar", "fl", "fps"):
        second |= linears(f"{name}_embedder.mlp.0", f"{name}_embedder.mlp.2")
    assert public_shapes("STDiT2-XL/2").keys() == second
    third, later = public_shapes("STDiT3-XL/2"), public_shapes("STDiT3-XL/2-v1.3")
    conditioning = linears("x_embedder_cond.proj", "x_embedder_cond_mask.proj")
    assert later.keys() == third.keys() | conditioning
    assert third["rope.freqs"] == (36,)
    assert later["rope.freqs"] == (12,)
    assert later["x_embedder_cond_mask.proj.weight"] == (1152, 16, 1, 2, 2)


def test_names_of_the_joint_model_are_those_of_the_public_weights() -> None:
    for name, fused in (("MMDiT-11B", False), ("FLUX.1-dev", True)):
        shapes = public_shapes(name)
        qkv = ("qkv",) if fused else ("q_proj", "k_proj", "v_proj")
        expected = linears("img_in", "txt_in", "final_layer.linear",
                           "final_layer.adaLN_modulation.1")  # fmt: skip
        embedders = ("time_in", "vector_in", *(("guidance_in",) if fused else ()))
        expected |= linears(*(f"{e}.{part}_layer" for e in embedders for part in ("in", "out")))
        expected |= set() if fused else linears("cond_in")
        for n in range(19):
            for s in ("img", "txt"):
                path = f"double_blocks.{n}.{s}"
                expected |= linears(f"{path}_mod.lin", f"{path}_mlp.0", f"{path}_mlp.2")
                expected |= linears(*(f"{path}_attn.{p}" for p in (*qkv, "proj")))
                expected |= {f"{path}_attn.norm.{w}_norm.scale" for w in ("query", "key")}
        first = ("linear1",) if fused else ("q_proj", "k_proj", "v_mlp")
        for n in range(38):
            path = f"single_blocks.{n}"
            expected |= linears(*(f"{path}.{p}" for p in first), f"{path}.linear2",
                                f"{path}.modulation.lin")  # fmt: skip
            expected |= {f"{path}.norm.{w}_norm.scale" for w in ("query", "key")}
        assert shapes.keys() == expected
        assert shapes["double_blocks.0.img_attn.norm.query_norm.scale"] == (128,)
        assert shapes["single_blocks.0.linear2.weight"] == (3072, 15360)
    assert public_shapes("MMDiT-11B")["cond_in.weight"] == (3072, 68)


@pytest.mark.parametrize(
    ("frames", "size", "latent"),
    [
        (("STDiT3-XL/2", 51), (240, 426), (15, 30, 54)),
        (("STDiT3-XL/2-v1.3", 113), (360, 640), (29, 45, 80)),
        (("MMDiT-11B", 129), (192, 336), (33, 24, 42)),
        (("STDiT-XL/2", 16), (256, 256), (16, 32, 32)),
    ],
)
def test_latents_of_a_clip_are_counted_as_its_autoencoder_makes_them(frames, size, latent) -> None:
    name, count = frames
    assert CONFIGURATIONS[name].latent(count, *size) == latent


@pytest.mark.parametrize("kind", [STDiT, STDiT2, STDiT3, MMDiT])
def test_half_precision_stays_near_double_precision(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    changes = {"kernel_size": (2, 2, -1), "use_spatial_rope": True} if kind is STDiT3 else {}
    if kind is STDiT:
        changes = {"input_size": (2, 6, 4)}
    model = shaken(MMDiT(**JOINT) if kind is MMDiT else kind(**{**SMALL, **changes}))
    inputs = _smoke_inputs(kind)
    exact = model(**inputs)
    exact_names = ("timestep", "timesteps", "fps")
    low = {
        k: v.bfloat16() if v.is_floating_point() and k not in exact_names else v
        for k, v in inputs.items()
    }
    found = model.to(torch.bfloat16)(**low)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 0.1 * exact.abs().max()


def _smoke_inputs(kind: type[nn.Module]) -> dict[str, Tensor]:
    if kind is MMDiT:
        return {
            "img": drawn(2, 6, 12), "img_ids": token_positions(2, (1, 4, 6)),
            "txt": drawn(2, 5, 10, seed=2), "txt_ids": torch.zeros(2, 5, 3, dtype=torch.long),
            "timesteps": torch.rand(2).double(), "y_vec": drawn(2, 6, seed=4),
        }  # fmt: skip
    inputs = {"x": drawn(2, 3, 2, 6, 4), "timestep": torch.rand(2).double() * 999, **text([7, 3])}
    told = {"fps": torch.full((2,), 24.0).double(), "height": torch.full((2,), 48.0).double(),
            "width": torch.full((2,), 32.0).double()}  # fmt: skip
    if kind is STDiT2:
        told |= {"num_frames": torch.full((2,), 2.0).double(), "ar": torch.ones(2).double()}
    return inputs if kind is STDiT else inputs | told


def test_every_quirk_has_a_reason_and_a_model() -> None:
    assert {name for names in QUIRKS_OF.values() for name in names} == QUIRKS.keys()
    assert STDiT3(**SMALL).compat == set(QUIRKS_OF["STDiT3"])
    legacy = STDiT2(**SMALL, qk_norm_legacy=False).compat
    assert legacy == set(QUIRKS_OF["STDiT2"]) - {"rotate_before_norm"}
    with pytest.raises(GulliverError, match=r"has no quirk 'final_norm'.*final_norm_twice"):
        STDiT3(**SMALL, compat=("final_norm",))
    with pytest.raises(GulliverError, match="it has none"):
        MMDiT(**JOINT, compat=("final_norm_twice",))


def third(**changes: Any) -> dict[str, Any]:
    inputs = _smoke_inputs(STDiT3)
    return {**inputs, **changes}


def test_unknown_state_dicts_are_named() -> None:
    for name, told in (
        ("blocks.0.scale_shift_table", "a PixArt picture model"),
        ("transformer_blocks.0.attn1.to_q.weight", "the layout of diffusers"),
        ("temporal_vae.encoder.conv1.conv.weight", "a video autoencoder of Open-Sora 1.2"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "a T5 text encoder"),
        ("wte.weight", "is not recognized"),
    ):
        with pytest.raises(GulliverError, match=told):
            fields_of({name: (2, 2)})
    with pytest.raises(GulliverError, match=r"looks like an STDiT of Open-Sora 1\.0, but lacks"):
        fields_of({"blocks.0.attn_temp.qkv.weight": (2, 2)})


def test_the_page_of_models_lists_what_the_table_says() -> None:
    from benchmarks._models_page import PAGE, filled

    text = PAGE.read_text(encoding="utf-8")
    assert filled(text) == text, "run python -m benchmarks._models_page"
