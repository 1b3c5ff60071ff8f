"""The shaped network: what crosses it is what theory says, and nothing of it is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

import pytest
import torch
from benchmarks.netlab import Net, NetlabError, run, wire_bytes

from gulliver.comm import all_gather, all_reduce, barrier, init_world, shutdown

TOOLS = os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))
needs_root = pytest.mark.skipif(not TOOLS, reason="shaped networks need root, ip and tc")
NUMBERS = 2_000_000


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def gathered_bytes(count: int) -> tuple[int, int]:
    world = init_world()
    part = torch.full((count // world.size,), float(world.rank))
    whole = torch.empty(count)
    barrier()
    before = wire_bytes()
    all_gather(whole, part)
    barrier()  # what has arrived everywhere has been sent
    after = wire_bytes()
    assert whole.view(world.size, -1)[:, 0].tolist() == list(range(world.size))
    shutdown()
    return after[0] - before[0], after[1] - before[1]


def summed_ranks(threads: int) -> float:
    world = init_world()
    assert torch.get_num_threads() == threads
    total = torch.tensor([float(world.rank)])
    all_reduce(total)
    shutdown()
    return float(total)


def one_fails() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("something of rank one")


def one_never_returns() -> None:
    while os.environ["RANK"] == "1":
        time.sleep(1)


def seconds_of_tiny_messages() -> float:
    init_world()
    number = torch.ones(1)
    all_reduce(number)
    started = time.perf_counter()
    for _ in range(3):
        all_reduce(number)
    seconds = time.perf_counter() - started
    shutdown()
    return seconds / 3


@needs_root
@pytest.mark.parametrize(
    "shape", [{}, {"nodes": 2, "uplink": "1gbit"}, {"nodes": 2, "order": "round-robin"}]
)
def test_an_all_gather_sends_the_bytes_of_theory_over_each_link(shape: dict) -> None:
    with Net(4, "1gbit", **shape) as net:
        counted = run(gathered_bytes, net, NUMBERS)
    theory = 3 / 4 * NUMBERS * 4
    for sent, received in counted:
        assert sent == pytest.approx(theory, rel=0.03)
        assert received == pytest.approx(theory, rel=0.03)


@needs_root
def test_nothing_is_left_of_a_network() -> None:
    before = namespaces()
    with Net(2, "1gbit") as net:
        assert set(net.namespaces) <= namespaces()
    assert not set(net.namespaces) & namespaces()
    with pytest.raises(ZeroDivisionError), Net(2) as net:
        raise ZeroDivisionError
    assert namespaces() <= before


@needs_root
def test_a_message_between_nodes_takes_their_delay() -> None:
    with Net(2, nodes=2, delay_us=5000) as net:
        assert net.node_of(0) != net.node_of(1)
        # One way crosses two uplinks of 5 ms. That it may take longer is not looked at.
        assert min(run(seconds_of_tiny_messages, net)) >= 0.010


def test_ranks_on_loopback_make_a_world() -> None:
    assert run(summed_ranks, None, 2, ranks=3, threads=2) == [3.0, 3.0, 3.0]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(NetlabError, match=r"(?s)rank 1 failed.*in one_fails.*of rank one"):
        run(one_fails, None, ranks=2)


def test_ranks_that_do_not_finish_are_killed_and_named() -> None:
    with pytest.raises(NetlabError, match=r"ranks \[1\] did not finish"):
        run(one_never_returns, None, ranks=2, timeout_s=1)
