"""Collectives along the axes of a torus give what one sum over all ranks gives."""

from __future__ import annotations

import random
import time

import pytest
import torch
from torch import Tensor

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import (
    Torus,
    World,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather_objects,
    group_rank,
    make_axes,
    reduce_scatter,
)
from gulliver.comm.collectives import Group, broadcast_object
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.hardware.cluster import Axis, Device, Link
from tests.covering import some
from tests.patience import patient
from tests.pool import Pool
from tests.worlds import run_threads

SHAPES = {
    2: [{"node": 1, "local": 2}, {"node": 2, "local": 1}],
    4: [{"node": 2, "local": 2}, {"node": 1, "local": 4}, {"node": 4, "local": 1}, {"all": 4}],
    6: [{"node": 3, "local": 2}, {"node": 2, "local": 3}],
    8: [{"pod": 2, "node": 2, "local": 2}, {"node": 4, "local": 2}],
}
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int16, torch.int8, torch.uint8),
)


def value(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: every dtype adds them exactly."""
    generator = torch.Generator().manual_seed(31 * rank + count)
    return torch.randint(0, 5, (count,), generator=generator).to(dtype)


def _all_collectives(world: World, axes: dict[str, int], order: list[int] | None) -> None:
    torus = Torus(axes, order)
    places = order or list(range(world.size))
    assert (torus.rank, torus.size) == (places.index(world.rank), world.size)
    for dtype in DTYPES:
        part = 3
        whole = [value(rank, part * world.size, dtype) for rank in range(world.size)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        total = sum(tensor.to(wide) for tensor in whole)
        own = torch.empty(part, dtype=dtype)
        reduce_scatter(own, whole[world.rank], "sum", torus)
        mine = slice(torus.rank * part, (torus.rank + 1) * part)
        assert torch.equal(own.to(wide), total[mine])
        reduced = whole[world.rank].clone()
        all_reduce(reduced, "sum", torus)
        assert torch.equal(reduced.to(wide), total)
        everything = torch.empty(part * world.size, dtype=dtype)
        all_gather(everything, whole[world.rank][:part].clone(), torus)
        expected = torch.cat([whole[rank][:part] for rank in places])
        assert torch.equal(everything, expected)


FACTORISATIONS = [(n, axes) for n, found in SHAPES.items() for axes in found]


@pytest.mark.parametrize(("size", "axes"), some(FACTORISATIONS, FACTORISATIONS[:-1]))
def test_every_factorisation_gives_every_rank_its_part(pool: Pool, size: int, axes) -> None:
    pool.run(_all_collectives, size, axes, None)


def _ragged(world: World, axes: dict[str, int]) -> None:
    torus = Torus(axes)
    for count in (1, 2, 5, 7, 1000):
        for op in ("sum", "mean", "max"):
            terms = [value(rank, count, torch.float64) for rank in range(world.size)]
            found = terms[world.rank].clone().view(1, -1)
            all_reduce(found, op, torus)
            stacked = torch.stack(terms)
            expected = stacked.amax(0) if op == "max" else stacked.sum(0)
            expected = expected / world.size if op == "mean" else expected
            torch.testing.assert_close(found[0], expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("size", "axes"), [(4, {"a": 2, "b": 2}), (6, {"a": 3, "b": 2})])
def test_all_reduce_takes_any_size(pool: Pool, size: int, axes: dict[str, int]) -> None:
    pool.run(_ragged, size, axes)


def _in_pieces(world: World) -> None:
    torus = Torus({"node": 2, "local": 2})
    count = 3 * 2**20 // 4 + 5  # more than a segment, and ragged
    terms = [value(rank, count, torch.float32) for rank in range(world.size)]
    handles, found = [], []
    for number in range(4):
        found.append(terms[world.rank] + number)
        handles.append(all_reduce(found[-1], "sum", torus if number % 2 else None, async_op=True))
    for number in reversed(range(4)):
        handles[number].wait()
        assert torch.equal(found[number], sum(terms) + 4 * number)


def test_concurrent_and_chunked_collectives_do_not_mix(pool: Pool) -> None:
    pool.run(_in_pieces, 4)


def _wider(world: World, axes: dict[str, int] | None) -> None:
    torus = Torus(axes) if axes else None
    terms = [torch.full((8,), 1.0 + rank / 256).bfloat16() for rank in range(world.size)]
    own = torch.empty(8 // world.size)
    reduce_scatter(own, terms[world.rank], "sum", torus, accumulate_dtype=torch.float32)
    assert torch.equal(own, sum(t.float() for t in terms)[: own.numel()])
    eight = [term.to(torch.float8_e4m3fn) for term in terms]
    reduce_scatter(own, eight[world.rank], "max", torus, accumulate_dtype=torch.float32)
    assert torch.equal(own, torch.stack([e.float() for e in eight]).amax(0)[: own.numel()])
    everything = torch.empty(32, dtype=torch.float8_e4m3fn)
    all_gather(everything, eight[world.rank], torus)
    assert torch.equal(everything.float(), torch.cat(eight).float())
    with pytest.raises(GulliverError, match=r"float8_e4m3fn"):
        all_reduce(everything, "sum", torus)


@pytest.mark.parametrize("axes", [None, {"node": 2, "local": 2}])
def test_packed_messages_are_summed_in_float32(pool: Pool, axes) -> None:
    pool.run(_wider, 4, axes)


def _refusals(world: World) -> list[str]:
    found = []
    for axes, order in (({"a": 3}, None), ({"a": 2, "b": 1}, [0, 0]), ({}, None)):
        with pytest.raises(GulliverError) as caught:
            Torus(axes, order)
        found.append(str(caught.value))
    return found


def test_axes_that_do_not_make_the_world_are_refused(pool: Pool) -> None:
    first = pool.run(_refusals, 2)[0]
    assert "their product must be 2" in first[0]
    assert "each of the 2 ranks once" in first[1]
    assert "their product must be 2" in first[2]


PLACES = [[0, 2, 1, 3], [3, 1, 0, 2]]


def _numbered_by_places(world: World, order: list[int]) -> None:
    torus = Torus({"node": 2, "local": 2}, order)
    assert gather_objects(world.rank, torus) == order
    assert broadcast_object(world.rank, 1, torus) == order[1]
    tensor = torch.tensor([world.rank])
    broadcast(tensor, 2, torus)
    assert tensor.item() == order[2]
    barrier(torus)


@pytest.mark.parametrize("order", PLACES)
def test_a_torus_numbers_its_ranks_by_their_places(pool: Pool, order: list[int]) -> None:
    pool.run(_numbered_by_places, 4, order)
    pool.run(_all_collectives, 4, {"node": 2, "local": 2}, order)
    pool.run(_all_collectives, 4, {"all": 4}, order)


def _long(world: World, part: int, torus: Torus) -> None:
    whole = [value(r, part * world.size, torch.float64) for r in range(world.size)]
    mine = slice(torus.rank * part, (torus.rank + 1) * part)
    # In its own place in the input, which else stays as it was.
    source = whole[world.rank].clone()
    reduce_scatter(source[mine], source, "mean", torus)
    assert torch.equal(source[mine], sum(whole)[mine] / world.size)
    source[mine] = whole[world.rank][mine]
    assert torch.equal(source, whole[world.rank])
    everything = torch.zeros(part * world.size).double()
    everything[mine] = whole[world.rank][mine]
    all_gather(everything, everything[mine], torus, async_op=True).wait()
    expected = torch.cat(
        [whole[rank][k * part : (k + 1) * part] for k, rank in enumerate(torus.ranks)]
    )
    assert torch.equal(everything, expected)


def _long_rows(world: World, axes: dict[str, int]) -> None:
    torus = Torus(axes)
    # Rows of a few bytes, of more than travels in one piece, and in several segments.
    for part in (1, 5_000, 70_001):
        _long(world, part, torus)


@pytest.mark.parametrize(
    ("size", "axes"), some([(6, SHAPES[6][0]), (8, SHAPES[8][0])], [(6, SHAPES[6][0])])
)
def test_long_rows_are_placed_correctly(pool: Pool, size: int, axes: dict[str, int]) -> None:
    pool.run(_long_rows, size, axes)


def _close(world: World, axes: dict[str, int]) -> list[Tensor]:
    torus, found = Torus(axes), []
    for count in (7, 300, 5_000, 600_001):
        generator = torch.Generator().manual_seed(count)
        terms = torch.randn(world.size, count, generator=generator)
        for group in (torus, None):
            found.append(terms[world.rank].clone())
            all_reduce(found[-1], "mean", group)
            expected = terms.double().mean(0)
            torch.testing.assert_close(found[-1].double(), expected, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("axes", SHAPES[6][:1])
def test_all_ranks_get_the_same_bits(pool: Pool, axes: dict[str, int]) -> None:
    first, *others = pool.run(_close, 6, axes)
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def _interleaved(world: World) -> None:
    tori: list[Group] = [Torus({"node": 2, "local": 2}), None, Torus({"all": 4}, [3, 1, 0, 2])]
    flights = []
    for number in range(24):
        group, part = tori[number % 3], 10 ** (number % 5)
        whole = [value(r, part * 4, torch.float64) + number for r in range(4)]
        own = torch.empty(part).double()
        handle = reduce_scatter(own, whole[world.rank], "sum", group, async_op=True)
        rank = group_rank(group)
        flights.append((handle, own, sum(whole)[rank * part : (rank + 1) * part]))
        reduced = whole[world.rank].clone()
        handle = all_reduce(reduced, "max", group, async_op=True)
        flights.append((handle, reduced, torch.stack(whole).amax(0)))
    # Each rank waits in an order of its own.
    random.Random(world.rank).shuffle(flights)
    for handle, found, expected in flights:
        handle.wait()
        handle.wait()
        assert torch.equal(found, expected)


def test_many_in_flight_end_in_any_order(pool: Pool) -> None:
    pool.run(_interleaved, 4)


def _out_of_step(world: World) -> None:
    torus = Torus({"node": 2, "local": 2})
    first, second = torch.ones(500_000), torch.ones(10)
    one = all_reduce(first, "sum", torus, async_op=True)
    if world.rank == 0:
        # It reads a result early; the others have gone on to what it has not begun.
        one.wait()
    two = all_reduce(second, "sum", torus, async_op=True)
    for handle in (two, one):
        handle.wait()
    assert torch.equal(first, torch.full_like(first, 4.0))
    assert torch.equal(second, torch.full_like(second, 4.0))


def test_a_rank_may_wait_for_one_before_it_begins_the_next(pool: Pool) -> None:
    for _ in range(5):
        pool.run(_out_of_step, 4, deadline_s=20)


def _completes(world: World, along: bool) -> None:
    torus = Torus({"node": 2, "local": 2}) if along else None
    own, whole = torch.empty(8), torch.ones(32)
    if world.rank == 1:
        barrier()
    handle = reduce_scatter(own, whole, "sum", torus, async_op=True)
    if world.rank != 1:
        assert not handle.is_completed()
        barrier()
    end = time.monotonic() + patient(20)
    while not handle.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    assert handle.is_completed()
    handle.wait()
    assert own.tolist() == [4.0] * 8


@pytest.mark.parametrize("along", [True, False])
def test_handle_reports_completion(pool: Pool, along: bool) -> None:
    pool.run(_completes, 4, along)


def _some_axes(world: World) -> None:
    axes = make_axes({"pod": 2, "node": 2, "local": 2})
    pod, node, local = world.rank // 4, world.rank // 2 % 2, world.rank % 2
    for names, members in (
        (("pod", "local"), [p * 4 + node * 2 + i for p in range(2) for i in range(2)]),
        (("node", "local"), [pod * 4 + i for i in range(4)]),
        (("pod",), [p * 4 + node * 2 + local for p in range(2)]),
    ):
        torus = axes.torus(*names)
        assert list(torus.ranks) == members
        assert members[torus.rank] == world.rank
        assert gather_objects(world.rank, torus) == members
        found = torch.tensor([world.rank])
        all_reduce(found, "sum", torus)
        assert found.item() == sum(members)
    assert torch.distributed.get_world_size(axes.group("node")) == 2
    with pytest.raises(GulliverError, match="did you mean 'node'"):
        axes.torus("nod")
    with pytest.raises(GulliverError, match="outer to inner, as in pod, node, local"):
        axes.torus("local", "pod")


def test_a_torus_may_have_some_of_the_axes(pool: Pool) -> None:
    pool.run(_some_axes, 8)


def test_a_world_of_one_is_a_torus_too() -> None:
    torus = make_axes({"node": 1, "local": 1}).torus()
    own, whole = torch.zeros(3), torch.arange(3.0)
    reduce_scatter(own, whole, "mean", torus)
    all_reduce(own, "sum", torus)
    assert (torus.rank, torus.size, own.tolist()) == (0, 1, [0.0, 1.0, 2.0])


def _at_once(world: World) -> None:
    axes = make_axes({"node": 2, "local": 2}, [3, 1, 0, 2])
    torus = axes.torus(flat=True)
    _long(world, 11, torus)
    found = torch.full((70_001,), float(world.rank))
    all_reduce(found, "max", torus)
    assert found.unique().tolist() == [3.0]


def test_all_ranks_at_once_give_the_same_result(pool: Pool) -> None:
    pool.run(_at_once, 4)


def test_backends_without_messages_go_by_their_own_collectives() -> None:
    run_threads(_by_collectives, 4)


def _by_collectives(world: World) -> None:
    for order in (None, [3, 1, 0, 2]):
        torus = Torus({"node": 2, "local": 2}, order)
        _long(world, 5, torus)
        for count in (1, 7):
            found = torch.full((count,), float(world.rank))
            all_reduce(found, "mean", torus)
            assert found.tolist() == [1.5] * count


def _boosted(world: World, axes: str | None, inner: Link) -> tuple[object, list[Tensor]]:
    device = Device("d", {"float32": 1e9}, 1e9, 1 << 30)
    links = Axis("node", 2, Link(1e-4, 3e4)), Axis("local", 2, inner)
    cluster = Cluster("two by two", device, links, rank_order=(0, 2, 1, 3))
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plugin = LowLevelZeroPlugin(2, chunk_mb=1, axes=axes, verbose=False, cluster=cluster)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    for _ in range(2):
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    group = optimizer.group
    laid = (group.axes, group.ranks) if isinstance(group, Torus) else None
    return laid, [p.detach().clone() for p in model.parameters()]


def test_automatic_axes_are_a_torus_on_two_speeds_and_none_on_one(pool: Pool) -> None:
    slow, fast = Link(1e-4, 3e4), Link(1e-6, 1e8)
    plain = pool.run(_boosted, 4, None, fast)
    assert plain[0][0] is None
    for inner, expected in ((fast, ({"node": 2, "local": 2}, (0, 2, 1, 3))), (slow, None)):
        for laid, parameters in pool.run(_boosted, 4, "auto", inner):
            assert laid == expected
            for found, other in zip(parameters, plain[0][1], strict=True):
                torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-14)
    with pytest.raises(GulliverError, match=r"axes is 'torus'.*'auto'"):
        LowLevelZeroPlugin(axes="torus")
