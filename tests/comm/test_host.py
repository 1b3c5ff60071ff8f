"""Ranks that read each other's memory: the bits of messages, and lost ranks are named."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor

from gulliver.comm import World, all_gather, all_reduce, reduce_scatter
from gulliver.comm.host import host_team, open_host_team
from gulliver.comm.watchdog import ANY
from tests.comm.test_comm import _start
from tests.patience import patient
from tests.pool import Pool

pytest.importorskip("gulliver.comm._host")
SIZES = (16, 100_003)
"""Elements of a part: fewer than a block, and no multiple of one."""
SUMS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),  # by messages
]


def _terms(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _collected(rank: int, size: int) -> list[Tensor]:
    found = []
    for dtype, wide in SUMS:
        for count in SIZES:
            whole = _terms(rank, count * size, dtype)
            for op in ("sum", "mean"):
                part = torch.empty(count, dtype=wide)
                # Twice at a time: operations may not take each other's tensors.
                again = torch.empty(count, dtype=wide)
                handles = [
                    reduce_scatter(p, whole, op, async_op=True, accumulate_dtype=wide)
                    for p in (part, again)
                ]
                for handle in handles:
                    handle.wait()
                assert torch.equal(part, again)
                found.append(part)
            if dtype == wide:
                inside = whole.clone()
                mine = inside[rank * count : (rank + 1) * count]
                reduce_scatter(mine, inside, "mean")
                total = whole.clone()
                all_reduce(total, "mean", async_op=True).wait()
                found += [mine.clone(), total]
            gathered = torch.empty(count * size, dtype=dtype)
            all_gather(gathered, whole[:count].contiguous())
            found.append(gathered)
    for op in ("sum", "mean", "max"):
        small = _terms(rank, 77, torch.float32)
        all_reduce(small, op)
        found.append(small)
    votes = _terms(rank, 88, torch.float32).gt(0).to(torch.uint8)
    all_reduce(votes, "max")
    return [*found, votes]


def _both_ways(world: World) -> tuple[str, bool, list[Tensor], list[Tensor], list[Tensor]]:
    messages = _collected(world.rank, world.size)
    problem = open_host_team(None)
    taken = host_team(None) is not None
    return problem, taken, messages, *(_collected(world.rank, world.size) for _ in range(2))


@pytest.mark.parametrize("size", [2, 3])
def test_results_have_the_bits_of_messages_in_every_run(pool: Pool, size: int) -> None:
    for problem, taken, messages, *runs in pool.run(_both_ways, size):
        if problem.startswith("reading is refused"):
            pytest.skip(problem)
        assert taken, problem
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(messages, run, strict=True))


def test_sums_are_those_of_one_process_in_the_order_of_ranks(pool: Pool) -> None:
    size, count = 3, SIZES[1]
    terms = [_terms(rank, count * size, torch.float32) for rank in range(size)]
    total = (terms[0] + terms[1]) + terms[2]
    for rank, (*_, run) in enumerate(pool.run(_both_ways, size)):
        mine = slice(rank * count, (rank + 1) * count)
        # The five results of the smaller size stand before.
        assert torch.equal(run[5], total[mine])
        assert torch.equal(run[6], (total / size)[mine])


def _several(world: World) -> list[tuple[Tensor, Tensor]]:
    found = []
    open_host_team(None)
    team = host_team(None)
    for dtype, wide in SUMS[:3] if team is not None else ():
        flat, size = _terms(world.rank, 264_000, dtype), 264_032
        # One run ends within a block, one is missing on the second rank, and there are gaps.
        last = flat[132_000:] if world.rank == 0 else None
        runs = [(0, flat[:7], 7), (16, flat[7:132_000], 132_009), (132_016, last, 264_016)]
        whole = torch.zeros(size, dtype=dtype)
        for start, tensor, end in runs:
            if tensor is not None:
                whole[start:end] = tensor
        part = torch.empty(size // world.size, dtype=wide)
        expected = torch.empty_like(part)
        reduce_scatter(expected, whole, "mean", accumulate_dtype=wide)
        team.reduce_terms(part, runs, size, dtype, ANY).wait()
        found.append((part, expected))
    return found


def test_terms_in_several_tensors_are_reduced_like_one(pool: Pool) -> None:
    for found in pool.run(_several, 2):
        assert all(torch.equal(one, other) for one, other in found)


def _switched_off(world: World) -> tuple[str, bool]:
    os.environ["GULLIVER_SHARED_MEMORY"] = "off"
    try:
        group = torch.distributed.new_group(list(range(world.size)))
        return open_host_team(group), host_team(group) is None
    finally:
        del os.environ["GULLIVER_SHARED_MEMORY"]


def test_host_transfers_can_be_disabled_and_log_it(pool: Pool) -> None:
    for problem, absent in pool.run(_switched_off, 2):
        assert "GULLIVER_SHARED_MEMORY" in problem
        assert absent


ENDLESS = """
import sys, torch
from gulliver.comm import all_reduce, guard, init_world
from gulliver.comm.host import open_host_team
from gulliver.errors import GulliverError
init_world(silence_s=4)
assert not open_host_team(None)
print("running", flush=True)
whole = torch.ones(1 << 20)
try:
    with guard():
        while True:
            all_reduce(whole, "mean", async_op=True).wait()
except GulliverError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=str)
def test_a_rank_that_dies_or_hangs_is_named(how: signal.Signals) -> None:
    processes = _start(2, ENDLESS)
    try:
        processes[1].send_signal(how)
        _, errors = processes[0].communicate(timeout=patient(40))
        assert processes[0].returncode in (1, 3)
        assert "rank 1 was lost" in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
