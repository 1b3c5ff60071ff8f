"""The world: a single process, or the ranks that torchrun started."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from gulliver.comm.host import close_host_teams, drain_host_teams
from gulliver.comm.steps import drain
from gulliver.comm.watchdog import (
    READING_S,
    Watchdog,
    current_watchdog,
    flight_recorder,
    guard,
    set_watchdog,
    together,
)
from gulliver.errors import GulliverError

COLLECTIVE_TIMEOUT_S = 600.0
LEAVING_S = 10.0
"""Maximum seconds to wait at exit for collectives in flight."""

SILENCE_S = 30.0
"""Seconds without a heartbeat after which a rank counts as lost."""


@dataclass(frozen=True)
class World:
    """This process, its rank and the world size."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


__all__ = ["World", "adopt_world", "current_world", "guard", "init_world", "shutdown", "together"]

_world: World | None = None


def init_world(
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    silence_s: float = SILENCE_S,
    device: torch.device | None = None,
) -> World:
    """Joins the world described by torchrun's environment variables, or creates a world of one.

    A world of one has no process group. Later calls return the same world. If another library has
    already created torch's process group, its ranks are the world.

    Args:
        timeout_s: maximum wait inside a collective.
        silence_s: seconds without a heartbeat after which a rank counts as lost and the others
            exit.
        device: device of this rank; None for the GPU of its local rank, or the CPU without GPUs.

    Raises:
        GulliverError: the environment is incomplete, or the ranks could not connect.
    """
    global _world
    if _world is not None:
        return _world
    joined = dist.is_initialized()  # by another library
    size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        _world = World(0, 1, 0, device or _device(0))
        return _world
    needed = ("MASTER_ADDR", "MASTER_PORT") if joined else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [n for n in needed if n not in os.environ]
    if missing:
        raise GulliverError(
            f"WORLD_SIZE is {size} but {', '.join(missing)} is not set: "
            "start the ranks with torchrun"
        )
    rank = dist.get_rank() if joined else int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device or _device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        if not joined:
            dist.init_process_group(
                backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
    except (RuntimeError, ValueError) as error:
        raise GulliverError(
            f"rank {rank} could not connect to the other {size - 1} ranks: {error}"
        ) from error
    flight_recorder.timeout_s = timeout_s
    atexit.register(_shutdown_at_exit)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Its own connection: the main one is locked while a collective waits on it.
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=silence_s))
    watchdog = Watchdog(dist.PrefixStore("gulliver/heartbeat", store), rank, size, silence_s)
    watchdog.start()
    set_watchdog(watchdog)
    _world = World(rank, size, local_rank, device)
    return _world


def adopt_world(world: World | None, watchdog: Watchdog | None = None) -> None:
    """Sets the current world to one that was already joined, for worker pools."""
    global _world
    _world = world
    set_watchdog(watchdog)
    flight_recorder.clear()


def current_world() -> World:
    """Returns the current world; joins it on the first call."""
    return _world or init_world()


def shutdown() -> None:
    """Leaves the world; other ranks do not report this rank as lost."""
    global _world
    if (watchdog := current_watchdog()) is not None:
        watchdog.stop()
    close_host_teams(LEAVING_S)
    if dist.is_initialized():
        dist.destroy_process_group()
    _world = None
    set_watchdog(None)
    flight_recorder.clear()


def _shutdown_at_exit() -> None:
    # The interpreter kills threads wherever they are. A thread inside a backend, watching or
    # finishing a gather that was not waited for, would crash the process; so all collectives are
    # drained first. After an error nothing is waited for, because messages in flight may never
    # arrive: other ranks are notified, and the process exits without ending its threads. It also
    # does so if a collective does not end, as after errors that were caught on some ranks only; its
    # status is then 1, because the program's work was not completed.
    error = getattr(sys, "last_type", None)
    if not dist.is_initialized() or (error is not None and hasattr(sys, "ps1")):
        return
    if error is not None:
        text = str(getattr(sys, "last_value", "")).splitlines() or [""]
        status = 130 if issubclass(error, KeyboardInterrupt) else 1
        _exit_failed(f"with {error.__name__}: {text[0][:200]}", status)
    until = time.monotonic() + LEAVING_S
    if not (drain(until) and drain_host_teams(until)):
        why = "at exit: other ranks did not join a collective that this rank started"
        print(f"gulliver: this rank failed {why}", file=sys.stderr)
        _exit_failed(why, 1)
    shutdown()


def _exit_failed(why: str, status: int) -> NoReturn:
    if (watchdog := current_watchdog()) is not None:
        watchdog.stop(why)
        if watchdog.rank == 0:
            time.sleep(READING_S)  # its process may keep the store that the others read this in
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise GulliverError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
            "start at most that many ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
