"""FP8 layers against float64, against torch's own FP8 product, and in models."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver._compat import scaled_matmul
from gulliver.errors import GulliverError
from gulliver.precision.fp8 import SharedDims, convert_to_fp8, fp8_events, linear, revert_fp8
from gulliver.precision.fp8.conversion import select_layers
from gulliver.precision.fp8.layers import (
    FORWARD,
    GRADIENT,
    LayerState,
    Recipe,
    Scaled,
    encode,
    magnitude,
    matmul,
    scale_of,
)

THEORY = {FORWARD: 0.028, GRADIENT: 0.056}
"""Relative Frobenius error of a cast of normal numbers."""


def draw(kind: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if kind == "outliers":
        x[:, ::61] *= 50.0
    return x * 1e-30 if kind == "tiny" else x


def cast(x: Tensor, dtype: torch.dtype = FORWARD, dim: int | None = None) -> Scaled:
    return encode(x, magnitude(x, dim), dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def emulated(scaling: str, **options: Any) -> LayerState:
    return LayerState(Recipe(scaling, emulate=True), **options)


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny"])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_cast_errs_as_theory_says(kind: str, dim: int | None) -> None:
    x = draw(kind, 256, 320)
    for dtype, most in THEORY.items():
        assert error(cast(x, dtype, dim).decoded(torch.float64), x.double()) <= most


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
def test_scales_are_finite_powers_of_two_that_use_the_range(dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 0.3, 448.0, 449.0, 1e9, 3e38])
    scales = scale_of(sizes, dtype)
    assert scales.isfinite().all()
    assert (1 / scales).isfinite().all()
    assert torch.equal(scales.log2(), scales.log2().round())
    top = torch.finfo(dtype).max
    inside = (sizes * scales)[2:]
    assert (inside <= top).all()
    assert (inside[1:] > top / 2).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_inputs_get_finite_scale_and_stay_non_finite(bad: float) -> None:
    x = draw("normal", 4, 32)
    x[1, 3] = bad
    for dim in (None, 0, 1):
        assert scale_of(magnitude(x, dim), FORWARD).isfinite().all()
    rows = cast(x, dim=1).decoded(torch.float32)
    assert rows[1].isnan().all()
    assert rows[[0, 2, 3]].isfinite().all()
    weight, state = draw("normal", 16, 32), emulated("rowwise")
    y = linear(x, weight, None, state)
    assert not y[1].isfinite().any()
    assert y[[0, 2, 3]].isfinite().all()
    assert state.events() == {"inputs not finite": 1}


def test_zeros_and_empty_tensors_pass() -> None:
    for scaling in ("tensorwise", "rowwise"):
        state, weight = emulated(scaling), draw("normal", 16, 32).requires_grad_()
        for rows in (0, 1, 5):
            x = torch.zeros(rows, 32, requires_grad=True)
            y = linear(x, weight, None, state)
            assert torch.equal(y, torch.zeros(rows, 16))
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
        assert torch.equal(weight.grad, torch.zeros(16, 32))
        assert state.events() == {}


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_linear_layer_against_float64(kind: str, scaling: str) -> None:
    x, w = draw(kind, 96, 128), draw("normal", 64, 128, seed=1)
    g = draw(kind, 96, 64, seed=2) * (1e20 if kind == "tiny" else 1.0)
    x.requires_grad_()
    w.requires_grad_()
    y = linear(x, w, None, emulated(scaling))
    y.backward(g)
    x64, w64, g64 = (t.detach().double() for t in (x, w, g))
    # Errors of two factors add up in squares: 2.7 with 2.7, and 5.2 with 2.7. Few large elements
    # may lie where the format is coarsest: half as much again.
    more = 1.5 if kind == "outliers" else 1.0
    assert error(y.detach(), x64 @ w64.T) < 0.041 * more
    assert error(x.grad, g64 @ w64) < 0.063 * more
    assert error(w.grad, g64.T @ x64) < 0.063 * more


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_gradients_are_unbiased_in_the_mean(scaling: str) -> None:
    along = []
    for seed in range(20):
        x, w = draw("normal", 64, 64, seed=3 * seed), draw("normal", 48, 64, seed=3 * seed + 1)
        g = draw("normal", 64, 48, seed=3 * seed + 2)
        x.requires_grad_()
        w.requires_grad_()
        linear(x, w, None, emulated(scaling)).backward(g)
        right = g.double() @ w.detach().double(), g.double().T @ x.detach().double()
        for found, expected in zip((x.grad, w.grad), right, strict=True):
            along.append(float(((found - expected) * expected).sum() / expected.square().sum()))
    # Normal numbers thin out within an interval of the format, so nearest rounds up a little.
    assert abs(sum(along) / len(along)) < 5e-3


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("first", [FORWARD, GRADIENT])
def test_the_emulation_is_the_product_of_torch(first: torch.dtype, rowwise: bool) -> None:
    a = cast(draw("outliers", 48, 80), first, 1 if rowwise else None)
    b = cast(draw("normal", 80, 32, seed=1), FORWARD, 0 if rowwise else None)
    values = a.values, b.values.t().contiguous().t()
    for dtype in (torch.float32, torch.bfloat16):
        peer = scaled_matmul(*values, a.inverse, b.inverse, dtype, False)
        mine = matmul(a, b, dtype, emulate=True)
        bound = torch.finfo(dtype).eps * (mine.double().abs() + 1e-6)
        assert ((mine.double() - peer.double()).abs() <= bound).all(), dtype
        assert torch.equal(mine, peer) or dtype is torch.bfloat16
    odd = Scaled(a.values[:, :77], a.inverse), Scaled(b.values[:77], b.inverse)
    assert torch.allclose(
        matmul(*odd, torch.bfloat16, False).float(), matmul(*odd, torch.float32, True), rtol=1e-2
    )


class Net(nn.Module):
    """Queries and keys of one input, a layer of an odd size, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 48), nn.Linear(32, 48, bias=False)
        self.odd = nn.Linear(48, 20)
        self.last = nn.Linear(48, 16)
        self.lm_head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.q(x) * self.k(x))
        return self.lm_head(self.last(h + self.odd(h).sum(-1, keepdim=True)))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def test_layers_are_taken_or_kept_for_a_reason() -> None:
    model = net()
    names = list(model.state_dict())
    done = convert_to_fp8(model, emulate=True, exclude=["k"])
    assert done.layers == ("q", "last")
    assert done.kept == {
        "k": "excluded by 'k'",
        "odd": "20 outputs are no multiple of 16",
        "lm_head": "an output head",
    }
    assert list(model.state_dict()) == names
    assert {type(m) for m in model.children()} == {nn.Linear}
    assert "FP8 (tensorwise, emulated): 2 linear layers, 3 unchanged" in str(done)
    x = draw("normal", 6, 32)
    quantised, plain = model(x), net()(x)
    assert not torch.equal(quantised, plain)
    assert error(quantised, plain.double()) < 0.1
    with pytest.raises(GulliverError, match="already FP8 layers"):
        convert_to_fp8(model, emulate=True)
    revert_fp8(model)
    assert torch.equal(model(x), plain)


def test_tied_weights_other_dtypes_and_other_classes_are_kept() -> None:
    model = net()
    model.last.weight = nn.Parameter(model.last.weight.to(torch.int8), requires_grad=False)
    model.k.weight = model.q.weight
    model.attention = nn.MultiheadAttention(32, 2)
    kept = select_layers(model).kept
    assert kept["q"] == "its weights are tied to other layers"
    assert kept["last"] == "its weights are int8"
    assert "has its own forward" in kept["attention.out_proj"]
    with pytest.raises(GulliverError, match="no linear layer can compute in FP8"):
        convert_to_fp8(model, emulate=True)


def test_weights_that_are_not_kept_give_the_same_gradients() -> None:
    for scaling in ("tensorwise", "rowwise"):
        grads = []
        for keep in (True, False):
            model = net()
            convert_to_fp8(model, scaling, emulate=True, keep_weights=keep)
            model(draw("normal", 6, 32)).square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_an_evaluation_in_inference_mode_changes_nothing_of_training(scaling: str) -> None:
    def run(evaluate: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        convert_to_fp8(model, scaling, emulate=True)
        optimizer, x, found = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            draw("normal", 16, 32),
            [],
        )
        for _ in range(3):
            if evaluate:
                with torch.no_grad():
                    expected = model(x)
                with torch.inference_mode():
                    assert torch.equal(model(x), expected)
                    assert torch.equal(model(x.clone()), expected)
            model(x).square().mean().backward()
            optimizer.step()
            found += [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
        return found

    for with_it, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_it, without)


def test_layers_of_one_input_quantise_and_save_it_once() -> None:
    model, saved = net(), []
    convert_to_fp8(model, emulate=True)
    x = draw("normal", 6, 32).requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.q(x), model.k(x)
    inputs = [t for t in saved if t.shape == x.shape]
    assert [t.dtype for t in inputs] == [FORWARD, FORWARD]
    assert len({t.data_ptr() for t in inputs}) == 1
    with torch.no_grad():
        x.mul_(3)
    assert torch.equal(model.q(x), model.q(x.detach().clone()))


def test_recomputation_gives_the_same_gradients() -> None:
    for scaling in ("tensorwise", "rowwise"):
        found = []
        for again in (False, True):
            model = net()
            convert_to_fp8(model, scaling, emulate=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for step in range(3):
                for part in range(2):
                    x = draw("normal", 6, 32, seed=2 * step + part).requires_grad_()
                    y = checkpoint(model, x, use_reentrant=False) if again else model(x)
                    y.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([p.detach().clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), scaling


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_half_of_a_layer_is_quantised_as_the_whole(scaling: str) -> None:
    """Two ranks in one process: shards with the magnitudes of the whole add up to the whole."""
    x, w = draw("outliers", 24, 64).double(), draw("outliers", 32, 64, seed=1).double()
    g = draw("normal", 24, 32, seed=2).double()
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    linear(a, b, None, emulated(scaling)).backward(g)

    def shard(parts: list[list[Tensor]], shared: SharedDims) -> list[tuple[Tensor, Tensor]]:
        found = []
        for inputs, weight, grad in parts:
            inputs, weight = (t.clone().requires_grad_() for t in (inputs, weight))
            y = linear(inputs, weight, None, emulated(scaling, shared=shared))
            y.backward(grad)
            found.append((inputs.grad, weight.grad))
        return found

    seen: list[Tensor] = []

    def note(largest: Tensor) -> None:
        seen.append(largest.clone())

    def told(largest: Tensor) -> None:
        largest.copy_(torch.maximum(largest, seen.pop(0)))

    # Outputs are cut: the weight's columns, and the gradient's rows, have magnitudes of both.
    halves = [[x, w[:16], g[:, :16]], [x, w[16:], g[:, 16:]]]
    shard(halves[:1], SharedDims(outputs=note))
    (second,) = shard(halves[1:], SharedDims(outputs=told))
    seen.clear()
    shard(halves[1:], SharedDims(outputs=note))
    (first,) = shard(halves[:1], SharedDims(outputs=told))
    assert torch.allclose(first[0] + second[0], a.grad, rtol=1e-12)
    assert torch.allclose(torch.cat([first[1], second[1]]), b.grad, rtol=1e-12)


def test_autocast_and_conv1d() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer, same = Conv1D(48, 32), nn.Linear(32, 48)
    with torch.no_grad():
        same.weight.copy_(layer.weight.t())
        same.bias.copy_(layer.bias)
    x = draw("normal", 2, 8, 32)
    for module in (layer, same):
        holder = nn.Sequential(module)
        convert_to_fp8(holder, "rowwise", emulate=True)
    assert torch.allclose(layer(x), same(x), rtol=1e-5, atol=1e-5)
    layer(x).sum().backward()
    same(x).sum().backward()
    assert torch.allclose(layer.weight.grad.t(), same.weight.grad, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        y = same(x)
    assert y.dtype is torch.bfloat16
    plain = F.linear(x.double(), same.weight.detach().double(), same.bias.detach().double())
    assert error(y.detach(), plain) < 0.05
    y.float().sum().backward()
    assert same.weight.grad.dtype is torch.float32


def test_copies_have_a_state_of_their_own() -> None:
    model = net()
    convert_to_fp8(model, "rowwise", emulate=True)
    x = draw("normal", 6, 32)
    before = model(x).detach()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), before)
        with torch.no_grad():
            copied.q.weight.mul_(2)
        assert not torch.equal(copied(x), before)
        assert copied.q.fp8 is not model.q.fp8
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.full)])
def test_compiled_layers_are_one_graph_with_the_same_numbers(scaling: str) -> None:
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = net()
        convert_to_fp8(model, scaling, emulate=True)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for seed in range(2):
            y = call(draw("normal", 6, 32, seed=seed))
            y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found, strict=True))


def test_events_are_counted_by_layer() -> None:
    model = net()
    convert_to_fp8(model, "rowwise", emulate=True)
    x = draw("normal", 6, 32)
    x[0, 0] = torch.inf
    model(x)
    assert fp8_events(model)["q"] == {"inputs not finite": 1}
    assert "odd" not in fp8_events(model)


def test_a_second_derivative_is_refused() -> None:
    w = draw("normal", 16, 32).requires_grad_()
    x = draw("normal", 4, 32).requires_grad_()
    y = linear(x, w, None, emulated("tensorwise"))
    with pytest.raises(GulliverError, match="use_fp8"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
