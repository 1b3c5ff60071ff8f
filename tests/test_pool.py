"""The pool of workers: fresh worlds, honest failures, no hanging."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from gulliver.comm import World, all_reduce
from tests.pool import DeadlinePassed, Pool, RemoteTraceback, WorkerLost


def _sum_of_ranks(world: World, scale: float) -> float:
    total = torch.tensor([world.rank * scale])
    all_reduce(total)
    return float(total)


def _fail_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise KeyError("a named failure")
    dist.barrier()


def _hang_here(world: World) -> None:
    if world.rank == 1:
        time.sleep(1000)
    dist.barrier()


def _die(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_come_in_the_order_of_ranks_from_fresh_worlds(pool: Pool) -> None:
    for size in (1, 2, 4, 3):
        expected = [2.0 * sum(range(size))] * size
        assert pool.run(_sum_of_ranks, size, 2.0) == expected


def test_a_hundred_collective_tests_reuse_the_same_processes(pool: Pool) -> None:
    pool.run(_sum_of_ranks, 4, 1.0)
    before = pool.pids()
    assert all(pool.run(_sum_of_ranks, 2, float(n)) == [n, n] for n in range(100))
    assert pool.pids() == before


def test_an_exception_arrives_with_its_remote_traceback(pool: Pool) -> None:
    with pytest.raises(KeyError, match="a named failure") as caught:
        pool.run(_fail_on, 2, 1)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "_fail_on" in str(caught.value.__cause__)
    assert pool.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]


def test_a_hanging_call_fails_with_stacks_and_the_pool_lives_on() -> None:
    workers = Pool()
    with pytest.raises(DeadlinePassed, match="_hang_here"):
        workers.run(_hang_here, 2, deadline_s=3)
    assert workers.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]
    workers.close()


def test_a_killed_worker_is_named_and_the_pool_lives_on() -> None:
    workers = Pool()
    with pytest.raises((WorkerLost, RuntimeError), match=r"rank 1 ended with SIGKILL|closed|reset"):
        workers.run(_die, 2)
    assert workers.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]
    workers.close()
