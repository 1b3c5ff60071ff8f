"""Starting the ranks of a model on this machine, and ending them.

Each rank is a Python of its own, ``python -m gulliver.serve.ranks``: a script needs no guard around
its main part, as it would for processes that import it. What a rank must know comes through its
standard input. It connects to the controller by a socket of this machine with a secret, and to the
other ranks by gloo on the loopback interface. A rank ends when its connection to the controller
does, however the controller ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from gulliver.comm import listen_on_localhost
from gulliver.errors import GulliverError
from gulliver.serve._load import check_memory
from gulliver.serve._memory import BLOCK
from gulliver.serve._ways import ModelOptions
from gulliver.serve.ranks._layout import Layout, plan_ranks
from gulliver.serve.ranks._runner import RanksRunner

ENDING_S = 5.0
"""Longest wait for a rank to end by itself."""
START_S = 600.0
"""Longest time for the ranks to start and load."""


@dataclass(frozen=True)
class RankOrder:
    """What a rank receives as it starts."""

    address: str
    secret: bytes
    # File through which the ranks meet.
    store: str
    rank: int
    folder: Path
    options: ModelOptions
    # Ranks of the model, and what each has.
    layout: Layout
    # Sequences that run at a time.
    sequences: int
    # Threads that it computes with.
    threads: int
    # Where Python looks for modules.
    paths: list[str]


def start_ranks(
    folder: Path, options: ModelOptions, sequences: int, max_in_flight: int | None = None
) -> RanksRunner:
    """Starts the ranks of a folder's model, which `check_options` has looked at."""
    if options.limit is None:
        check_memory(folder, options.dtype, options.quantize)
    layout = plan_ranks(folder, options.dtype, options.tensor, options.pipeline, options.speeds)
    return Processes(folder, options, layout, sequences, max_in_flight).runner()


class Processes:
    """The ranks as processes of this machine."""

    def __init__(
        self,
        folder: Path,
        options: ModelOptions,
        layout: Layout,
        sequences: int,
        max_in_flight: int | None,
    ) -> None:
        self._given = folder, options, layout, sequences, max_in_flight
        self._layout, self._options, self._max_in_flight = layout, options, max_in_flight
        self._meeting = tempfile.TemporaryDirectory(prefix="gulliver-ranks-")
        self._secret = secrets.token_bytes(32)
        self.links: Sequence[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False
        listener = Listener(str(Path(self._meeting.name) / "controller"), authkey=self._secret)
        try:
            self._start(listener, folder, sequences)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def runner(self) -> RanksRunner:
        """Waits for the ranks to load."""
        return RanksRunner(
            *(self, self._layout, self._options.patience_s, START_S, BLOCK, self._max_in_flight)
        )

    def _start(self, listener: Listener, folder: Path, sequences: int) -> None:
        count = self._layout.ranks
        threads = max(1, (os.cpu_count() or 1) // count)
        listen_on_localhost()
        for rank in range(count):
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "gulliver.serve.ranks"],
                    stdin=subprocess.PIPE,
                    env=environment,
                    # Ctrl-C is the controller's: it ends them.
                    start_new_session=True,
                )
            )
            order = RankOrder(
                *(str(listener.address), self._secret, str(Path(self._meeting.name) / "store")),
                *(rank, folder.resolve(), self._options, self._layout, sequences, threads),
                [path for path in sys.path if path],
            )
            entry = self._processes[-1].stdin
            assert entry is not None
            with contextlib.suppress(BrokenPipeError):
                pickle.dump(order.paths, entry)
                pickle.dump(order, entry)
                entry.close()
        found: dict[int, Connection] = {}
        while len(found) < count:
            link = self._accepted(listener, [r for r in range(count) if r not in found])
            found[link.recv()] = link
        self.links = [found[rank] for rank in range(count)]

    def _accepted(self, listener: Listener, missing: Sequence[int]) -> Connection:
        """Waits for one rank to connect."""
        found: list[Connection] = []

        def accept() -> None:
            with contextlib.suppress(OSError, EOFError):
                found.append(listener.accept())

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            dead = next((r for r in missing if self._processes[r].poll() is not None), None)
            if dead is not None and not found:
                raise GulliverError(
                    f"{self._layout.named(dead)} {self.fate(dead)} as it started: its error stands "
                    "above"
                )
        if not found:
            raise GulliverError("a rank could not connect to the controller")
        return found[0]

    def fate(self, rank: int) -> str:
        """Describes how a rank ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(ENDING_S)
        code = self._processes[rank].returncode
        if code is None:
            return "has closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the ranks: they are asked to, and killed where they do not."""
        if self._closed:
            return
        self._closed = True
        for link in self.links:
            with contextlib.suppress(OSError):
                link.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S if self.links else 0.1)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._meeting.cleanup()

    def restarted(self) -> RanksRunner:
        """Starts other ranks in the place of these."""
        self.close()
        return Processes(*self._given).runner()


def serve_rank(order: Any) -> None:
    """Runs a rank: loads its part and works until the controller ends it."""
    import torch
    import torch.distributed as dist

    from gulliver.comm import World, adopt_world
    from gulliver.serve.ranks._serving import serve

    link = Client(order.address, authkey=order.secret)
    link.send(order.rank)
    torch.set_num_threads(order.threads)
    count = order.layout.ranks
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(order.store, count),
        rank=order.rank,
        world_size=count,
        # The controller decides who is late: this is for ranks that it could not end.
        timeout=timedelta(seconds=START_S),
    )
    adopt_world(World(order.rank, count, order.rank, torch.device("cpu")))
    serve(link, order.folder, order.options, order.layout, order.rank, order.sequences, BLOCK)
    os._exit(0)
