"""How ranks of one machine meet: over a store that listens on localhost only.

torch's own ways to meet make a store that listens on all interfaces, where any host on the network
may read and write it. Gloo's and NCCL's listeners follow the interface that the environment names.
"""

from __future__ import annotations

import os
import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

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
        """The name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store and make none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """One agent, on this machine."""
        assert self._store is not None
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOCALHOST, self._port))

    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def set_closed(self) -> None:
        """Closes it."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Always 0."""
        return 0

    def get_run_id(self) -> str:
        """The name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Releases the store."""
        self._store = None
        return True


def make_rendezvous(parameters: RendezvousParameters) -> LocalRendezvous:
    """Factory for the agent; see `register`."""
    return LocalRendezvous(parameters.run_id)


def register() -> str:
    """Registers the rendezvous with torch's agents and returns its name."""
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    return BACKEND


def listen_on_localhost() -> None:
    """Restricts the backends of ranks started from here to the loopback interface."""
    # ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` that are set already are left alone.
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
