"""STDiT3 computes what its definition says, forward and gradient, and loads public names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gulliver.models import STDiT3, stdit3
from tests.video import video_models_reference as reference

SMALL = {
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "caption_channels": 10,
    "model_max_length": 7,
    "input_sq_size": 24,
    "class_dropout_prob": 0.0,
}


def _model(**changes) -> STDiT3:
    torch.manual_seed(0)
    model = STDiT3(**{**SMALL, **changes}).double()
    with torch.no_grad():
        # Zeros and ones of the initialisation would hide mistakes.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _inputs(
    frames: int, rows: int, columns: int, lengths: list[int], given: bool
) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(frames * 100 + rows * 10 + columns)
    count = len(lengths)
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    x_mask = torch.rand(count, frames, generator=draw) > 0.4
    return {
        "x": torch.randn(count, 3, frames, rows, columns, generator=draw).double(),
        "timestep": (torch.rand(count, generator=draw) * 1000).double(),
        "y": torch.randn(count, 1, 7, 10, generator=draw).double(),
        "mask": mask,
        "x_mask": x_mask if given else torch.ones_like(x_mask),
        "fps": (torch.rand(count, generator=draw) * 100).double(),
    }


CASES = [
    # frames, rows, columns, caption lengths, given frames, patch, changes
    (4, 4, 6, [7, 7], False, (1, 2, 2), {}),
    (3, 5, 3, [2, 7, 4], False, (1, 2, 2), {}),
    (5, 2, 7, [1, 6], True, (1, 2, 2), {}),
    (1, 6, 4, [3, 3], False, (1, 2, 2), {}),
    (4, 3, 3, [5, 1], True, (1, 1, 1), {"qk_norm": False}),
    (5, 4, 4, [2, 3], False, (2, 2, 2), {"pred_sigma": False}),
]


@pytest.mark.parametrize(
    ("frames", "rows", "columns", "lengths", "given", "patch", "changes"), CASES
)
def test_forward_and_every_gradient_equal_the_written_out_model(
    frames: int, rows: int, columns: int, lengths: list[int], given: bool, patch, changes
) -> None:
    model = _model(patch_size=patch, **changes)
    inputs = _inputs(frames, rows, columns, lengths, given)
    height, width = 8.0 * rows, 8.0 * columns
    sides = {
        "height": torch.full((len(lengths),), height),
        "width": torch.full((len(lengths),), width),
    }
    ours = dict(inputs, x=inputs["x"].clone().requires_grad_())
    if not given:
        ours["x_mask"] = None
    if min(lengths) == 7:
        ours["mask"] = None
    out = model(**ours, **sides)
    state = {n: p.detach().clone().requires_grad_() for n, p in model.state_dict().items()}
    theirs = dict(inputs, x=inputs["x"].clone().requires_grad_())
    expected = reference.stdit3(
        state, **dict(theirs, x_mask=theirs["x_mask"][:, : -(-frames // patch[0])]),
        height=height, width=width, cond=None, cond_mask=None, given=[], y_null=None,
        heads=2, depth=2, patch=patch, input_sq_size=24, window=None, spatial_rope=False,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).double()
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours["x"].grad, theirs["x"].grad, rtol=1e-9, atol=1e-9)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            theirs_grad = state[name].grad
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, theirs_grad, rtol=1e-8, atol=1e-9, msg=name)


def test_only_the_first_clip_decides_the_scale_of_positions() -> None:
    model = _model()
    inputs = _inputs(2, 4, 4, [7, 7], False)
    one = model(**inputs, height=torch.tensor([32.0, 32]), width=torch.tensor([32.0, 32]))
    other = model(**inputs, height=torch.tensor([32.0, 64]), width=torch.tensor([32.0, 64]))
    first = model(**inputs, height=torch.tensor([64.0, 32]), width=torch.tensor([64.0, 32]))
    assert torch.equal(one, other)
    assert not torch.equal(one, first)


def test_state_dict_names_are_those_of_the_public_weights() -> None:
    linear = ["weight", "bias"]
    block = ["scale_shift_table", "attn.q_norm.weight", "attn.k_norm.weight"]
    for name in ("attn.qkv", "attn.proj", "cross_attn.q_linear", "cross_attn.kv_linear",
                 "cross_attn.proj", "mlp.fc1", "mlp.fc2"):  # fmt: skip
        block += [f"{name}.{part}" for part in linear]
    expected = {"rope.freqs", "y_embedder.y_embedding", "final_layer.scale_shift_table"}
    for name in ("x_embedder.proj", "t_embedder.mlp.0", "t_embedder.mlp.2", "fps_embedder.mlp.0",
                 "fps_embedder.mlp.2", "t_block.1", "y_embedder.y_proj.fc1",
                 "y_embedder.y_proj.fc2", "final_layer.linear"):  # fmt: skip
        expected |= {f"{name}.{part}" for part in linear}
    for kind in ("spatial", "temporal"):
        expected |= {f"{kind}_blocks.{n}.{name}" for n in range(2) for name in block}
    assert set(_model().state_dict()) == expected


def test_temporal_blocks_start_as_identities_unless_told_otherwise() -> None:
    torch.manual_seed(0)
    for zero in (True, False):
        model = stdit3("tiny", zero_init_temporal=zero)
        weights = [b.attn.proj.weight for b in model.temporal_blocks]
        assert all((w == 0).all() == zero for w in weights)


def test_frames_can_be_told_apart_when_asked_to() -> None:
    still = torch.ones(1, 3, 3, 4, 4).double()
    inputs = dict(_inputs(3, 4, 4, [7], False), x=still, fps=torch.ones(1), x_mask=None)
    sides = {"height": torch.tensor([32.0]), "width": torch.tensor([32.0])}
    for told in (False, True):
        out = _model(temporal_positions=told)(**inputs, **sides)
        same = torch.allclose(out[:, :, 0], out[:, :, 2], atol=1e-9)
        assert same != told


def test_a_dropped_caption_is_the_null_caption() -> None:
    model = _model()
    inputs = _inputs(2, 4, 4, [7, 7], False)
    sides = {"height": torch.full((2,), 32.0), "width": torch.full((2,), 32.0)}
    dropped = model(**inputs, **sides, drop_caption=torch.tensor([True, False]))
    null = inputs["y"].clone()
    null[0, 0] = model.y_embedder.y_embedding
    assert torch.equal(dropped, model(**dict(inputs, y=null), **sides))


def test_training_drops_captions_at_random_and_evaluation_never() -> None:
    model = _model(class_dropout_prob=0.5)
    inputs = _inputs(2, 4, 4, [7, 7], False)
    sides = {"height": torch.full((2,), 32.0), "width": torch.full((2,), 32.0)}
    torch.manual_seed(0)
    outs = [model.train()(**inputs, **sides) for _ in range(8)]
    assert len({float(o.detach().sum()) for o in outs}) > 1
    assert torch.equal(model.eval()(**inputs, **sides), model(**inputs, **sides))
