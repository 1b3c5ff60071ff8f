"""One test per name of `gulliver._compat`."""

from __future__ import annotations

import warnings

import torch

from gulliver import _compat
from gulliver.comm import World
from tests.pool import Pool
from tests.worlds import run_threads


def _flat(world: World) -> tuple[list[float], list[float], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gathered = torch.empty(2 * world.size)
        _compat.all_gather_flat(gathered, torch.full((2,), float(world.rank)))
        part = torch.empty(2)
        _compat.reduce_scatter_flat(part, torch.arange(2.0 * world.size))
    return gathered.tolist(), part.tolist(), sum(w.category is FutureWarning for w in caught)


def test_flat_collectives_work_without_a_warning(pool: Pool) -> None:
    for rank, (gathered, part, warned) in enumerate(pool.run(_flat, 2)):
        assert gathered == [0, 0, 1, 1]
        assert part == [4.0 * rank, 2 + 4.0 * rank]
        assert warned == 0


def _gloo(world: World) -> tuple[bool, bool]:
    cpu = torch.device("cpu")
    part = torch.distributed.new_group([0, 1])
    return _compat.is_gloo(None, cpu), _compat.is_gloo(part, cpu)


def test_gloo_is_known_from_groups_of_threads(pool: Pool) -> None:
    assert pool.run(_gloo, 2) == [(True, True)] * 2
    assert run_threads(_gloo, 2) == [(False, False)] * 2
