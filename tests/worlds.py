"""Worlds without processes, for the logic of distributed code.

`run_threads` has true values and true collectives but no point-to-point messages; `fake_world` has
any size and no values, for shapes and memory; `local_tensors` is one program that holds the values
of all ranks at once. None of them is torch's public interface: the symbols come from
`gulliver._compat`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gulliver._compat import fake_store, local_tensor_mode, threaded_groups
from gulliver.comm import World
from tests.patience import patient

DEADLINE_S = 30.0


def run_threads(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Runs ``function(world, *args)`` on ranks that are threads; `current_world` is not theirs.

    Returns:
        The results in the order of the ranks.

    Raises:
        Exception: what the first failing rank raised.
    """
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(rank: int, fail: Callable[[BaseException], None]) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            world = World(rank, world_size, rank, torch.device("cpu"))
            results[rank] = function(world, *args)
        except BaseException as error:
            failures.append(error)
            fail(error)
        finally:
            dist.destroy_process_group()

    with threaded_groups() as fail:
        ranks = range(world_size)
        threads = [threading.Thread(target=run, args=(r, fail), daemon=True) for r in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patient(DEADLINE_S))
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "the threads hang"
    return results


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """One rank of a world of any size whose collectives leave every tensor as it was."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=size)
    try:
        yield World(rank, size, rank, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@contextmanager
def local_tensors(size: int) -> Iterator[None]:
    """One program for all ranks: each tensor made inside holds one value per rank."""
    with fake_world(0, size), local_tensor_mode(size):
        yield
