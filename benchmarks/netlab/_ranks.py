"""Starts a rank in each namespace of a network, or on loopback, and brings back what it returns."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.netlab._net import Net, NetlabError, enter
from gulliver.comm.world import adopt_world

PORT = 29417  # Of the store, in a namespace that nobody else is in
GRACE_S = 5.0
HEADERS = 66  # Bytes of a packet that are Ethernet's, IP's and TCP's, with TCP's time stamps
_PR_SET_PDEATHSIG = 1


def run(
    function: Callable[..., Any],
    net: Net | None,
    *args: Any,
    ranks: int | None = None,
    threads: int = 1,
    timeout_s: float = 900.0,
) -> list[Any]:
    """Calls ``function(*args)`` on every rank; `gulliver.comm.init_world` works inside.

    The ranks are forked, so this process must not have computed anything with torch before.

    Returns:
        What the ranks returned, in their order.
    """
    size = net.ranks if net else (ranks or 1)
    context = multiprocessing.get_context("fork")
    port = PORT if net else _free_port()
    pipes, processes = [], []
    finished = False
    try:
        for rank in range(size):
            near, far = context.Pipe(duplex=False)
            place = (far, rank, size, net, port, threads)
            process = context.Process(target=_rank, args=(place, function, args), daemon=True)
            process.start()
            far.close()
            pipes.append(near)
            processes.append(process)
        found = _collect(pipes, time.monotonic() + timeout_s)
        finished = True
        return found
    finally:
        for process in processes:
            process.join(GRACE_S if finished else 0)
            process.kill()
            process.join()


def wire_bytes(headers: bool = False) -> tuple[int, int]:
    """Bytes that this rank's link has sent and received.

    What is sent again after a loss counts again.
    """
    # /sys shows the namespace that it was mounted in: the thread's own table is the right one.
    if _namespaced:
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name.strip() == "eth0":
                fields = [int(field) for field in rest.split()]
                each = 0 if headers else HEADERS
                return fields[8] - each * fields[9], fields[0] - each * fields[1]
    raise NetlabError("there is no shaped link here to count bytes on")


_namespaced = False


def _rank(
    place: tuple[Connection, int, int, Net | None, int, int],
    function: Callable[..., Any],
    args: tuple,
) -> None:
    global _namespaced
    pipe, rank, size, net, port, threads = place
    # Ends with its parent, however that ends.
    ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        # The parent may be a process that has made a world of its own.
        adopt_world(None)
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
        torch.set_num_threads(threads)
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    try:
        message = pickle.dumps(result)
    except Exception:
        message = pickle.dumps((False, traceback.format_exc()))
    sys.stdout.flush()
    pipe.send_bytes(message)
    pipe.close()
    os._exit(0)  # without the end of the parent's life, which was copied here


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
