"""int8 and int4 weights: numbers against float64, kernels against each other, refusals."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gulliver
from gulliver.booster import Booster
from gulliver.errors import GulliverError
from gulliver.precision import int8
from gulliver.precision.int8 import native_table, report_of
from gulliver.precision.int8.formats import (
    from_int4,
    from_int8,
    largest_of,
    sensitive_paths,
    to_int4,
    to_int8,
)
from gulliver.precision.int8.layers import QuantizedConvolution, QuantizedEmbedding, QuantizedLinear
from gulliver.precision.int8.products import KERNELS, Stored, chosen_kernel
from gulliver.quantize import replace_calibrated

needs_native = pytest.mark.skipif(native_table() is None, reason="no native products here")
SHAPES = [(1, 64, 8), (3, 77, 5), (7, 130, 3), (9, 256, 34), (1, 5, 1), (17, 1025, 6)]
"""Rows, inputs and outputs: whole vectors and not, one row and more than a tile has."""


def stored(outputs: int, inputs: int, mode: str, threshold: float = math.inf) -> Stored:
    weight = torch.randn(outputs, inputs)
    if mode == "int4":
        values, scales = to_int4(weight)
        return Stored(mode, values, scales, None, inputs, threshold)
    values, scales = to_int8(weight, largest_of(weight, "w"))
    return Stored(mode, values, scales, values.sum(1, dtype=torch.int32), inputs, threshold)


def exact(w: Stored, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float64, with the activations rounded as LLM.int8 rounds them."""
    rounded, outliers = x.double(), torch.zeros_like(x, dtype=torch.float64)
    if w.mode != "int8":
        inside = x.abs() < w.threshold
        outliers = x.double().where(~inside, 0.0)
        kept = x.where(inside, 0.0)
        # As the kernels say it, or halves would now and then be rounded the other way.
        largest = kept.abs().amax(1, keepdim=True).clamp(min=1e-30)
        steps = torch.round(kept * (torch.full_like(largest, 127) / largest))
        rounded = steps.double() * (largest / 127).double() + outliers
    dequantised = from_int4 if w.mode == "int4" else from_int8
    y = rounded @ dequantised(w.values, w.scales, torch.float64).t()
    return y if bias is None else y + bias


def close(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < limit, float(error)


def test_int8_rows_are_within_half_a_step_and_hold_extremes_exactly():
    weight = torch.randn(6, 40)
    weight[1] = 0
    weight[2] *= 1e-20
    weight[3, 0] = 1e4
    values, scales = to_int8(weight, largest_of(weight, "w"))
    back = from_int8(values, scales, torch.float32)
    assert ((back - weight).abs() <= 0.501 * scales[:, None]).all()
    assert back[1].eq(0).all()
    assert values[3, 0] == 127
    # Uniform rounding of normal values: a step's deviation is 1 / sqrt(12) of it.
    normal = torch.randn(64, 4096)
    values, scales = to_int8(normal, largest_of(normal, "w"))
    error = (from_int8(values, scales, torch.float32) - normal).norm() / normal.norm()
    assert 0.8 < error / (scales.mean() / math.sqrt(12)) < 1.2


def test_int4_packs_what_it_unpacks_and_errs_within_a_step():
    weight = torch.randn(5, 384)
    packed, scales = to_int4(weight)
    back = from_int4(packed, scales, torch.float32)
    assert packed.shape == (5, 192)
    assert scales.shape == (5, 12, 2)
    step = scales[..., 0].float().repeat_interleave(32, 1)
    assert (step > 0).all()
    assert ((back - weight).abs() <= 2 * step).all()
    again = from_int4(*to_int4(back), torch.float32)
    torch.testing.assert_close(again, back, rtol=0, atol=0.01 * float(step.max()))
    # A fit by least squares errs less than the range from minimum to maximum.
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    ranged = ((groups - low) / (high - low) * 15).round() * (high - low) / 15 + low
    assert (back - weight).norm() < (ranged.flatten(1) - weight).norm()
    for constant in (0.0, 0.5, -3.0):
        same = torch.full((1, 32), constant)
        assert torch.equal(from_int4(*to_int4(same), torch.float32), same)


def test_int4_keeps_sensitive_layers_in_int8() -> None:
    linear = [
        f"layers.{n}.{name}" for n in range(16) for name in ("v_proj", "up_proj", "down_proj")
    ]
    down = {int(path.split(".")[1]) for path in sensitive_paths(linear) if "down" in path}
    assert down == {0, 1, 4, 7, 10, 13, 14, 15}
    others = sensitive_paths([*linear, "lm_head"]) - {f"layers.{n}.down_proj" for n in range(16)}
    assert others == {"lm_head", *(f"layers.{n}.v_proj" for n in range(16))}


@pytest.mark.parametrize("mode", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("name", ["native", "int_mm", "dequantised"])
def test_kernels_agree_with_float64(mode: str, name: str):
    if (name == "native" and native_table() is None) or (
        (name == "dequantised") != (mode == "int8") and name != "native"
    ):
        pytest.skip("not a kernel of this mode or machine")
    torch.manual_seed(0)
    for rows, inputs, outputs in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            if inputs % 16 and (name, mode) == ("native", "int8"):
                continue
            w = stored(outputs, inputs, mode, 6.0)
            x = torch.randn(rows, inputs)
            x[0, 2] = 40.0
            bias = torch.randn(outputs)
            found = KERNELS[name](w, x.to(dtype), bias, None)
            assert found.dtype == dtype
            limit = 1e-5 if dtype == torch.float32 else 2e-2
            close(found, exact(w, x.to(dtype).float(), bias), limit)


@needs_native
def test_native_and_int_mm_give_the_same_bits_without_outliers():
    # Many rows: that a reciprocal was rounded shows in few.
    for rows, inputs, outputs in [*SHAPES, (400, 64, 8)]:
        w = stored(outputs, inputs, "int8_dynamic")
        x, bias = torch.randn(rows, inputs), torch.randn(outputs)
        x[-1] = 0
        one, other = (KERNELS[name](w, x, bias, None) for name in ("native", "int_mm"))
        assert torch.equal(one, other)


@needs_native
def test_instruction_sets_give_the_same_integers(monkeypatch: pytest.MonkeyPatch):
    w = stored(9, 333, "int8_dynamic", 6.0)
    x = torch.randn(5, 333)
    results = []
    for name in ("avx512-vnni", "avx2"):
        monkeypatch.setenv("GULLIVER_INT8", name)
        native_table.cache_clear()
        if native_table() is not None:
            results.append(KERNELS["native"](w, x, None, None))
    native_table.cache_clear()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("instructions", ["avx512-vnni", "avx2", "none"])
def test_int4_products_agree_with_float64(instructions: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GULLIVER_INT8", instructions)
    native_table.cache_clear()
    native = native_table()
    name = "dequantised" if instructions == "none" else "native"
    if name == "native" and native is None:
        native_table.cache_clear()
        pytest.skip("no such instructions here")
    for rows, outputs in ((1, 7), (6, 33)):
        w, x, bias = stored(outputs, 384, "int4"), torch.randn(rows, 384), torch.randn(outputs)
        assert chosen_kernel(w, 1, torch.device("cpu")) == name
        wanted = x.double() @ from_int4(w.values, w.scales, torch.float64).t() + bias
        close(KERNELS[name](w, x, bias, None), wanted, 1e-5)
    native_table.cache_clear()


def test_sums_of_whole_numbers_do_not_overflow_in_float16():
    torch.manual_seed(0)
    w = stored(8, 512, "int8")
    x = (4 + torch.rand(3, 512)).half() * torch.sign(w.values[0]).half()
    found = KERNELS["dequantised"](w, x, None, None)
    assert found.isfinite().all()
    close(found, exact(w, x.float(), None), 2e-3)


@pytest.mark.parametrize("mode", ["int8", "int8_dynamic", "int4"])
@torch.no_grad()
def test_empty_and_one_element_tensors_go_through(mode: str):
    for outputs, inputs in ((1, 1), (3, 0), (0, 5), (4, 128)):
        layer = nn.Sequential(nn.Linear(inputs, outputs))
        for rows in ((0, inputs), (1, inputs), (2, 0, inputs), (inputs,)):
            x = torch.randn(rows)
            wanted = layer(x)
            got = gulliver.replace_module(copy.deepcopy(layer), mode=mode)(x)
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, atol=0.3, rtol=0.3)
    zeros = nn.Sequential(nn.Linear(128, 4, bias=False))
    zeros[0].weight.zero_()
    assert gulliver.replace_module(zeros, mode=mode)(torch.randn(3, 128)).eq(0).all()
    conv = nn.Sequential(nn.Conv2d(1, 1, 1))
    wanted = conv(torch.ones(1, 1, 1, 1))
    gulliver.replace_module(conv, mode=mode)
    torch.testing.assert_close(conv(torch.ones(1, 1, 1, 1)), wanted, atol=0.02, rtol=0.02)
    assert conv(torch.ones(0, 1, 3, 3)).shape == (0, 1, 3, 3)


@pytest.mark.parametrize("name", ["native", "int_mm"])
def test_a_row_with_a_nan_or_an_infinity_is_alone_in_showing_it(name: str):
    if name == "native" and native_table() is None:
        pytest.skip("no native products here")
    w = stored(4, 64, "int8_dynamic")
    x = torch.randn(3, 64)
    whole = KERNELS[name](w, x, None, None)
    x[0, 3], x[1, 5] = math.nan, math.inf
    y = KERNELS[name](w, x, None, None)
    assert not y[:2].isfinite().any()
    assert torch.equal(y[2], whole[2])


def test_a_layer_is_the_same_for_a_row_alone_and_in_a_batch():
    w = stored(16, 96, "int8_dynamic", 6.0)
    x = torch.randn(40, 96) * torch.rand(40, 1) * 4
    whole = int8.product(w, x, None)
    for row in (0, 17, 39):
        torch.testing.assert_close(int8.product(w, x[row : row + 1], None)[0], whole[row])


def model() -> nn.Module:
    tied = nn.Linear(48, 20, bias=False)
    layers = {
        "embed": nn.Embedding(20, 48),
        "body": nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48)),
        "conv": nn.Conv1d(48, 48, 3, padding=1, groups=2, padding_mode="circular"),
        "norm": nn.LayerNorm(48),
        "attention": nn.MultiheadAttention(48, 4, batch_first=True),
        "head": tied,
    }
    made = nn.ModuleDict(layers)
    made["head"].weight = made["embed"].weight  # type: ignore[union-attr]
    return made.eval()


def run(m: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    layers: dict[str, nn.Module] = dict(m.named_children())
    x = layers["embed"](ids)
    x = x + layers["body"](x)
    x = x + layers["conv"](x.transpose(1, 2)).transpose(1, 2)
    x = layers["norm"](x)
    x = x + layers["attention"](x, x, x)[0]
    return layers["head"](x)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["int8", "int8_dynamic", "int4"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_a_model_is_replaced_in_place_and_stays_near(mode: str, embeddings: bool):
    torch.manual_seed(0)
    whole, ids = model(), torch.randint(20, (2, 9))
    wanted = run(whole, ids)
    quantised = gulliver.replace_module(whole, mode=mode, embeddings=embeddings)
    assert quantised is whole
    layers = dict(whole.named_children())
    assert isinstance(layers["head"], QuantizedLinear)
    assert isinstance(layers["conv"], QuantizedConvolution)
    assert isinstance(layers["embed"], QuantizedEmbedding) == embeddings
    close(run(whole, ids), wanted.double(), 0.05)
    if embeddings:
        assert layers["head"].weight.data_ptr() == layers["embed"].weight.data_ptr()
    report = report_of(whole)
    kept = {layer.path: layer.why for layer in report.kept}
    assert "MultiheadAttention" in kept["attention.out_proj"]
    assert ("embed" in kept) == (not embeddings)
    assert report.after < report.before
    assert "body.*" in str(report)


@torch.no_grad()
def test_transformers_conv1d_is_a_linear_layer_and_bytes_are_a_quarter():
    from transformers.pytorch_utils import Conv1D

    layer = nn.Sequential(Conv1D(300, 512)).eval()
    x = torch.randn(4, 512)
    wanted = layer(x)
    gulliver.replace_module(layer)
    close(layer(x), wanted.double(), 0.02)
    (entry,) = report_of(layer).replaced
    assert entry.after <= 0.27 * entry.before


@torch.no_grad()
def test_state_dicts_go_out_and_into_a_model_of_the_same_form(tmp_path):
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    one = gulliver.replace_module(model(), mode="int8")
    ids = torch.randint(20, (1, 5))
    save_file({n: t.clone() for n, t in one.state_dict().items()}, tmp_path / "m.safetensors")
    other = gulliver.replace_module(model(), mode="int8")
    run(other, ids)  # what it derives from its weights is derived anew
    other.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert torch.equal(run(one, ids), run(other, ids))
    assert torch.equal(run(copy.deepcopy(one), ids), run(one, ids))


def test_replaced_scales_are_those_that_are_multiplied_by() -> None:
    layer = nn.Sequential(nn.Linear(32, 16))
    gulliver.replace_module(layer, mode="int8")
    x = torch.randn(4, 32)
    with torch.no_grad():
        before = layer(x) - layer[0].bias
        scales = {"0.weight_scale": 2 * layer[0].weight_scale}
        doubled = torch.func.functional_call(layer, scales, (x,)) - layer[0].bias
        assert torch.allclose(doubled, 2 * before, rtol=1e-3, atol=1e-3)
        layer[0].weight_scale = scales["0.weight_scale"]
        assert torch.equal(layer(x) - layer[0].bias, doubled)


def test_scales_stay_float32_whatever_the_model_is_cast_to():
    layer = gulliver.replace_module(nn.Sequential(nn.Linear(64, 64)))
    before = layer[0].weight_scale.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer[0].weight_scale, before)
    with torch.no_grad():
        assert layer(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_invalid_quantization_is_rejected_without_changes():
    whole = model()
    quantised = gulliver.replace_module(copy.deepcopy(whole), mode="int8")
    with pytest.raises(GulliverError, match=r"already quantized \(body.0"):
        gulliver.replace_module(quantised)
    with pytest.raises(GulliverError, match="did you mean 'int8_dynamic'"):
        gulliver.replace_module(whole, mode="int8_dynamc")
    with pytest.raises(GulliverError, match="above 0"):
        gulliver.replace_module(whole, outlier_threshold=0.0)
    with pytest.raises(GulliverError, match="no module matches 'haed'"):
        gulliver.replace_module(whole, exclude=["haed"])
    with pytest.raises(GulliverError, match=r"body.0 is quantized to int8.*float32"):
        quantised.load_state_dict(whole.state_dict())
    nibbles = gulliver.replace_module(nn.Sequential(nn.Linear(128, 4)), mode="int4")
    octets = gulliver.replace_module(nn.Sequential(nn.Linear(128, 4)), mode="int8")
    with pytest.raises(GulliverError, match="another model or mode"):
        nibbles.load_state_dict(octets.state_dict())
    with pytest.raises(RuntimeError, match="weight_scale"):
        whole.load_state_dict(quantised.state_dict())
    whole["body"][2].weight.data[3, 3] = math.nan  # type: ignore[index]
    with pytest.raises(GulliverError, match=r"body.2.weight has values that are not finite"):
        gulliver.replace_module(whole)
    assert type(whole["body"][0]) is nn.Linear  # type: ignore[index]


@pytest.mark.parametrize("name", ["native", "dequantised"])
def test_int4_weights_that_would_overflow_are_refused_by_name_and_others_are_not(name: str):
    if name == "native" and native_table() is None:
        pytest.skip("no native products here")
    layers = nn.Sequential(nn.Linear(256, 8, bias=False))
    weight = layers[0].weight.data.uniform_(-1.0, 1.0)
    weight[0, 0] = 1.0
    weight.mul_(6.6e4)
    with pytest.raises(GulliverError, match=r"0.weight has magnitudes up to 6.6e\+04.*mode='int8'"):
        gulliver.replace_module(layers, mode="int4")
    with pytest.raises(GulliverError, match=r"0.weight has magnitudes up to 6.6e\+04"):
        replace_calibrated(layers, [torch.randn(4, 256)], "int4")
    weight.mul_(0.9)
    weight.copy_(weight.abs().amax())
    layer = gulliver.replace_module(layers, mode="int4")[0]
    x = torch.full((1, 256), 1e-3)
    y = KERNELS[name](layer.stored, x, None, None)
    torch.testing.assert_close(y, x @ weight.t(), rtol=1e-2, atol=0)


def test_a_state_dict_goes_from_one_int8_mode_to_the_other():
    torch.manual_seed(2)
    float_model, ids = model(), torch.randint(20, (1, 5))
    one = gulliver.replace_module(copy.deepcopy(float_model), mode="int8_dynamic")
    expected = gulliver.replace_module(copy.deepcopy(float_model), mode="int8")
    other = gulliver.replace_module(model(), mode="int8")
    other.load_state_dict(one.state_dict())
    assert torch.equal(run(other, ids), run(expected, ids))


def test_nothing_is_trained_through_int8_and_the_layer_is_named():
    layers = gulliver.replace_module(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    y = layers(torch.randn(3, 8, requires_grad=True))
    with pytest.raises(GulliverError, match=r"2 has int8_dynamic weights.*no_grad"):
        y.sum().backward()
    # Its biases would be trained, though no input asks for it.
    with pytest.raises(GulliverError, match=r"2 has int8_dynamic weights.*requires_grad_"):
        layers(torch.randn(3, 8)).sum().backward()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.raises(GulliverError, match=r"0 has int8_dynamic weights.*cannot be trained"):
        Booster(verbose=False).boost(layers, optimizer)
    ran, *_ = Booster(verbose=False).boost(layers)
    with torch.no_grad():
        assert torch.equal(ran(torch.ones(1, 8)), layers(torch.ones(1, 8)))


def test_layers_after_frozen_quantized_model_train():
    body = gulliver.replace_module(nn.Sequential(nn.Linear(8, 8), nn.ReLU())).requires_grad_(False)
    head, x = nn.Linear(8, 2), torch.randn(3, 8)
    head(body(x)).sum().backward()
    assert torch.equal(head.weight.grad, body(x).sum(0).expand(2, 8))


def test_patterns_exclude_layers_and_all_below_them():
    whole = gulliver.replace_module(model(), exclude=["body", "head"], convolutions=False)
    assert report_of(whole).replaced == []
    whole = gulliver.replace_module(model(), only=["body.0"])
    assert [layer.path for layer in report_of(whole).replaced] == ["body.0"]


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 300), (1, 2), (2, 300)])
@pytest.mark.parametrize("rows", [1, 65])
def test_layers_of_one_input_are_summed_right(inputs: int, outputs: int, rows: int):
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs), torch.randn(rows, inputs)
    made: Any = gulliver.replace_module(nn.Sequential(copy.deepcopy(layer)))
    with torch.no_grad():
        wanted = layer(x)
        found = made(x)
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


def test_untied_weights_of_int4_are_reported():
    for mode, tied in (("int8", True), ("int4", False)):
        made: Any = nn.Sequential(nn.Embedding(11, 256), nn.Linear(256, 11, bias=False))
        made[1].weight = made[0].weight
        gulliver.replace_module(made, mode=mode, embeddings=True)
        assert (made[0].weight is made[1].weight) == tied
        assert ("untied" in str(report_of(made))) == (not tied)


def test_layers_whose_weights_are_read_or_made_elsewhere_stay_what_they_are():
    encoder = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()
    normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64)).eval()
    spectral = nn.Sequential(nn.utils.spectral_norm(nn.Linear(64, 64)), nn.Linear(64, 64)).eval()
    x = torch.randn(2, 7, 64)
    with torch.no_grad():
        for model, quantised in ((encoder, 0), (normed, 1), (spectral, 1)):
            wanted = model(x)
            gulliver.replace_module(model)
            assert (model(x) - wanted).norm() <= 0.02 * wanted.norm()
            assert len(report_of(model).replaced) == quantised


def test_a_compiled_model_computes_what_it_computes_eagerly():
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    gulliver.replace_module(model)
    x = torch.randn(3, 128)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager")(x), model(x))


class _Casting(nn.Module):
    """Casts what it gives to the dtype of a layer's weight, as CLIP and SigLIP do."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.body = nn.Conv2d(3, 64, 4), nn.Sequential(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x.to(self.patches.weight.dtype))
        return self.body(x.flatten(2).transpose(1, 2))


@torch.no_grad()
def test_layers_whose_weights_are_asked_for_their_dtype_are_kept() -> None:
    torch.manual_seed(0)
    model, x = _Casting().eval(), torch.randn(2, 3, 8, 8)
    expected = model(x)
    gulliver.replace_module(model)
    (kept,) = report_of(model).kept
    assert kept.path == "patches"
    assert "_Casting.forward reads its weight" in kept.why
    assert (model(x) - expected).norm() < 0.02 * expected.norm()
    with pytest.raises(GulliverError, match=r"body.0 needs floats, not int8.*exclude=\['body.0'\]"):
        model.body(torch.zeros(1, 64, dtype=torch.int8))


class _Reading(nn.Module):
    """Multiplies by a layer's weight itself."""

    def __init__(this) -> None:
        super().__init__()
        this.inner, this.out = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(this, x: Tensor) -> Tensor:
        return nn.functional.linear(this.inner(x), this.out.weight.to(x.dtype))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["int8", "int8_dynamic", "int4"])
def test_layers_whose_weights_are_read_by_others_are_kept(mode: str) -> None:
    torch.manual_seed(0)
    model, x = _Reading().eval(), torch.randn(40, 64)
    expected = model(x)
    gulliver.replace_module(model, mode)
    assert [layer.path for layer in report_of(model).kept] == ["out"]
    assert (model(x) - expected).norm() < 0.15 * expected.norm()


class _Slicing(nn.Module):
    """Has a branch for slices of a weight, as BLOOM does, and adds rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.places = nn.Linear(64, 64), nn.Embedding(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 99:
            return x @ self.dense.weight[:, :32]
        return self.dense(x + self.places.weight)


def test_branches_for_slices_of_a_weight_keep_no_layer() -> None:
    model = nn.Sequential(_Slicing())
    gulliver.replace_module(model, embeddings=True)
    assert [layer.path for layer in report_of(model).replaced] == ["0.dense"]
