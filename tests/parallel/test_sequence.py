"""Attention over ranks is attention on one rank; what cannot be exact is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks._two_ring import two_ring_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gulliver.comm import World
from gulliver.comm import messages as wire
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.hardware.cluster import Axis, Device, Link
from gulliver.parallel.sequence import (
    Mask,
    SequencePlan,
    attention,
    choose,
    make_groups,
    mean_loss,
    position_ids,
    shard,
    shard_labels,
    swap_sharded_dim,
    unshard,
)
from gulliver.parallel.sequence.choice import predict, volume
from gulliver.parallel.sequence.heads import deal_heads
from gulliver.parallel.sequence.kernels import (
    KernelRequirements,
    select,
)
from gulliver.parallel.sequence.layout import Layout
from gulliver.parallel.sequence.mask import Rules, tiles
from tests.parallel.sequence_cells import (
    BARS,
    LARGE_MODES,
    MODES,
    Case,
    Mode,
    covered,
    errors_of,
    full_attention,
    largest_errors,
    shared_attention,
    small_pieces,
    tensors,
)
from tests.pool import Pool

WHOLE = slice(None), slice(None)
SMALL_MODES = tuple(mode for mode in MODES if mode.ranks > 1)


def _assert_exact(results: list[dict[str, list[float]]], bar: float) -> None:
    for result in results:
        for name, errors in result.items():
            assert max(errors) <= bar, (name, errors)


def _named(value: Any) -> str | None:
    if isinstance(value, list):
        return "covered"
    return value.name if isinstance(value, Mode) else str(value)


@pytest.mark.parametrize(
    ("mode", "dtype", "cases"),
    covered(MODES) + covered(LARGE_MODES, [torch.float64], strength=1),
    ids=_named,
)
def test_every_mode_is_exact_under_every_mask(
    pool: Pool, mode: Mode, dtype: torch.dtype, cases: list[Case]
) -> None:
    _assert_exact(pool.run(errors_of, mode.ranks, mode, dtype, cases=cases), BARS[dtype])


@pytest.mark.parametrize("mode", SMALL_MODES[-2:], ids=lambda mode: mode.name)
def test_large_logits_stay_finite_and_exact(pool: Pool, mode: Mode, full: bool) -> None:
    # In float32 a logit of some hundreds is known to 1e-5, and so is its exponential.
    bars = {torch.float64: 1e-10, torch.float32: 1e-4}
    for _, dtype, cases in _asked(mode, full):
        _assert_exact(pool.run(errors_of, 4, mode, dtype, 64.0, cases=cases), bars[dtype])


def test_the_explicit_kernel_is_exact_too(pool: Pool, full: bool) -> None:
    mode = SMALL_MODES[-1]
    for _, dtype, cases in _asked(mode, full):
        found = pool.run(errors_of, 4, mode, dtype, 1.0, "reference", cases)
        _assert_exact(found, BARS[dtype])


def _asked(mode: Mode, full: bool) -> list[tuple[Mode, torch.dtype, list[Case] | None]]:
    """All cases in both dtypes, or every cell once."""
    if full:
        return [(mode, dtype, None) for dtype in BARS]
    return [call for call in covered(MODES) if call[0] == mode]


def _changing(world: World, mode: Mode) -> list[list[float]]:
    groups = make_groups(mode.plan("zigzag"))
    errors = []
    for batch, length in ((2, 64), (4, 32), (2, 64), (1, 128), (8, 16)):
        generator = torch.Generator().manual_seed(length)
        shape = (batch, 4, length, 8)
        given = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
        mask = Mask(causal=True, documents=torch.arange(length) // 11)
        found = shared_attention(groups, given, mask, length=length)
        errors.append(largest_errors(groups, found, full_attention(*given, mask)))
    return errors


@pytest.mark.parametrize("mode", SMALL_MODES[-2:], ids=lambda mode: mode.name)
def test_batch_and_length_may_change_from_call_to_call(pool: Pool, mode: Mode) -> None:
    assert max(e for rank in pool.run(_changing, 4, mode) for call in rank for e in call) < 1e-10


def _bits(world: World, mode: Mode, dtype: torch.dtype) -> bool:
    groups = make_groups(mode.plan("zigzag"))
    given = tensors(dtype, 31, 31, (6, 2))
    runs = [
        shared_attention(groups, given, Mask(causal=True), deterministic=True) for _ in range(3)
    ]
    return all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_call_gives_the_same_bits(pool: Pool, dtype: torch.dtype) -> None:
    for mode in SMALL_MODES[-2:]:
        assert all(pool.run(_bits, 4, mode, dtype))


def _halves(world: World, mode: Mode, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Errors over ranks, and those of torch's own attention on one."""
    groups = make_groups(mode.plan("zigzag"))
    given = tensors(dtype, 64, 64, (4, 4))
    expected = full_attention(*given, Mask(causal=True))
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    alone = [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]
    parts = [t[:, :, groups.plan.lay(t.shape[2]).positions(groups.rank)] for t in (*alone,)]
    found = shared_attention(groups, given, Mask(causal=True))
    assert all(t.dtype == dtype for t in found)
    errors = largest_errors(groups, found, expected), largest_errors(groups, parts, expected)
    return list(zip(*errors, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits_the_error_is_that_of_one_kernel(pool: Pool, dtype: torch.dtype) -> None:
    for mode in SMALL_MODES[-2:]:
        for rank in pool.run(_halves, 4, mode, dtype):
            for error, alone in rank:
                # A rank that holds the largest element rounds it once more.
                assert error <= 2 * alone + torch.finfo(dtype).eps


def _autocast(world: World) -> tuple[torch.dtype, float, bool]:
    groups = make_groups(SequencePlan(inner=world.size))
    given = tensors(torch.float32, 16, 16, (4, 4))
    halves = [t.bfloat16() for t in given]
    # The explicit kernel is made of products, which autocast would round.
    expected = shared_attention(groups, halves, Mask(), kernel="reference")
    with torch.autocast("cpu", torch.bfloat16):
        mixed = [given[0], halves[1], given[2], halves[3]]
        found = shared_attention(groups, mixed, Mask(), kernel="reference")
    same = all(torch.equal(a, b.to(a.dtype)) for a, b in zip(expected, found, strict=True))
    return found[0].dtype, float((found[0] - expected[0]).abs().max()), same


def test_autocast_casts_as_for_attention_on_one_rank(pool: Pool) -> None:
    for dtype, error, same in pool.run(_autocast, 2):
        assert dtype == torch.bfloat16
        assert error == 0
        assert same


def test_a_compiled_model_may_call_it() -> None:
    groups = make_groups(SequencePlan())
    q = torch.randn(1, 2, 6, 8)
    call = torch.compile(lambda x: attention(x * 2, x, x, groups) + 1, backend="eager")
    assert torch.equal(call(q), attention(q * 2, q, q, groups) + 1)


def _unseen(world: World) -> bool:
    groups = make_groups(SequencePlan(inner=world.size))
    given = tensors(torch.float32, 16, 16, (4, 4))
    documents = torch.zeros(16, dtype=torch.int64)
    documents[5:9] = -1
    found = shared_attention(groups, given, Mask(documents=documents))
    own = groups.plan.lay(16).positions(groups.rank)
    nothing = [bool((t[:, :, documents[own] < 0] == 0).all()) for t in found]
    return all(nothing) and all(bool(t.isfinite().all()) for t in found)


def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(pool: Pool) -> None:
    assert all(pool.run(_unseen, 4))


def _not_a_number(world: World, mode: Mode) -> bool:
    """A loss scaler has to see it, wherever it came from."""
    groups, seen = make_groups(mode.plan()), []
    for number, place in ((0, 3), (1, 13), (2, 13)):
        given = tensors(torch.float32, 16, 16, (4, 4))
        given[number][0, 1, place, 2] = math.nan
        # torch's CPU kernel gives zeros for it where keys are fewer than its vectors hold.
        found = shared_attention(groups, given, Mask(causal=True), kernel="reference")
        own = groups.plan.lay(16).positions(groups.rank)
        hit = own == place if number == 0 else own >= place
        seen.append(bool(found[0][0, 1][hit].isnan().any(-1).all()))
        seen.append(not bool(found[0][1].isnan().any()))
    return all(seen)


def test_non_finite_values_propagate(pool: Pool) -> None:
    for mode in SMALL_MODES[-2:]:
        assert all(pool.run(_not_a_number, 4, mode))


def _few_tokens(world: World) -> list[list[float]]:
    errors = []
    for plan in (SequencePlan(inner=4), SequencePlan(2, 1, 2, "zigzag"), SequencePlan(1, 2, 2)):
        groups = make_groups(plan)
        for length in (1, 2, 3, 5):
            given = tensors(torch.float64, length, length, (4, 2))
            found = shared_attention(groups, given, Mask(causal=True))
            errors.append(largest_errors(groups, found, full_attention(*given, Mask(causal=True))))
    return errors


def test_there_may_be_fewer_tokens_than_ranks(pool: Pool) -> None:
    assert max(e for rank in pool.run(_few_tokens, 4) for call in rank for e in call) < 1e-10


def _wide_values(world: World) -> list[float]:
    groups = make_groups(SequencePlan(2, 1, 2))
    q, k, v, _ = tensors(torch.float64, 20, 20, (4, 2))
    v = torch.cat([v, v[..., :3] * 2], -1)
    grad = torch.cat([q, q[..., :3]], -1)
    found = shared_attention(groups, [q, k, v, grad], Mask())
    return largest_errors(groups, found, full_attention(q, k, v, grad, Mask()))


def test_values_may_have_another_dim_than_keys(pool: Pool) -> None:
    assert max(max(errors) for errors in pool.run(_wide_values, 4)) < 1e-10


def _part_of_a_world(world: World) -> list[float]:
    groups = make_groups(SequencePlan(inner=2), [[3, 0], [1, 2]])
    assert groups.all.ranks == ((3, 0) if world.rank in (0, 3) else (1, 2))
    given = tensors(torch.float64, 21, 21, (4, 4))
    found = shared_attention(groups, given, Mask(causal=True))
    return largest_errors(groups, found, full_attention(*given, Mask(causal=True)))


@pytest.mark.parametrize("which", range(4))
def test_tensors_may_lie_in_memory_as_they_like(which: int) -> None:
    """Kernels read rows as if their elements lay side by side."""
    given = tensors(torch.float64, 31, 31, (6, 2))
    expected = full_attention(*given, Mask())
    given[which] = given[which].mT.contiguous().mT
    q, k, v = (t.requires_grad_() for t in given[:3])
    groups = make_groups(SequencePlan())
    out = attention(q, k, v, groups)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]
    assert max(largest_errors(groups, found, expected)) < 1e-12


def test_several_sequences_share_a_world_in_any_order(pool: Pool) -> None:
    assert max(max(errors) for errors in pool.run(_part_of_a_world, 4)) < 1e-10


class _Late:
    """A message that is delivered, or read, only when somebody waits for it."""

    def __init__(self, work: Any, finish: Any) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()


@contextmanager
def _patched(replacement: Any) -> Iterator[None]:
    true = dist.batch_isend_irecv
    wire.dist.batch_isend_irecv = lambda calls: replacement(true, calls)
    try:
        yield
    finally:
        wire.dist.batch_isend_irecv = true


def _deliver_late(true: Any, calls: list[Any]) -> list[Any]:
    works = []
    for call in calls:
        if call.op is dist.irecv:
            place, arriving = call.tensor, torch.empty_like(call.tensor)
            place.fill_(255)
            call.tensor = arriving
            works.append((call, lambda p=place, a=arriving: p.copy_(a)))
        else:
            sent, before = call.tensor, call.tensor.clone()
            call.tensor = before

            def unchanged(s: Tensor = sent, b: Tensor = before) -> None:
                assert torch.equal(s, b), "a buffer was written to while it was being sent"

            works.append((call, unchanged))
    order = true([call for call, _ in works])
    return [_Late(work, finish) for work, (_, finish) in zip(order, works, strict=True)]


def _adversary(world: World, mode: Mode) -> list[list[float]]:
    errors = []
    with _patched(_deliver_late), small_pieces():
        groups = make_groups(mode.plan("zigzag"))
        given = tensors(torch.float64, 31, 31, (4, 2))
        found = shared_attention(groups, given, Mask(causal=True))
        errors.append(largest_errors(groups, found, full_attention(*given, Mask(causal=True))))
    return errors


@pytest.mark.parametrize("mode", SMALL_MODES[3:], ids=lambda mode: mode.name)
def test_nothing_is_read_before_it_arrived_or_written_while_it_is_sent(
    pool: Pool, mode: Mode
) -> None:
    found = pool.run(_adversary, mode.ranks, mode)
    assert max(e for rank in found for call in rank for e in call) < 1e-10


def _counted_in_pieces(world: World, *args: Any) -> list[dict]:
    with small_pieces():
        return _counted(world, *args)


def _counted(world: World, plan: SequencePlan, shape: Shape) -> list[dict]:
    """Bytes and messages that this rank sends in a forward and in a backward."""
    groups = make_groups(plan)
    lines = {id(getattr(groups, n).process_group): n for n in ("ulysses", "inner", "outer")}
    counts: dict[str, list[int]] = {}

    def count(true: Any, calls: list[Any]) -> list[Any]:
        for call in calls:
            if call.op is dist.isend:
                entry = counts.setdefault(lines[id(call.group)], [0, 0])
                entry[0] += call.tensor.nbytes
                entry[1] += 1
        return true(calls)

    dtype = getattr(torch, shape.dtype)
    own, own_keys = shape.length // plan.degree, shape.keys // plan.degree
    q = torch.randn(shape.batch, shape.heads, own, shape.head_dim).to(dtype).requires_grad_()
    kv = (shape.batch, shape.kv_heads, own_keys, shape.head_dim)
    k, v = (torch.randn(kv).to(dtype).requires_grad_() for _ in range(2))
    with _patched(count):
        out = attention(q, k, v, groups, length=shape.length, key_length=shape.keys)
        forward = dict(counts)
        counts.clear()
        out.sum().backward()
    return [forward, dict(counts)]


PLANS = (
    SequencePlan(inner=2),
    SequencePlan(inner=4),
    SequencePlan(outer=2, inner=2),
    SequencePlan(ulysses=4),
    SequencePlan(ulysses=2, inner=2),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_as_many_bytes_are_sent_as_the_formulas_say(pool: Pool, plan: SequencePlan) -> None:
    for dtype, keys in (("float32", 64), ("bfloat16", 32)):
        shape = Shape(2, 8, 4, 32, 8, key_length=keys, dtype=dtype)
        count = _counted_in_pieces if dtype == "float32" else _counted
        found = pool.run(count, plan.degree, plan, shape)
        expected = volume(plan, shape)
        for line in ("ulysses", "inner", "outer"):
            for number, way in enumerate(("forward", "backward")):
                sent = [rank[number].get(line, [0, 0])[0] for rank in found]
                assert sum(sent) / len(sent) == getattr(expected, f"{line}_{way}")


def test_a_ring_sends_as_many_messages_as_it_has_hops(pool: Pool) -> None:
    shape = Shape(1, 4, 4, 16, 8)
    for forward, backward in pool.run(_counted, 4, SequencePlan(outer=2, inner=2), shape):
        assert (forward["inner"][1], forward["outer"][1]) == (2, 1)
        assert (backward["inner"][1], backward["outer"][1]) == (4, 2)
    for forward, backward in pool.run(_counted, 4, SequencePlan(ulysses=4), shape):
        # q, k and v in one exchange, the output in another; backward the same.
        assert (forward["ulysses"][1], backward["ulysses"][1]) == (6, 6)


def test_the_ring_sends_less_than_the_two_rings_of_the_paper() -> None:
    shape = Shape(1, 4, 4, 64, 8)
    ring, two = volume(SequencePlan(inner=4), shape), two_ring_bytes(4, shape)
    unit = 4 * 64 // 4 * 8 * 4
    assert (ring.forward, ring.backward) == (2 * 3 * unit, 4 * 3 * unit)
    assert (two.forward, two.backward) == (2 * 3 * unit, 6 * 3 * unit)


def test_an_outer_ring_crosses_slow_links_less_often_by_more_than_the_inner_size() -> None:
    shape = Shape(1, 4, 4, 64, 8)
    flat, nested = (
        volume(plan, shape) for plan in (SequencePlan(inner=8), SequencePlan(outer=2, inner=4))
    )
    # The flat ring's rank at the end of a node sends all its blocks over the slow link.
    assert flat.inner_forward / nested.outer_forward == 7
    assert flat.inner_backward / nested.outer_backward == 7


def _sharding(world: World, plan: SequencePlan) -> None:
    groups = make_groups(plan)
    whole = torch.randn(2, 13, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.arange(13.0, dtype=torch.float64).view(1, 13, 1)
    own = plan.lay(13).positions(groups.rank)

    x = whole.clone().requires_grad_()
    part = shard(x, groups)
    assert torch.equal(part, whole[:, own])
    (part * shard(weight, groups)).sum().backward()
    assert torch.equal(x.grad, weight.expand_as(whole)), "the whole gradient on every rank"

    x = whole.clone().requires_grad_()
    (shard(x, groups, gradient="mean") * shard(weight, groups)).sum().backward()
    assert torch.equal(x.grad, weight.expand_as(whole) / world.size)

    x = whole.clone().requires_grad_()
    (shard(x, groups, gradient="own") * weight[:, own]).sum().backward()
    only = torch.zeros_like(whole)
    only[:, own] = weight[:, own].expand(2, -1, 3)
    assert torch.equal(x.grad, only)

    # Ranks go on alike here, so the sum of their gradients is had without a message, too.
    for gradient, times in (("own", 1), ("alike", world.size)):
        part = whole[:, own].clone().requires_grad_()
        again = unshard(part, groups, gradient=gradient)
        assert torch.equal(again, whole)
        (again * weight).sum().backward()
        assert torch.equal(part.grad, times * weight[:, own].expand_as(part))
    assert torch.equal(unshard(own, groups, dim=0, length=13), torch.arange(13))


@pytest.mark.parametrize(
    "plan",
    [
        SequencePlan(inner=3),
        SequencePlan(inner=4, layout="zigzag"),
        SequencePlan(2, 1, 2, "zigzag"),
    ],
    ids=str,
)
def test_a_sequence_is_cut_and_put_together_with_its_gradients(
    pool: Pool, plan: SequencePlan
) -> None:
    pool.run(_sharding, plan.degree, plan)


def _language_model(world: World, plan: SequencePlan) -> tuple[float, float]:
    """Next-token loss of a packed batch, and its gradient, against one process."""
    groups = make_groups(plan)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 11, (2, 17), generator=generator)
    documents = torch.tensor([0] * 6 + [1] * 8 + [2] * 3)
    table = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    places = torch.randn(17, 8, generator=generator, dtype=torch.float64)

    def loss_of(ids: Tensor, positions: Tensor, labels: Tensor, attend: Any, mean: Any) -> Any:
        weights = table.clone().requires_grad_()
        x = weights[ids] + places[positions]
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        y = attend(heads).transpose(1, 2).flatten(2)
        each = F.cross_entropy((y @ weights.T).mT, labels, ignore_index=-100, reduction="none")
        loss = mean(each, labels != -100)
        loss.backward()
        return loss.detach(), weights.grad

    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    mask = Mask(causal=True, documents=documents)
    allowed = mask.rules(2, 17, 17).dense(torch.arange(17), torch.arange(17))
    expected, gradient = loss_of(
        ids,
        position_ids(make_groups(SequencePlan(), [[r] for r in range(world.size)]), 17, documents),
        labels,
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=allowed),
        lambda each, counted: each.sum() / counted.sum(),
    )
    found, share = loss_of(
        shard(ids, groups),
        position_ids(groups, 17, documents),
        shard_labels(ids, groups),
        lambda x: attention(x, x, x, groups, mask=mask),
        lambda each, counted: mean_loss(each, groups, counted),
    )
    dist.all_reduce(share)
    return float((found - expected).abs()), float((share - gradient).abs().max())


def test_a_sharded_next_token_loss_is_that_of_one_process(pool: Pool) -> None:
    for plan in (SequencePlan(inner=4, layout="zigzag"), SequencePlan(2, 1, 2)):
        assert max(max(errors) for errors in pool.run(_language_model, 4, plan)) < 1e-12


def test_positions_begin_anew_with_each_document() -> None:
    groups = make_groups(SequencePlan())
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]])
    assert position_ids(groups, 5, ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 1, 2]]
    assert position_ids(groups, 3).tolist() == [0, 1, 2]


def _swapping(world: World, plan: SequencePlan) -> None:
    groups = make_groups(plan)
    whole = torch.randn(2, 7, 10, 3, generator=torch.Generator().manual_seed(2))
    frames = plan.lay(7).positions(groups.rank)
    tokens = plan.lay(10).positions(groups.rank)
    x = whole[:, frames].clone().requires_grad_()
    for size in (None, 7):
        swapped = swap_sharded_dim(x, 1, 2, groups, size)
        assert torch.equal(swapped, whole[:, :, tokens])
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(4))
    (swapped * weight[:, :, tokens]).sum().backward()
    assert torch.equal(x.grad, weight[:, frames])
    assert torch.equal(swap_sharded_dim(swapped.detach(), 2, 1, groups), whole[:, frames])


def test_the_sharded_dim_is_swapped_and_back(pool: Pool) -> None:
    for plan in (SequencePlan(ulysses=4), SequencePlan(inner=4, layout="zigzag")):
        pool.run(_swapping, 4, plan)


intervals = st.tuples(st.integers(0, 25), st.integers(1, 15)).map(lambda p: (p[0], p[0] + p[1]))


@st.composite
def masks(draw: Any, length: int = 40) -> Mask:
    """Any combination of the parts of a mask, for a batch of two."""
    numbers = st.lists(st.integers(-1, 3), min_size=length, max_size=length).map(sorted)
    rows = st.tuples(numbers, numbers).map(torch.tensor)
    counts = st.tuples(st.integers(0, length), st.integers(0, length)).map(torch.tensor)
    some = st.none() | st.integers(0, 12)
    return Mask(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(some, some)),
        documents=draw(st.none() | rows),
        key_lengths=draw(st.none() | counts),
        query_lengths=draw(st.none() | counts),
        offset=draw(st.integers(-3, 9)),
    )


def _sees(mask: Mask, row: int, q: int, k: int) -> bool:
    """What a mask means, pair by pair."""
    before, after = mask.window or (None, None)
    ids = mask.documents
    return not (
        (mask.causal and k > q + mask.offset)
        or (before is not None and k < q + mask.offset - before)
        or (after is not None and k > q + mask.offset + after)
        or (ids is not None and (ids[row][q] != ids[row][k] or ids[row][q] < 0))
        or (mask.key_lengths is not None and k >= mask.key_lengths[row])
        or (mask.query_lengths is not None and q >= mask.query_lengths[row])
    )


@settings(max_examples=40, deadline=None)
@given(
    masks(),
    st.lists(intervals, min_size=1, max_size=2),
    st.lists(intervals, min_size=1, max_size=2),
    st.integers(2, 9),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_tiles_hold_the_allowed_pairs_and_no_other(
    mask: Mask, q_held: Any, k_held: Any, leaf: int, rows: tuple[int, int]
) -> None:
    rules = mask.rules(2, 40, 40)
    of_q, of_k = (
        torch.cat([torch.arange(*interval) for interval in held]) for held in (q_held, k_held)
    )
    expected = torch.tensor(
        [[[_sees(mask, b, int(q), int(k)) for k in of_k] for q in of_q] for b in range(2)]
    )
    outside = torch.ones(len(of_q), dtype=torch.bool)
    outside[rows[0] : rows[1]] = False
    assert torch.equal(rules.dense(of_q, of_k).expand(2, -1, -1), expected)
    for half, kept in ((None, expected), (rows, expected.masked_fill(outside.view(1, -1, 1), 0))):
        found = torch.zeros_like(expected, dtype=torch.int64)
        for tile in tiles(tuple(q_held), tuple(k_held), rules, half, leaf):
            q, k = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
            allowed = torch.ones(1, q, k)
            if tile.kind == "causal":
                assert q == k
                allowed = allowed.tril()
            if tile.kind == "masked":
                assert max(q, k) <= leaf
                allowed = tile.allowed(rules)
            found[:, slice(*tile.q), slice(*tile.k)] += allowed.long()
        assert torch.equal(found, kept.long()), "each pair once"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["contiguous", "zigzag"]),
)
def test_a_layout_gives_every_position_to_one_rank(
    length: int, ring: int, ulysses: int, name: Any
) -> None:
    layout = Layout(length, ring, ulysses, name)
    assert sorted(layout.order().tolist()) == list(range(length))
    assert layout.sizes() == [len(layout.positions(r)) for r in range(layout.degree)]
    assert max(layout.sizes()) - min(layout.sizes()) <= 2
    for place in range(ring):
        held = [p for a, b in layout.of_place(place) for p in range(a, b)]
        ranks = range(place * ulysses, (place + 1) * ulysses)
        assert held == torch.cat([layout.positions(r) for r in ranks]).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 24))
def test_every_head_is_dealt_to_one_rank_with_the_keys_that_it_needs(
    group: int, kv_heads: int, ranks: int
) -> None:
    heads = group * kv_heads
    if ranks > heads:
        with pytest.raises(GulliverError, match=f"ulysses={ranks} .*ulysses={heads} or less"):
            deal_heads(heads, kv_heads, ranks)
        return
    dealt = deal_heads(heads, kv_heads, ranks)
    assert [h for a, b in dealt.queries for h in range(a, b)] == list(range(heads))
    for rank in range(ranks):
        pairs = []
        for q, k in dealt.runs(rank):
            each = (q.stop - q.start) // (k.stop - k.start)
            pairs += [(h, k.start + (h - q.start) // each) for h in range(q.start, q.stop)]
        first, first_key = dealt.queries[rank][0], dealt.keys[rank][0]
        assert [h for h, _ in pairs] == list(range(dealt.queries[rank][1] - first))
        assert all((first + h) // group == first_key + k for h, k in pairs)


def _imbalance(layout: Layout, rules: Rules) -> float:
    """How much longer a ring computes than with even work: 0 is balanced, 1 twice as long."""
    held, ring = [layout.of_place(place) for place in range(layout.ring)], layout.ring
    pairs = [[_area(tiles(q, k, rules)) for k in held] for q in held]
    slowest = sum(max(pairs[p][(p - step) % ring] for p in range(ring)) for step in range(ring))
    return slowest * ring / sum(map(sum, pairs)) - 1


def _area(found: Any) -> int:
    sizes = [(t.q[1] - t.q[0], t.k[1] - t.k[0], t.kind) for t in found]
    return sum(q * (q + 1) // 2 if kind == "causal" else q * k for q, k, kind in sizes)


def test_zigzag_balances_a_causal_mask() -> None:
    causal = Mask(causal=True).rules(1, 4096, 4096)
    for ring in (2, 4, 8):
        assert _imbalance(Layout(4096, ring, 1, "zigzag"), causal) <= 0.03
        assert _imbalance(Layout(4096, ring), causal) > 1 - 1.1 / ring
    assert _imbalance(Layout(4096, 4), Mask().rules(1, 4096, 4096)) == 0.0


def test_kernels_are_chosen_by_what_is_asked_and_refuse_by_name() -> None:
    asked = KernelRequirements("cpu", torch.float32, 8, 8)
    assert select(asked).name == "cpu flash"
    assert select(KernelRequirements("cpu", torch.float64, 8, 16)).name == "reference"
    assert select(asked, "reference").name == "reference"
    half = KernelRequirements("cuda", torch.bfloat16, 64, 64, "plain", arch=(9, 0))
    assert select(half).name == "cuda flash"
    assert (
        select(KernelRequirements("cuda", torch.bfloat16, 64, 64, "masked")).name
        == "cuda efficient"
    )
    assert select(KernelRequirements("cuda", torch.float64, 64, 64)).name == "reference"
    masked = KernelRequirements("cuda", torch.bfloat16, 64, 64, "masked", True)
    assert select(masked).name == "reference", "the only one that gives the same bits"
    with pytest.raises(GulliverError, match=r"'cuda flash' .* not cpu.*'cpu flash'"):
        select(asked, "cuda flash")
    with pytest.raises(GulliverError, match="did you mean 'cpu flash'"):
        select(asked, "cpu flsh")
    with pytest.raises(GulliverError, match="int32 is not supported: choose from float64"):
        select(KernelRequirements("cpu", torch.int32, 8, 8))


def two_level(outer: int, inner: int, slow: float = 1e8, fast: float = 1e10) -> Cluster:
    device = Device("d", {"float32": 1e12, "bfloat16": 4e12}, 1e11, 1 << 34)
    axes = Axis("node", outer, Link(1e-4, slow)), Axis("local", inner, Link(1e-5, fast))
    return Cluster("two levels", device, axes)


def test_the_choice_keeps_heads_inside_nodes_and_blocks_between_them() -> None:
    shape = Shape(1, 4, 4, 32768, 64)
    chosen = choose(two_level(2, 4), shape)
    assert chosen.plan.degree == 8
    flat, nested = (
        predict(two_level(2, 4), shape, plan).seconds
        for plan in (SequencePlan(inner=8), SequencePlan(outer=2, inner=4))
    )
    assert nested < flat
    best = min(chosen.predicted, key=lambda p: p.seconds)
    assert best.plan == chosen.plan
    assert str(chosen).splitlines()[0] == f"chosen: {chosen.plan}"
    # Few heads: Ulysses cannot go further.
    # Where four ranks of a node share the tensors, a sequence over two crosses nodes at once.
    near, far = choose(two_level(2, 4), shape, 2), choose(two_level(2, 4), shape, 2, stride=4)
    by_plan = {p.plan: p for p in near.predicted}
    assert all(p.seconds >= by_plan[p.plan].seconds for p in far.predicted)
    for p in far.predicted:
        assert p.exchanges > 10 * by_plan[p.plan].exchanges or p.plan.ulysses == 1
    few = choose(two_level(2, 4), Shape(1, 2, 1, 4096, 64))
    assert max(p.plan.ulysses for p in few.predicted) == 2
    assert choose(two_level(2, 4), Shape(1, 4, 4, 64, 8, causal=True)).plan.layout == "zigzag"


def _raises(match: str, call: Any) -> None:
    with pytest.raises(GulliverError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_bad_input_is_one_line_that_says_what_would_be_right() -> None:
    groups = make_groups(SequencePlan())
    q = torch.randn(1, 4, 6, 8)
    _raises("dropout 0.1 is not supported", lambda: attention(q, q, q, groups, dropout=0.1))
    dense: Any = torch.ones(6, 6, dtype=torch.bool)
    _raises("a mask of type Tensor .* Mask", lambda: attention(q, q, q, groups, mask=dense))
    _raises("3 KV heads do not divide 4", lambda: attention(q, q[:, :3], q[:, :3], groups))
    _raises("holds 6 tokens of q.*layout of 7", lambda: attention(q, q, q, groups, length=7))
    _raises("did you mean 'zigzag'", lambda: SequencePlan(layout="zigzg"))  # type: ignore[arg-type]
    _raises("must be one of 1", lambda: make_groups(SequencePlan(inner=2)))
    _raises("cu_seqlens must begin with 0", lambda: Mask.packed(torch.tensor([1, 4])))
    for mask, match in (
        (Mask(documents=torch.zeros(5)), r"documents has shape \(5,\).* \[6\] or \[1, 6\]"),
        (Mask(key_lengths=torch.tensor([7])), "key_lengths must be 1 numbers from 0 to 6"),
        (Mask(key_documents=torch.zeros(6)), "key_documents"),
    ):
        _raises(match, lambda m=mask: attention(q, q, q, groups, mask=m))
    _raises("unknown gradient", lambda: shard(q, groups, gradient="sum"))  # type: ignore[arg-type]


def _disagreeing(world: World) -> list[str]:
    groups = make_groups(SequencePlan(inner=2))
    said = []
    first = world.rank == 0
    for q, mask in (
        (torch.randn(2 if first else 3, 4, 4, 8), Mask()),
        (torch.randn(2, 4, 4, 8), Mask(causal=first)),
        (torch.randn(2, 4, 3 if first else 5, 8), Mask()),
        (torch.randn(2, 4, 4, 8, dtype=torch.float64 if first else torch.float32), Mask()),
    ):
        with pytest.raises(GulliverError) as caught:
            attention(q, q, q, groups, mask=mask)
        said.append(str(caught.value))
    with pytest.raises(GulliverError) as caught:
        make_groups(SequencePlan(inner=3))
    return [*said, str(caught.value)]


def test_ranks_that_do_not_agree_are_told_so_on_all_of_them(pool: Pool) -> None:
    batch, mask, length, dtype, degree = zip(*pool.run(_disagreeing, 2), strict=True)
    assert all("batch are 2, 3" in line for line in batch)
    assert all("mask differ" in line for line in mask)
    assert all("layout of 8 tokens gives the ranks 4, 4" in line for line in length)
    assert all("dtype differ" in line for line in dtype)
    assert all("must be one of 1, 2" in line for line in degree)


def _uneven(world: World) -> list[str]:
    groups = make_groups(SequencePlan(inner=3))
    # The first rank's part is as it should be, and yet it must not wait for the others for ever.
    q = torch.randn(1, 4, (3, 2, 4)[world.rank], 8)
    said = []
    for call in (lambda: attention(q, q, q, groups), lambda: unshard(q, groups, dim=2)):
        with pytest.raises(GulliverError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_a_part_that_is_too_short_is_named_on_all_ranks(pool: Pool) -> None:
    for attending, gathering in pool.run(_uneven, 3):
        assert "rank 1 holds 2 tokens of q, but the contiguous layout of 9 tokens" in attending
        assert "rank 1 holds 2 of 9 positions in dim 2" in gathering


def test_rules_without_a_mask_allow_all() -> None:
    assert bool(Rules().dense(torch.arange(3), torch.arange(4)).all())
