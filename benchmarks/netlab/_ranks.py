"""Starts a rank in each namespace of a network, or on loopback, and brings back what it returns."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.netlab._net import Net, NetlabError, enter

PORT = 29417


def run(
    function: Callable[..., Any],
    net: Net | None,
    *args: Any,
    ranks: int | None = None,
    timeout_s: float = 900.0,
) -> list[Any]:
    """Calls ``function(*args)`` on every rank, one thread each; `init_world` works inside.

    The ranks are forked, so this process must not have computed anything with torch before.

    Args:
        function: of the module's top level.
        net: where the ranks live; None for loopback.
        args: for the function.
        ranks: how many on loopback.
        timeout_s: then all are killed.

    Returns:
        What the ranks returned, in their order.

    Raises:
        NetlabError: a rank failed or the time is up; says which, with its traceback.
    """
    size = net.ranks if net else (ranks or 1)
    context = multiprocessing.get_context("fork")
    port = PORT if net else _free_port()
    pipes, processes = [], []
    for rank in range(size):
        near, far = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(far, rank, size, net, port, function, args), daemon=True
        )
        process.start()
        far.close()
        pipes.append(near)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def wire_bytes() -> tuple[int, int]:
    """Bytes that this rank's link has sent and received, headers included."""
    folder = Path("/sys/class/net/eth0/statistics")
    if _namespaced:
        # /sys shows the namespace that it was mounted in: ask the process's own table instead.
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == "eth0":
                fields = rest.split()
                return int(fields[8]), int(fields[0])
    raise NetlabError(f"there is no shaped link here to count bytes on ({folder})")


_namespaced = False


def _rank(
    pipe: Connection,
    rank: int,
    size: int,
    net: Net | None,
    port: int,
    function: Callable[..., Any],
    args: tuple,
) -> None:
    global _namespaced
    try:
        if net is not None:
            enter(net.namespaces[rank])
            _namespaced = True
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR=net.addresses[0] if net else "127.0.0.1",
            MASTER_PORT=str(port),
            TORCH_CPP_LOG_LEVEL="ERROR",
        )
        torch.set_num_threads(1)
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    os._exit(0)


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in found]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = sorted(set(range(len(pipes))) - found.keys())
            raise NetlabError(f"ranks {missing} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise NetlabError(f"rank {rank} was killed") from None
            if not good:
                raise NetlabError(f"rank {rank} failed:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(pipes))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
