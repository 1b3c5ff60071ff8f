"""Conversions between layouts: least cost against brute force, values against whole tensors."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import described
from gulliver.layout import plan_conversion
from gulliver.layout.conversion import convert, sharding_of
from gulliver.solve.conversion import (
    box_elements,
    extent,
)
from tests.pool import Pool
from tests.solve.solver_cases import conversion_case

HERE = described("cpu-loopback")


def layouts(axes: int, dims: int, terms: bool = True) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    return list(itertools.product([*kinds, Partial()] if terms else kinds, repeat=axes))


def test_conversion_is_cheapest_by_exhaustive_search() -> None:
    for seed in range(12):
        conversion_case(seed)


def test_extents_are_those_of_chunks() -> None:
    for length, outer, inner in itertools.product(range(12), (1, 2, 3, 4), (1, 2, 3)):
        taken: list[int] = []
        for i, j in itertools.product(range(outer), range(inner)):
            parts = torch.arange(length).chunk(outer)
            inside = parts[i].chunk(inner) if i < len(parts) else ()
            expected = inside[j].tolist() if j < len(inside) else []
            low, high = extent(length, (outer, inner), (i, j))
            assert list(range(low, high)) == expected
            taken += expected
        assert taken == list(range(length))


def test_memory_bound_is_kept_or_error_names_minimum() -> None:
    shape, mesh = (64, 64), (2, 4)
    ends = [Shard(0), Shard(0)], [Shard(1), Replicate()]
    cluster = described("8xh100-infiniband").resized(8)
    free = plan_conversion(shape, 4, mesh, *ends, cluster)
    with pytest.raises(GulliverError, match="would do") as error:
        plan_conversion(shape, 4, mesh, *ends, cluster, room=1024)
    assert "1.0 KiB" in str(error.value)
    least = box_elements(shape, mesh, sharding_of(ends[1], 2))
    assert free.peak_bytes >= 4 * least
    limited = plan_conversion(shape, 4, mesh, *ends, cluster, room=free.peak_bytes)
    assert limited.total == free.total


def test_slow_links_carry_what_is_small() -> None:
    cluster = described("8xh100-infiniband").resized(16)
    plan = plan_conversion(
        (1 << 14, 1 << 12), 2, (2, 8), [Partial(), Partial()], [Replicate()] * 2, cluster
    )
    reduced = [move.axes for move in plan.moves if move.kind in ("reduce", "scatter")]
    assert {axis for axes in reduced for axis in axes} == {0, 1}
    # One axis of terms only: each rank of the other, which has copies, takes a part across.
    parts = plan_conversion(
        (1 << 14, 1 << 12), 2, (2, 8), [Partial(), Replicate()], [Replicate()] * 2, cluster
    )
    assert [move.kind for move in parts.moves] == ["slice", "scatter", "gather"]
    assert parts.total < 0.8 * plan.total
    gathered = plan_conversion(
        (1 << 14, 1 << 12), 2, (2, 8), [Shard(0), Shard(0)], [Replicate()] * 2, cluster
    )
    assert [move.kind for move in gathered.moves] == ["gather"]
    assert gathered.moves[0].axes == (0, 1)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ([Shard(2)], [Replicate()], "has 2 dims"),
        ([Replicate()] * 2, [Replicate()], "2 placements, but the mesh has 1"),
        ([Partial("product")], [Replicate()], "product"),
        ([Partial("avg")], [Partial("sum")], "avg and sum"),
    ],
)
def test_unsupported_conversions_are_rejected(before, after, what) -> None:
    with pytest.raises(GulliverError, match=what):
        plan_conversion((4, 4), 4, (2,), before, after, described("cpu-loopback").resized(2))


def _tensor(whole: Tensor, mesh: DeviceMesh, placements, terms: Tensor) -> DTensor:
    """A DTensor of `whole`, made by torch; where it is partial, of terms that sum to it."""
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    local = distribute_tensor(whole, mesh, plain).to_local()
    other = distribute_tensor(terms, mesh, plain).to_local()
    here = mesh.get_coordinate()
    assert here is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            count = mesh.shape[axis]
            # The first has what the others leave.
            local = local - (count - 1) * other if here[axis] == 0 else other.clone()
            other = other * 0.5
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _pairs(world: World, sizes: tuple[int, ...], shape: tuple[int, ...], seed: int, count: int):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    torch.manual_seed(seed)
    whole, terms, weight = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    chosen = list(itertools.product(layouts(len(sizes), len(shape)), repeat=2))
    if count < len(chosen):
        chosen = random.Random(seed).sample(chosen, count)
    cluster = HERE.resized(world.size)
    errors = 0.0
    for before, after in chosen:
        tensor = _tensor(whole, mesh, before, terms).detach().requires_grad_()
        made = convert(tensor, after, cluster)
        assert made.placements == tuple(after)
        expected = distribute_tensor(
            whole, mesh, [Replicate() if isinstance(p, Partial) else p for p in after]
        )
        value = made.detach()
        if any(isinstance(p, Partial) for p in after):
            value = value.redistribute(mesh, expected.placements)
        assert value.to_local().shape == expected.to_local().shape
        errors = max([errors, *(value.to_local() - expected.to_local()).abs().flatten().tolist()])
        # Gradient: of a sum with weights, laid as torch lays what is sharded.
        plain = [Replicate() if isinstance(p, Partial) else p for p in before]
        made.backward(distribute_tensor(weight, mesh, expected.placements))
        grad = tensor.grad
        assert isinstance(grad, DTensor)
        assert grad.placements == tuple(plain)
        wanted = distribute_tensor(weight, mesh, plain).to_local()
        errors = max([errors, *(grad.to_local() - wanted).abs().flatten().tolist()])
    return len(chosen), errors


@pytest.mark.parametrize(
    ("sizes", "shape", "count"),
    [
        ((2, 2), (4, 8), 70),
        ((2, 2), (5, 3), 50),
        ((4,), (3, 6), 16),
        ((2, 2), (2, 3, 5), 20),
        ((2, 2), (3, 0), 30),
    ],
)
def test_values_and_gradients_are_those_of_whole_tensors(pool: Pool, sizes, shape, count) -> None:
    ranks = math.prod(sizes)
    for done, error in pool.run(_pairs, ranks, sizes, shape, 3, count):
        assert done == count
        assert error < 1e-12
