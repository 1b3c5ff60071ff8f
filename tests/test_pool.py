"""The pool of workers: fresh worlds, honest failures, no hanging."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gulliver.comm import World, all_reduce, current_world
from tests.pool import DeadlinePassed, Pool, RemoteTraceback, WorkerLost
from tests.worlds import run_threads

pytest_plugins = ["pytester"]


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """A pool that may be broken."""
    workers = Pool()
    yield workers
    workers.close()


def _sum_of_ranks(world: World, scale: float) -> float:
    total = torch.tensor([world.rank * scale])
    all_reduce(total)
    return float(total)


def _seen(world: World) -> tuple[World, bool, float]:
    return current_world(), dist.is_initialized(), float(torch.rand(()))


def _fail_on(world: World, rank: int) -> None:
    if world.rank == rank:
        raise KeyError("a named failure")
    dist.barrier()


def _fail_before_all_have_joined(world: World) -> None:
    raise KeyError(f"rank {world.rank}")


def _hang_here(world: World) -> None:
    if world.rank == 1:
        time.sleep(1000)
    dist.barrier()


def _die(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_every_call_has_its_world_and_its_seed(pool: Pool) -> None:
    first = pool.run(_seen, 2)
    assert first == pool.run(_seen, 2)
    assert [(world.rank, world.size, grouped) for world, grouped, _ in first] == [
        (0, 2, True),
        (1, 2, True),
    ]
    ((world, grouped, _),) = pool.run(_seen, 1)
    assert (world.size, grouped) == (1, False)


def test_an_exception_arrives_with_its_remote_traceback(pool: Pool) -> None:
    with pytest.raises(KeyError, match="a named failure") as caught:
        pool.run(_fail_on, 2, 1)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "_fail_on" in str(caught.value.__cause__)
    assert "rank 1" in str(caught.value.__cause__)
    assert pool.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]


def test_the_cause_is_raised_and_not_the_connections_that_broke(pool: Pool) -> None:
    for n in range(3):
        with pytest.raises(KeyError):
            pool.run(_fail_on, 3, n % 3)
        with pytest.raises(KeyError):
            pool.run(_fail_before_all_have_joined, 3)


def test_hanging_call_fails_with_stacks_and_pool_survives(own_pool: Pool) -> None:
    with pytest.raises(DeadlinePassed, match="_hang_here") as caught:
        own_pool.run(_hang_here, 2, deadline_s=1)
    assert "--- rank 0 ---" in str(caught.value)
    assert own_pool.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]


def test_killed_worker_is_named_and_pool_survives(own_pool: Pool) -> None:
    with pytest.raises(WorkerLost, match=r"rank 1 ended with SIGKILL"):
        own_pool.run(_die, 2)
    assert own_pool.run(_sum_of_ranks, 2, 1.0) == [1.0, 1.0]


def test_a_rank_that_is_a_thread_fails_for_all_of_them() -> None:
    with pytest.raises(KeyError, match="a named failure"):
        run_threads(_fail_on, 3, 1)
    assert run_threads(_sum_of_ranks, 3, 1.0) == [3.0, 3.0, 3.0]


def test_a_test_that_hangs_in_this_process_fails_at_its_deadline(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import pytest, time

        @pytest.mark.deadline(0.2)
        def test_hangs():
            time.sleep(1000)

        def test_after_it():
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*not done after 0.2 s*", "*in test_hangs"])
