"""GPTQ against least squares solved anew after each column, and through models and files."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gulliver
from gulliver.errors import GulliverError
from gulliver.precision.int8 import report_of
from gulliver.precision.int8.formats import (
    from_int4,
    from_int8,
    pairs_int4,
    round_calibrated,
    to_int4,
)
from gulliver.precision.int8.replace import linear_modes
from gulliver.quantize import replace_calibrated


def correlated(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs that lie near a space of few dims, as activations do."""
    draw = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, max(2, inputs // 4), generator=draw, dtype=torch.float64)
    mixed = few @ torch.randn(few.shape[1], inputs, generator=draw, dtype=torch.float64)
    return mixed + 0.3 * torch.randn(rows, inputs, generator=draw, dtype=torch.float64)


def by_least_squares(weight: Tensor, x: Tensor, mode: str, damping: float) -> Tensor:
    """Rounds a column, then solves for all columns after it; no inverse is ever updated.

    Scales and minimums of int4 are solved for last. Returns what the rounded weight stands for, in
    float64.
    """
    inputs = weight.shape[1]
    damp = math.sqrt(damping * float(x.square().sum(0).mean()))
    # Damping is data, too: a row for each input, in which it alone is not 0.
    rows = torch.cat([x, damp * torch.eye(inputs, dtype=torch.float64)])
    wanted = weight.double() @ rows.t()
    current, done = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    values = torch.zeros_like(done)
    steps, least = weight.abs().amax(1).float().div(127).double(), torch.zeros(len(weight))
    squares, width = x.square().sum(0), 32 if mode == "int4" else 1
    groups = sorted(range(inputs // width), key=lambda n: -squares[n * width :][:width].sum())
    order = [
        column
        for n in groups
        for column in sorted(range(n * width, (n + 1) * width), key=lambda c: -squares[c])
    ]
    for place, column in enumerate(order):
        if mode == "int4" and place % 32 == 0:
            own = order[place : place + 32]
            # What later columns leave of a column's inputs.
            apart = torch.stack(
                [_apart(rows, c, order[place + 1 + n :]) for n, c in enumerate(own)]
            )
            steps, least = pairs_int4(current[:, own].float(), apart.float()).double().unbind(1)
        low, high = (0, 15) if mode == "int4" else (-127, 127)
        codes = ((current[:, column] - least) / steps).round().clamp(low, high)
        values[:, column], done[:, column] = codes, codes * steps + least
        if later := order[place + 1 :]:
            missing = wanted - done @ rows.t()
            current[:, later] = torch.linalg.lstsq(rows[:, later], missing.t()).solution.t()
    if mode == "int4":
        for row, codes in enumerate(values):
            ones = torch.block_diag(*torch.ones(inputs // width, width, 1, dtype=torch.float64))
            each = torch.cat([codes[:, None] * ones, ones], 1)
            found = torch.linalg.lstsq(rows @ each, wanted[row][:, None]).solution
            done[row] = (each @ found.half().double())[:, 0]
    return done


def _apart(rows: Tensor, column: int, later: list[int]) -> Tensor:
    """Sum of squares of a column that the later ones do not explain."""
    left = rows[:, column]
    if later:
        left = (
            left - rows[:, later] @ torch.linalg.lstsq(rows[:, later], left[:, None]).solution[:, 0]
        )
    return left.square().sum()


@pytest.mark.parametrize(("mode", "inputs"), [("int8", 37), ("int8_dynamic", 130), ("int4", 256)])
def test_each_column_is_rounded_as_if_all_were_solved_for_anew(mode: str, inputs: int):
    torch.manual_seed(0)
    x, weight = correlated(2 * inputs, inputs), torch.randn(inputs, 5, dtype=torch.float64).t()
    values, scales = round_calibrated(weight, x.t() @ x, mode, damping=0.02)
    back = from_int4 if mode == "int4" else from_int8
    assert values.is_contiguous()
    found, wanted = back(values, scales, torch.float64), by_least_squares(weight, x, mode, 0.02)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_outputs_err_less_than_with_the_nearest_and_weights_more():
    torch.manual_seed(0)
    x, weight = correlated(1024, 256).float(), torch.randn(32, 256)
    nearest = from_int4(*to_int4(weight), torch.float32)
    rounded = from_int4(*round_calibrated(weight, x.t() @ x, "int4"), torch.float32)

    def off(other: Tensor) -> float:
        return float(((other - weight) @ x.t()).norm() / (weight @ x.t()).norm())

    assert off(rounded) < 0.6 * off(nearest)
    assert (rounded - weight).norm() > (nearest - weight).norm()


def test_inputs_that_were_never_seen_are_rounded_to_the_nearest():
    torch.manual_seed(0)
    weight = torch.randn(6, 128)
    x = torch.zeros(64, 128)
    values, scales = round_calibrated(weight, x.t() @ x, "int4")
    packed, steps = to_int4(weight)
    assert torch.equal(values, packed)
    fitted, nearest = (
        (from_int4(packed, pairs, torch.float32) - weight).square().sum(1)
        for pairs in (scales, steps)
    )
    assert (fitted <= nearest).all()
    torch.testing.assert_close(scales, steps, rtol=0.05, atol=0.05)
    x[:, :3] = torch.randn(64, 1)  # three that are one
    values, scales = round_calibrated(weight, x.t() @ x, "int4")
    assert scales.isfinite().all()
    back = from_int4(values, scales, torch.float32)
    torch.testing.assert_close(
        back[:, 3:], from_int4(packed, steps, torch.float32)[:, 3:], rtol=0, atol=0.6
    )


class Net(nn.Module):
    """Two blocks, a layer that shares its weight, one that is never called, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(128, 128)}) for _ in range(2))
        self.same, self.unused = nn.Linear(128, 128), nn.Linear(128, 16)
        self.again = nn.Linear(128, 128)
        self.again.weight = self.same.weight
        self.head = nn.Linear(128, 24)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = torch.tanh(block["a"](x))  # type: ignore[index]
        return self.head(self.again(self.same(x)))


@torch.no_grad()
def test_a_block_sees_what_the_rounded_blocks_before_it_give():
    model = Net().eval()
    # One by one, by hand.
    batches = [torch.randn(3, 20, 128) for _ in range(2)]
    x = torch.cat(batches).flatten(0, 1)
    wanted, layers = {}, copy.deepcopy(model)
    for name in ("blocks.0.a", "blocks.1.a", "head"):
        layer = layers.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if name == "head":
            x = layers.again(layers.same(x))
        codes = round_calibrated(layer.weight, x.t() @ x, "int4")
        wanted[name] = codes[0]
        layer.weight.copy_(from_int4(*codes, torch.float32))
        x = torch.tanh(layer(x)) if name != "head" else x
    told: list[str] = []
    quantised = replace_calibrated(copy.deepcopy(model), batches, told=told.append)
    for name, values in wanted.items():
        found = quantised.get_submodule(name).weight.view(torch.uint8)
        same = (found == values.view(torch.uint8)).float().mean()
        assert same > 0.999, name  # sums over batches are in another order
    plain = gulliver.replace_module(copy.deepcopy(model), mode="int4")
    for name in ("same", "again", "unused"):
        ours, theirs = (m.get_submodule(name).weight for m in (quantised, plain))
        assert torch.equal(ours, theirs), name
    assert told[0] == "block 1 of 3, blocks.0: 1 layers"
    errors = {layer.path: layer.error for layer in report_of(quantised).replaced}
    assert all(errors[name] is not None and 0.01 < errors[name] < 0.2 for name in wanted)


class Residual(nn.Module):
    """A block that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(64, 64), 0

    def forward(self, x: Tensor, early: Tensor | None = None) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.a(x if early is None else x - early))


class Chain(nn.Module):
    """Blocks, of which the last may also read the output of the first."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks, self.skips = nn.ModuleList(Residual() for _ in range(6)), skips
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        early = None
        for number, block in enumerate(self.blocks):
            x = block(x, early if self.skips and number == 5 else None)
            early = x if number == 0 else early
        return self.head(x)


@pytest.mark.parametrize(("skips", "calls"), [(False, 9), (True, 17)])
@torch.no_grad()
def test_blocks_run_again_only_where_a_later_one_reads_more_than_the_one_before(
    skips: bool, calls: int
) -> None:
    """Rounded like by hand; the first of 6 sequential blocks runs in 4 passes and a trial."""
    model = Chain(skips).eval()
    batches = [torch.randn(3, 40, 64), torch.randn(2, 40, 64)]
    by_hand, wanted = copy.deepcopy(model), {}
    for name in (*(f"blocks.{n}.a" for n in range(6)), "head"):
        layer, products = by_hand.get_submodule(name), torch.zeros(64, 64)

        def add(_: object, args: Any, __: object, products: Tensor = products) -> None:
            x = args[0].flatten(0, 1)
            products += x.t() @ x

        hook = layer.register_forward_hook(add)
        for batch in batches:
            by_hand(batch)
        hook.remove()
        assert isinstance(layer, nn.Linear)
        wanted[name] = round_calibrated(layer.weight, products, "int4")
        layer.weight.copy_(from_int4(*wanted[name], torch.float32))
    quantised = replace_calibrated(copy.deepcopy(model), batches)
    for name, (values, _) in wanted.items():
        found = quantised.get_submodule(name).weight.view(torch.uint8)
        assert (found == values.view(torch.uint8)).float().mean() > 0.99, name
    first = quantised.blocks[0]
    assert isinstance(first, Residual)
    assert first.calls == calls


def test_layers_that_gptq_takes_are_those_that_are_replaced():
    assert linear_modes(Net(), "int4", ["unused"]) == dict.fromkeys(
        ("blocks.0.a", "blocks.1.a", "head"), "int4"
    )
    odd = nn.Sequential(nn.Linear(30, 4), nn.Conv1d(4, 4, 1), nn.Embedding(3, 3))
    assert linear_modes(odd, "int4") == {"0": "int8"}


@torch.no_grad()
def test_without_sound_data_it_is_refused_and_nothing_changes():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = torch.randn(2, 128)
    bad[1, 1] = math.inf
    for batches, why in (
        ([], "calibration needs data"),
        ([bad], r"blocks\.0\.a"),
    ):
        with pytest.raises(GulliverError, match=why):
            replace_calibrated(model, batches)
    with pytest.raises(GulliverError, match="no module matches"):
        replace_calibrated(model, [torch.randn(2, 128)], exclude=["haed"])
    with pytest.raises(GulliverError, match="does not reach any linear layer"):
        replace_calibrated(nn.Sequential(nn.Conv1d(4, 4, 1)), [torch.randn(2, 4, 3)])
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    model.unused.weight[0, 0] = math.nan
    with pytest.raises(GulliverError, match=r"unused.weight has values that are not finite"):
        replace_calibrated(model, [torch.randn(2, 128)])
    quantised = gulliver.replace_module(Net(), mode="int8")
    with pytest.raises(GulliverError, match=r"blocks\.0\.a is int8"):
        replace_calibrated(quantised, [torch.randn(2, 128)])
