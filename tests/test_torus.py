"""Collectives along the axes of a torus give what one sum over all ranks gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gulliver.comm import Torus, World, all_gather, all_reduce, reduce_scatter
from gulliver.errors import GulliverError
from tests.pool import Pool

SHAPES = {
    2: [{"node": 1, "local": 2}, {"node": 2, "local": 1}],
    4: [{"node": 2, "local": 2}, {"node": 1, "local": 4}, {"node": 4, "local": 1}, {"all": 4}],
    6: [{"node": 3, "local": 2}, {"node": 2, "local": 3}],
    8: [{"pod": 2, "node": 2, "local": 2}, {"node": 4, "local": 2}],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8)


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
        total = sum(tensor.double() for tensor in whole)
        own = torch.empty(part, dtype=dtype)
        reduce_scatter(own, whole[world.rank], "sum", torus)
        mine = slice(torus.rank * part, (torus.rank + 1) * part)
        assert torch.equal(own.double(), total[mine])
        everything = torch.empty(part * world.size, dtype=dtype)
        all_gather(everything, whole[world.rank][:part].clone(), torus)
        expected = torch.cat([whole[rank][:part] for rank in places])
        assert torch.equal(everything, expected)


@pytest.mark.parametrize(
    ("size", "axes"), [(n, axes) for n, found in SHAPES.items() for axes in found]
)
def test_every_factorisation_gives_every_rank_its_part(pool: Pool, size: int, axes) -> None:
    pool.run(_all_collectives, size, axes, None)


def test_ranks_may_be_numbered_across_nodes(pool: Pool) -> None:
    pool.run(_all_collectives, 4, {"node": 2, "local": 2}, [0, 2, 1, 3])


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


def test_many_at_once_and_in_pieces_stay_apart(pool: Pool) -> None:
    pool.run(_in_pieces, 4)


def _wider(world: World, axes: dict[str, int] | None) -> None:
    torus = Torus(axes) if axes else None
    terms = [torch.full((8,), 1.0 + rank / 256).bfloat16() for rank in range(world.size)]
    own = torch.empty(8 // world.size)
    reduce_scatter(own, terms[world.rank], "sum", torus, accumulate_dtype=torch.float32)
    assert torch.equal(own, sum(t.float() for t in terms)[: own.numel()])


@pytest.mark.parametrize("axes", [None, {"node": 2, "local": 2}])
def test_sixteen_bits_travel_and_thirty_two_are_added(pool: Pool, axes) -> None:
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


def test_the_parts_of_all_shapes_make_the_world() -> None:
    assert all(math.prod(axes.values()) == size for size, found in SHAPES.items() for axes in found)
