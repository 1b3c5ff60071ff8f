"""Starting ranks on this machine through torch's elastic agent, the engine of torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

from gulliver.errors import GulliverError


def default_ranks() -> int:
    """One rank per GPU, or one."""
    import torch

    return max(1, torch.cuda.device_count())


_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""What ends a rank that neither ended by itself nor was ended because of another."""


def under_launcher() -> bool:
    """Whether this process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(module: str, arguments: list[str], ranks: int) -> int:
    """Runs ``python -m module arguments`` on `ranks` ranks and waits for them."""
    # SIGTERM and SIGINT reach the ranks, which have time to save. Nothing listens on an interface
    # but localhost, unless the environment names another one (see `listen_on_localhost`).
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from gulliver.comm._rendezvous import LOCALHOST, listen_on_localhost, register

    # One line of our own says what failed; the agent's tracebacks would bury it.
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
        # A rank that was killed makes others fail, which may be seen first.
        killed = {r: f for r, f in failed.failures.items() if -f.exitcode in _FROM_OUTSIDE}
        if killed:
            rank, failure = min(killed.items(), key=lambda item: item[1].timestamp)
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise GulliverError(
            f"rank {rank} was killed by {name}: the other ranks were ended"
        ) from None
    return 0
