"""Formats of what travels between ranks: each keeps its bound, whatever the numbers are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.precision.wire import (
    NAMES,
    error_bound,
    nonfinite_blocks,
    pack,
    packed_bytes,
    unpack,
    wire_format,
)

PACKED = [name for name in NAMES if name != "identity"]
SIZES = (0, 1, 2, 255, 256, 257, 1000, 70_001)


def _inputs(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    normal = torch.randn(size, generator=generator)
    outliers = normal.clone()
    outliers[::97] *= 1e4
    mixed = normal * 10.0 ** torch.randint(-30, 30, (size,), generator=generator)
    return {
        "normal": normal,
        "outliers": outliers,
        "tiny": normal * 1e-30,
        "below normal": normal * 1e-39,
        "huge": normal * 5e37,
        "mixed": mixed,
        "zero": torch.zeros(size),
    }


@pytest.mark.parametrize("rounding", ["", ":stochastic"])
@pytest.mark.parametrize("name", PACKED)
def test_every_element_keeps_within_the_stated_bound(name: str, rounding: str) -> None:
    wire = wire_format(name + rounding)
    bound, generator = error_bound(wire), torch.Generator().manual_seed(1)
    for size in SIZES:
        for kind, tensor in _inputs(size).items():
            packed = pack(tensor, wire, generator=generator)
            assert packed.numel() == packed_bytes(size, wire)
            found = unpack(packed, wire, size)
            error = (found.double() - tensor.double()).abs()
            assert bool((error <= bound.limit(tensor, wire.block)).all()), (kind, size)


@pytest.mark.parametrize("name", PACKED)
def test_errors_of_normal_numbers_are_those_of_theory(name: str) -> None:
    tensor, wire = _inputs(70_001)["normal"], wire_format(name)
    for scale in (1.0, 1e-30):
        exact = tensor.double() * scale
        found = unpack(pack(exact.float(), wire), wire, exact.numel()).double()
        error = float((found - exact).norm() / exact.norm())
        assert error == pytest.approx(error_bound(wire).typical, rel=0.15)


@pytest.mark.parametrize("name", PACKED)
def test_stochastic_rounding_is_right_in_the_mean(name: str) -> None:
    tensor = torch.linspace(-1, 1, 256).repeat(400)
    wire, generator = wire_format(f"{name}:stochastic"), torch.Generator().manual_seed(3)
    found = unpack(pack(tensor, wire, generator=generator), wire, tensor.numel())
    mean = found.view(400, 256).double().mean(0)
    step = error_bound(wire).limit(tensor[:256].clone())  # the distance of two neighbours
    off = (mean - tensor[:256].double()).abs()
    assert bool((off <= 4 * step / math.sqrt(400) / 2 + 1e-7).all())
    nearest = unpack(pack(tensor, wire_format(name)), wire_format(name), tensor.numel())
    assert float(off.norm()) < float((nearest[:256] - tensor[:256]).double().norm())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_recognisable_in_its_block_alone(name: str, bad: float) -> None:
    wire, tensor = wire_format(name), _inputs(1000)["normal"]
    tensor[300] = bad
    before = nonfinite_blocks()
    found = unpack(pack(tensor, wire), wire, 1000)
    assert not math.isfinite(float(found[300]))
    assert bool(found[:256].isfinite().all())
    assert bool(found[512:].isfinite().all())
    if name != "bf16":
        assert nonfinite_blocks() == before + 1
        scales = pack(tensor, wire)[:16].view(torch.float32)
        assert scales.isfinite().tolist() == [True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PACKED)
def test_other_dtypes_are_packed_and_added_like_float32(name: str, dtype: torch.dtype) -> None:
    wire, tensor = wire_format(name), _inputs(1000)["normal"].to(dtype)
    packed = pack(tensor, wire)
    assert torch.equal(packed, pack(tensor.float(), wire))
    total = torch.ones(1000, dtype=dtype)
    unpack(packed, wire, 1000, out=total, add=-2.0)
    expected = 1 - 2 * unpack(packed, wire, 1000).to(dtype)
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=2e-2)


def test_formats_say_what_they_take_and_what_is_wrong() -> None:
    assert packed_bytes(1024, wire_format("fp8")) == 1024 + 4 * 4
    assert packed_bytes(1024, wire_format("int4:128")) == 512 + 8 * 4
    assert str(wire_format("int8:512:stochastic")) == "int8:512:stochastic"
    assert wire_format("fp32").name == "identity"
    one, whole = torch.zeros(1), torch.zeros(1000, dtype=torch.int64)
    assert wire_format("fp8").of(one).name == "identity"  # a scale would make it larger
    assert wire_format("fp8").of(whole).name == "identity"
    assert wire_format("bf16").of(torch.zeros(9, dtype=torch.bfloat16)).name == "identity"
    codes = {wire_format(f"{n}:{b}").code for n in PACKED for b in (64, 128, 256, 512, 1024)}
    assert len(codes) == 21
    assert max(codes) < 32
    for wrong, right in (("fp9", "fp8"), ("fp8:100", "64, 128"), ("int8:stocastic", "stochastic")):
        with pytest.raises(GulliverError, match=right):
            wire_format(wrong)
    with pytest.raises(GulliverError, match="whole numbers"):
        pack(whole, wire_format("int8"))
