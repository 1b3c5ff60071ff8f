"""Worlds without processes: threads, fake and local tensors, on the torch at hand."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gulliver import _compat
from gulliver.comm import World, all_reduce, group_rank
from gulliver.comm.collectives import group_size
from tests.worlds import fake_world, local_tensors, run_threads


def _ring_of_sums(world: World) -> list[float]:
    total = torch.tensor([1.0 + world.rank, world.size])
    all_reduce(total, "mean")
    return [*total.tolist(), group_rank(), group_size()]


def test_threaded_groups_compute_true_values_in_one_process() -> None:
    assert run_threads(_ring_of_sums, 4) == [[2.5, 4.0, rank, 4] for rank in range(4)]
    assert not dist.is_initialized()


def test_a_fake_world_has_any_size_and_leaves_values_alone() -> None:
    with fake_world(rank=7, size=1024) as world:
        assert (group_rank(), group_size(), world.size) == (7, 1024, 1024)
        tensor = torch.ones(3)
        all_reduce(tensor)
        assert torch.equal(tensor, torch.ones(3))
    assert not dist.is_initialized()


def test_local_tensors_hold_the_values_of_all_ranks() -> None:
    with local_tensors(3):
        tensor = _compat.map_ranks(lambda rank: torch.full((2,), float(rank)))
        dist.all_reduce(tensor)
        assert torch.equal(tensor.reconcile(), torch.full((2,), 3.0))  # type: ignore[attr-defined]
    assert not dist.is_initialized()
