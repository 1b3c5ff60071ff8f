"""Launches the ranks of one machine, with a rendezvous store that listens on localhost only.

Torch's own rendezvous store listens on all interfaces, so any host on the network may read and
write it. Gloo and NCCL listen on the interface that environment variables name.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import uuid

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gulliver.errors import GulliverError

BACKEND = "gulliver-localhost"
LOCALHOST = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of the ranks that one agent starts."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._closed = run_id, False
        with socket.socket() as listener:
            listener.bind((LOCALHOST, 0))
            listener.listen(socket.SOMAXCONN)
            self._port = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                LOCALHOST,
                self._port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=os.dup(listener.fileno()),
            )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        assert self._store is not None
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOCALHOST, self._port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def make_rendezvous(parameters: RendezvousParameters) -> LocalRendezvous:
    return LocalRendezvous(parameters.run_id)


def register() -> str:
    """Registers the rendezvous handler with torch; returns its name."""
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    return BACKEND


def listen_on_localhost() -> None:
    """Restricts the backends of launched ranks to the loopback interface."""
    # ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are kept if they are already set.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


# Starts ranks on this machine with torch's elastic agent, the engine of torchrun.


def default_ranks() -> int:
    import torch

    return max(1, torch.cuda.device_count())


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""Signals from other processes and crashes, after which a rank has left no error message."""


def under_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(module: str, arguments: list[str], ranks: int) -> int:
    """Runs ``python -m module arguments`` on `ranks` ranks and waits for them."""
    # SIGTERM and SIGINT are passed to the ranks, which have time to save. Only localhost is
    # listened on, unless the environment names another interface (see `listen_on_localhost`).
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # One line of our own names the failure; the agent's tracebacks would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    listen_on_localhost()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=register(),
        rdzv_endpoint=LOCALHOST,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        # A killed rank makes others fail, which may be detected first.
        killed = {r: f for r, f in failed.failures.items() if -f.exitcode in _FROM_OUTSIDE}
        if killed:
            rank, failure = min(killed.items(), key=lambda item: item[1].timestamp)
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise GulliverError(
            f"rank {rank} was killed by {name}; the other ranks were stopped"
        ) from None
    return 0
