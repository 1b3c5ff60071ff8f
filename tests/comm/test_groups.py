"""Process groups are shared, kept in bounds, and go when no rank uses them."""

from __future__ import annotations

import gc
import os

import torch

from gulliver.booster import Booster, HybridParallelPlugin
from gulliver.comm import World, all_reduce, make_axes
from gulliver.comm.groups import release_groups, shared_rank_group
from gulliver.parallel.sequence import SequencePlan, make_groups
from tests.hybrid.hybrid_models import batch, build
from tests.pool import Pool


def _boosts(world: World) -> list[int]:
    counts = []
    for number in range(8):
        shape = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
        plugin = HybridParallelPlugin(**(shape if number % 2 else {"tp_size": 2}), verbose=False)
        booster, model = Booster(plugin=plugin), build("llama", layers=1)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run = booster.execute_pipeline(
            iter([batch("llama", 2, seed=0, length=8)]), model, None, optimizer
        )
        optimizer.step()
        booster.close()
        del booster, model, optimizer, run
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_boosts_one_after_another_share_their_groups(pool: Pool) -> None:
    for counts in pool.run(_boosts, 2):
        assert max(counts[4:]) <= max(counts[:2]), f"threads after each boost: {counts}"


def _shares(world: World) -> None:
    axes, again = (make_axes({"outer": 2, "inner": 2}) for _ in range(2))
    assert axes.group("inner") is again.group("inner") is axes.rank_group("inner").process_group
    assert axes.rank_group("outer").process_group is not axes.rank_group("inner").process_group
    assert (
        make_groups(SequencePlan(inner=2)).inner.process_group
        is not axes.rank_group("inner").process_group
    )
    mesh = make_axes({"outer": 4, "inner": 1}).mesh
    assert mesh is not None
    assert mesh["inner"].size() == 1
    assert mesh["outer"].get_local_rank() == world.rank

    rows = [[1, 0], [2, 3]]
    rank_group = shared_rank_group(rows, "test")
    assert (rank_group.ranks, rank_group.rank) == (
        ((1, 0), (2, 3))[world.rank // 2],
        (1, 0, 0, 1)[world.rank],
    )
    first = rank_group.process_group
    # One rank lets go: the others use it still, so it stays for all.
    if world.rank == 0:
        del rank_group
    release_groups()
    release_groups()
    rank_group = shared_rank_group(rows, "test")
    assert rank_group.process_group is first
    total = torch.tensor([float(world.rank)])
    all_reduce(total, group=rank_group.process_group)
    assert total.item() == (1 if world.rank < 2 else 5)
    # Nobody has it: it goes where the ranks meet for the second time since it was asked for.
    del rank_group
    release_groups()
    assert shared_rank_group(rows, "test").process_group is first
    release_groups()
    release_groups()
    rank_group = shared_rank_group(rows, "test")
    assert rank_group.process_group is not first
    total = torch.tensor([1.0])
    all_reduce(total, group=rank_group.process_group)
    assert total.item() == 2
    # What was given out without a line may be in use for all that is known here.
    kept = axes.group("inner")
    del axes, again
    gc.collect()
    release_groups()
    release_groups()
    total = torch.tensor([1.0])
    all_reduce(total, group=kept)
    assert total.item() == 2


def test_a_group_goes_when_no_rank_uses_it(pool: Pool) -> None:
    pool.run(_shares, 4)
