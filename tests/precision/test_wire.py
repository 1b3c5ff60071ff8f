"""Formats of what travels between ranks: each keeps its bound, whatever the numbers are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.comm import Torus, World, all_gather, all_reduce, broadcast, reduce_scatter
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange, shift
from gulliver.comm.packed import check_packed
from gulliver.comm.watchdog import sent_bytes
from gulliver.errors import GulliverError
from gulliver.precision.wire import error_bound, nonfinite_blocks, wire_format
from gulliver.precision.wire.formats import NAMES, packed_bytes
from gulliver.precision.wire.packing import pack, unpack
from tests.pool import Pool
from tests.programs import TWO_RANKS, run_program, text

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


@pytest.mark.parametrize("name", PACKED)
def test_every_element_keeps_within_the_stated_bound(name: str) -> None:
    wire = wire_format(name)
    bound = error_bound(wire)
    for size in SIZES:
        for kind, tensor in _inputs(size).items():
            packed = pack(tensor, wire)
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
def test_non_finite_elements_do_not_spread(name: str, caplog: pytest.LogCaptureFixture) -> None:
    wire, kept = wire_format(name), {"bf16", "fp8_e5m2"}
    for size, dtype in ((1000, torch.float32), (65_801, torch.float32), (1000, torch.float16)):
        tensor = _inputs(size)["normal"].to(dtype)
        bad = {0: math.nan, 300: math.inf, 301: -math.inf, 500: math.nan, size - 1: math.inf}
        plain = tensor.clone()
        for place, value in bad.items():
            tensor[place], plain[place] = value, 0.0
        before = nonfinite_blocks()
        caplog.clear()
        packed = pack(tensor, wire)
        found = unpack(packed, wire, size)
        expected = unpack(pack(plain, wire), wire, size)
        added = unpack(packed, wire, size, out=torch.ones(size), add=2.0)
        for place, value in bad.items():
            told = value if name in kept else math.nan
            same = found[place] == told or (math.isnan(told) and bool(found[place].isnan()))
            assert same, (place, found[place])
            assert not math.isfinite(float(added[place]))
            found[place] = expected[place] = 0.0
        assert torch.equal(found, expected)  # all others are what they are without them
        assert int((~added.isfinite()).sum()) == len(bad)
        if wire.scaled:
            assert nonfinite_blocks() == before + 3
            assert ("nonfinite_blocks" in caplog.text) == (before == 0)  # said once
            assert bool(packed[: 4 * -(-size // 256)].view(torch.float32).isfinite().all())


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


def test_wire_format_sizes_and_errors() -> None:
    assert packed_bytes(1024, wire_format("fp8")) == 1024 + 4 * 4
    assert packed_bytes(1024, wire_format("int4:128")) == 512 + 8 * 4
    assert str(wire_format("int8:512")) == "int8:512"
    assert wire_format("fp32").name == "identity"
    one, whole = torch.zeros(1), torch.zeros(1000, dtype=torch.int64)
    assert wire_format("fp8").of(one).name == "identity"  # a scale would make it larger
    assert wire_format("fp8").of(whole).name == "identity"
    assert wire_format("bf16").of(torch.zeros(9, dtype=torch.bfloat16)).name == "identity"
    codes = {wire_format(f"{n}:{b}").code for n in PACKED for b in (64, 128, 256, 512, 1024)}
    assert len(codes) == 21
    assert max(codes) < 32
    for wrong, right in (("fp9", "fp8"), ("fp8:100", "64, 128"), ("fp8:x", "64, 128")):
        with pytest.raises(GulliverError, match=right):
            wire_format(wrong)
    with pytest.raises(GulliverError, match=r"integers must be exact"):
        pack(whole, wire_format("int8"))


def _term(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator).to(dtype)


def _limits(terms: list[Tensor], name: str) -> Tensor:
    """How far the sum may be off: each term's bound, one of the sum, and what floats round."""
    bound, block = error_bound(wire_format(name)), wire_format(name).block
    each = torch.stack([bound.limit(term, block) for term in terms]).sum(0)
    whole = torch.stack([term.double() for term in terms]).sum(0)
    # The sum's own packing sees the sum as it is, with its errors, in any block.
    return (
        each
        + bound.relative * (whole.abs() + each)
        + bound.of_largest * (whole.abs() + each).max()
        + 1e-5 * len(terms)
    )


def _shared(world: World, name: str, axes: dict[str, int] | None) -> list[Any]:
    wire, found = wire_format(name), []
    group = None if axes is None else Torus(axes)
    for size in (3, 1000, 4096, 20_011):
        for async_op in (False, True):
            before = sent_bytes()
            whole = torch.empty(world.size * size)
            own = _term(world.rank, size)
            all_gather(whole, own, group, async_op, wire=wire).wait()
            gathered = sent_bytes() - before
            total = _term(world.rank, size).clone()
            all_reduce(total, "mean", group, async_op, wire=wire).wait()
            reduced = sent_bytes() - before - gathered
            part, rows = torch.empty(size), _term(world.rank, world.size * size)
            reduce_scatter(part, rows, "sum", group, async_op, wire=wire).wait()
            scattered = sent_bytes() - before - gathered - reduced
            sent = {"gather": gathered, "reduce": reduced, "scatter": scattered}
            found.append((size, whole, total, part, sent))
    return found


def _check_shared(answers: list[Any], name: str, ranks: int, hops: int) -> None:
    bound, wire = error_bound(wire_format(name)), wire_format(name)
    for number, (size, whole, total, _, _) in enumerate(answers[0]):
        for rank, found in enumerate(answers):
            assert torch.equal(found[number][1], whole), "ranks have other bits"
            assert torch.equal(found[number][2], total), "ranks have other bits"
            rows = [_term(r, ranks * size).view(ranks, size)[rank] for r in range(ranks)]
            exact = torch.stack(rows).double().sum(0)
            error = (found[number][3].double() - exact).abs()
            assert bool((error <= hops * _limits(rows, name)).all())
        terms = [_term(r, size) for r in range(ranks)]
        for term, part in zip(terms, whole.view(ranks, size), strict=True):
            assert bool(((part - term).double().abs() <= bound.limit(term, wire.block)).all())
        mean = torch.stack(terms).double().mean(0)
        assert bool(((total.double() - mean).abs() <= hops * _limits(terms, name) / ranks).all())


@pytest.mark.parametrize("name", PACKED)
def test_collectives_keep_the_bound_and_all_ranks_have_the_same_bits(pool: Pool, name: str) -> None:
    for ranks in (2, 3):
        answers = pool.run(_shared, ranks, name, None)
        _check_shared(answers, name, ranks, 1)
        for size, _, _, _, sent in answers[0]:
            each = packed_bytes(size, wire_format(name))
            # Three elements are not worth a scale, and travel as they are.
            each = min(each, 4 * size)
            assert sent["gather"] == sent["scatter"] == (ranks - 1) * each
            if size > 1000:
                assert sent["reduce"] == pytest.approx(2 * (1 - 1 / ranks) * each, rel=0.06)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_over_a_torus_elements_are_packed_along_each_axis(pool: Pool, name: str) -> None:
    answers = pool.run(_shared, 4, name, {"node": 2, "local": 2})
    _check_shared(answers, name, 4, 3)
    size, *_, sent = answers[0][-1]
    each = packed_bytes(size, wire_format(name))
    assert sent["gather"] == 3 * each
    assert sent["scatter"] == pytest.approx(
        3 * each, rel=1e-3
    )  # two parts along the inner axis, one along the outer


def _messages(world: World, name: str) -> list[Tensor]:
    group, wire = world_group(world), wire_format(name)
    own = _term(world.rank, 999)
    incoming = torch.empty(999)
    before = sent_bytes()
    arrived = shift(group, own, incoming, 7, wire).wait()
    sent = sent_bytes() - before
    counts = [300 + 100 * rank for rank in range(world.size)]
    outgoing = [_term(world.rank, 300 + 100 * world.rank) + r for r in range(world.size)]
    parts = exchange(group, outgoing, counts, wire)
    same = _term(world.rank, 999)
    broadcast(same, 1, wire=wire)
    assert sent == packed_bytes(999, wire)
    return [arrived, same, *parts]


def world_group(world: World) -> RankGroup:
    """All ranks in their order."""
    return RankGroup(tuple(range(world.size)), world.rank)


@pytest.mark.parametrize("name", PACKED)
def test_messages_exchanges_and_broadcasts_are_packed_too(pool: Pool, name: str) -> None:
    bound = error_bound(wire_format(name))
    answers = pool.run(_messages, 3, name)
    for rank, (arrived, same, *parts) in enumerate(answers):
        sent = _term((rank - 1) % 3, 999)
        assert bool(((arrived - sent).abs() <= bound.limit(sent)).all())
        assert torch.equal(same, answers[1][1])
        assert bool(((same - _term(1, 999)).abs() <= bound.limit(_term(1, 999))).all())
        for source, part in enumerate(parts):
            term = _term(source, 300 + 100 * source) + rank
            assert bool(((part - term).abs() <= bound.limit(term)).all())


def _fed_back(world: World, name: str, feedback: bool) -> float:
    """Error of the sum of many reductions of one gradient, relative to it."""
    wire, gradient = wire_format(name), _term(world.rank, 1024)
    gradient[::64] *= 30
    error = torch.zeros(1024) if feedback else None
    total, steps = torch.zeros(512), 40
    for _ in range(steps):
        part = torch.empty(512)
        reduce_scatter(part, gradient.clone(), wire=wire, error=error)
        total += part
    exact = torch.empty(512)
    reduce_scatter(exact, gradient.clone())
    return float((total / steps - exact).norm() / exact.norm())


def test_error_feedback_recovers_packing_error(pool: Pool) -> None:
    for name in ("int4", "fp8_e5m2"):
        lost = max(pool.run(_fed_back, 2, name, False))
        kept = max(pool.run(_fed_back, 2, name, True))
        assert kept < lost / 8


def _odd(world: World, name: str) -> dict[str, Tensor]:
    """Sums and gathered parts of tensors that are empty, tiny, all zero, or not finite."""
    wire, found = wire_format(name), {}
    bad = _term(world.rank, 1024)
    bad[300] = math.inf if world.rank else 1.0
    odd = {"empty": torch.empty(0), "one": torch.tensor([1.5 + world.rank]), "bad": bad}
    odd["zero"] = torch.zeros(1024)
    for kind, tensor in odd.items():
        whole = torch.empty(world.size * tensor.numel())
        all_gather(whole, tensor, wire=wire)
        total = tensor.clone()
        all_reduce(total, wire=wire)
        part = torch.empty(tensor.numel())
        reduce_scatter(part, tensor.repeat(world.size), wire=wire)
        found |= {f"{kind}, gathered": whole, f"{kind}, sum": total, f"{kind}, part": part}
    return found


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_odd_shapes_and_non_finite_values_are_packed(pool: Pool, name: str) -> None:
    for found in pool.run(_odd, 2, name):
        assert all(not found[f"empty, {kind}"].numel() for kind in ("gathered", "sum", "part"))
        assert found["one, gathered"].tolist() == [1.5, 2.5]  # not worth a scale
        assert found["one, sum"].tolist() == found["one, part"].tolist() == [4.0]
        assert all(not found[f"zero, {kind}"].any() for kind in ("gathered", "sum", "part"))
        for kind in ("sum", "part"):
            finite = found[f"bad, {kind}"].isfinite()
            assert (~finite).nonzero().flatten().tolist() == [300]


DISAGREE = """
import torch
from gulliver.comm import all_gather, all_reduce, guard, init_world
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange
from gulliver.precision.wire import wire_format

def run(rank, case):
    init_world()
    wire = wire_format(case.split(", ")[1 + rank])
    tensor = torch.ones(100_000)
    with guard():
        if case.startswith("gather"):
            all_gather(torch.empty(200_000), tensor, wire=wire)
        elif case.startswith("reduce"):
            all_reduce(tensor, wire=wire)
        else:
            exchange(RankGroup((0, 1), rank), [tensor] * 2, [100_000] * 2, wire)
"""


@pytest.mark.deadline(100)
def test_format_mismatch_between_ranks_raises() -> None:
    cases = ["gather, fp8, int8:128", "reduce, fp8, identity", "exchange, fp8, identity"]
    done = run_program(text, DISAGREE + TWO_RANKS, *cases, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    lines = [" ".join(said.split()) for case in cases for _, said in found[case]]
    assert len(lines) == 6, done.stdout
    for line in lines:
        assert "ranks run different collectives" in line
        assert "packed as fp8 in 256s" in line
    assert "packed as int8 in 128s" in lines[0]


def test_a_maximum_is_not_packed() -> None:
    with pytest.raises(GulliverError, match=r"'max'.*fp8"):
        check_packed("max", wire_format("fp8"))
