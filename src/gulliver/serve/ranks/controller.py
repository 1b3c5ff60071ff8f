"""`RanksRunner`: sends batches to ranks, collects logits, detects late and lost ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.comm.launcher import listen_on_localhost
from gulliver.errors import GulliverError
from gulliver.serve.batch import Batch, Facts, RunnerLost
from gulliver.serve.options import ModelOptions
from gulliver.serve.ranks.stage import Layout, plan_ranks
from gulliver.serve.ranks.worker import RankMessage
from gulliver.serve.weights import BLOCK, check_memory

GRACE_S = 1.0
"""Seconds to wait for other ranks' reports after a failure, because a rank's own error is more
informative than broken connections."""
BROKEN = ("connection closed", "connection reset", "broken pipe", "timed out", "gloo")


class RanksRunner:
    """Runs a model on several ranks."""

    def __init__(
        self,
        crew: Any,
        layout: Layout,
        timeout_s: float = 60.0,
        start_s: float = 600.0,
        block_size: int = 16,
        max_in_flight: int | None = None,
    ) -> None:
        self.layout, self._crew, self._timeout_s = layout, crew, timeout_s
        self._fixed = max_in_flight
        self._messages: queue.Queue[tuple[int, RankMessage | None]] = queue.Queue()
        self._out = [queue.SimpleQueue() for _ in range(layout.ranks)]
        self._logits: dict[int, Tensor] = {}
        self._done: dict[int, set[int]] = {}
        self._in_flight: deque[int] = deque()
        self._closed = False
        self._receiving, self._transmitting = (
            [
                threading.Thread(target=target, args=(rank, link), daemon=True)
                for rank, link in enumerate(crew.links)
            ]
            for target in (self._receive, self._transmit)
        )
        for thread in (*self._receiving, *self._transmitting):
            thread.start()
        try:
            sizes = self._all("sizes", start_s)
            blocks = min(one.blocks for one in sizes)
            vocabulary = max(one.vocabulary for one in sizes)
            self.facts = Facts(vocabulary, sizes[0].context, blocks, block_size)
            self._send(blocks)
            self._all("ready", start_s)
        except BaseException:
            self.close()
            raise

    @property
    def max_in_flight(self) -> int:
        """Batches to keep in flight: one per stage, and one being sampled."""
        # The stages are balanced and on one machine, so links take almost no time. More batches
        # would be smaller, and each of them reads all weights.
        return self._fixed or (1 if self.layout.stages == 1 else self.layout.stages + 1)

    def submit(self, batch: Batch) -> None:
        self._in_flight.append(batch.ticket)
        self._send(batch)

    def collect(self) -> Tensor:
        ticket = self._in_flight[0]
        while ticket not in self._logits:
            self._handle_next(self._timeout_s)
        self._in_flight.popleft()
        return self._logits.pop(ticket)

    def restarted(self) -> RanksRunner:
        """Ends the ranks and starts replacements with empty caches."""
        self.close()
        return self._crew.restarted()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for one in self._out:
                one.put(_END)
            # A rank that has stopped accepts no more messages, and is killed.
            _join(self._transmitting)
            # No thread reads a connection that is closed, as its descriptor may be reused.
            for link in self._crew.links:
                _hang_up(link)
            _join(self._receiving)
            self._crew.close()

    # Threads

    def _receive(self, rank: int, link: Any) -> None:
        # A pipe to a process that has stopped fills up, and would stop the controller too. So each
        # rank has a thread that sends and one that receives, and the controller waits on a queue,
        # with a timeout.
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._messages.put((rank, link.recv()))
        self._messages.put((rank, None))

    def _transmit(self, rank: int, link: Any) -> None:
        with contextlib.suppress(OSError):
            while (said := self._out[rank].get()) is not _END:
                link.send(said)
            link.send(None)

    # Messages of ranks

    def _send(self, value: Any) -> None:
        for one in self._out:
            one.put(value)

    def _all(self, what: str, timeout_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < self.layout.ranks:
            missing = next(r for r in range(self.layout.ranks) if r not in found)
            rank, message = self._next(timeout_s, self.layout.named(missing))
            if message.what == what:
                found[rank] = message.value
        return [found[rank] for rank in range(self.layout.ranks)]

    def _handle_next(self, timeout_s: float) -> None:
        rank, message = self._next(timeout_s)
        if message.what == "logits":
            shape, content = message.value
            array = np.frombuffer(bytearray(content), dtype=np.float32)
            self._logits[message.ticket] = torch.from_numpy(array).view(shape)
        elif message.what == "done":
            self._note(rank, message)

    def _next(self, timeout_s: float, late: str | None = None) -> tuple[int, RankMessage]:
        try:
            rank, message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise RunnerLost(
                f"{late or self._late()} has not responded for {timeout_s:g} s: it is too slow, "
                "stopped or disconnected"
            ) from None
        if message is None or message.what == "failed":
            raise RunnerLost(self._failure(rank, message))
        return rank, message

    def _failure(self, rank: int, message: RankMessage | None) -> str:
        """Describes the first failure, preferring a rank's own error to a broken connection."""
        found = [(rank, message)]
        end = time.monotonic() + GRACE_S
        while (left := end - time.monotonic()) > 0 and _rank(*found[-1]) > 0:
            with contextlib.suppress(queue.Empty):
                other, word = self._messages.get(timeout=left)
                if word is None or word.what == "failed":
                    found.append((other, word))
        rank, message = min(found, key=lambda one: _rank(*one))
        if message is None:
            return f"{self.layout.named(rank)} {self._crew.fate(rank)}"
        return f"{self.layout.named(rank)} failed: {message.value}"

    def _note(self, rank: int, message: RankMessage) -> None:
        ranks = self._done.setdefault(message.ticket, set())
        ranks.add(rank)
        if len(ranks) == self.layout.ranks:
            del self._done[message.ticket]

    def _late(self) -> str:
        """Names the first rank that has not finished the oldest batch."""
        ticket = self._in_flight[0]
        done = self._done.get(ticket, set())
        rank = next((r for r in range(self.layout.ranks) if r not in done), self.layout.ranks - 1)
        return f"{self.layout.named(rank)}, which has batch {ticket},"


_END = object()


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _hang_up(link: Any) -> None:
    """Shuts down a connection, which wakes its readers, without closing it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _rank(rank: int, message: RankMessage | None) -> int:
    """Priority of a failure: 0 is a rank's own error, 1 a dead rank, 2 a broken connection."""
    del rank
    if message is None:
        return 1
    text = str(message.value).lower()
    return 2 if any(word in text for word in BROKEN) else 0


# Starting the ranks of a model on this machine, and ending them.
#
# Each rank is a separate ``python -m gulliver.serve.ranks``, so a script needs no ``__main__``
# guard, as it would for processes that import it. A rank reads its settings from standard input. It
# connects to the controller through a local socket with a secret, and to the other ranks through
# gloo on the loopback interface. A rank ends when its connection to the controller is closed, even
# if the controller was killed.


ENDING_S = 5.0
"""Seconds to wait for a rank to end."""
START_S = 600.0
"""Seconds to wait for the ranks to start and load."""


@dataclass(frozen=True)
class RankOrder:
    """Settings that a rank receives at startup."""

    address: str
    secret: bytes
    # File for the rendezvous of the ranks.
    store: str
    rank: int
    folder: Path
    options: ModelOptions
    # Ranks of the model, and the stage and shard of each.
    layout: Layout
    # Number of concurrent sequences.
    sequences: int
    # Number of compute threads.
    threads: int
    # Module search path.
    paths: list[str]


def start_ranks(folder: Path, options: ModelOptions, sequences: int) -> RanksRunner:
    if options.limit is None:
        check_memory(folder, options.dtype, options.quantize)
    layout = plan_ranks(folder, options.dtype, options.tp_size, options.pp_size, options.speeds)
    return Processes(folder, options, layout, sequences).runner()


class Processes:
    """The ranks as processes on this machine."""

    def __init__(self, folder: Path, options: ModelOptions, layout: Layout, sequences: int) -> None:
        self._given = folder, options, layout, sequences
        self._layout, self._options = layout, options
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
        return RanksRunner(self, self._layout, self._options.patience_s, START_S, BLOCK)

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
                    # Only the controller handles Ctrl-C, and ends the ranks.
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
                    f"{self._layout.named(dead)} {self.fate(dead)} during startup: see its error "
                    "above"
                )
        if not found:
            raise GulliverError("a rank could not connect to the controller")
        return found[0]

    def fate(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(ENDING_S)
        code = self._processes[rank].returncode
        if code is None:
            return "has closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Asks the ranks to end, and kills those that do not."""
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
        self.close()
        return Processes(*self._given).runner()


def serve_rank(order: Any) -> None:
    """Runs a rank: loads its shard and works until the controller ends it."""
    import torch
    import torch.distributed as dist

    from gulliver.comm.world import World, adopt_world
    from gulliver.serve.ranks.worker import serve

    link = Client(order.address, authkey=order.secret)
    link.send(order.rank)
    torch.set_num_threads(order.threads)
    count = order.layout.ranks
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(order.store, count),
        rank=order.rank,
        world_size=count,
        # The controller detects late ranks; this timeout is for ranks that it could not end.
        timeout=timedelta(seconds=START_S),
    )
    adopt_world(World(order.rank, count, order.rank, torch.device("cpu")))
    serve(link, order.folder, order.options, order.layout, order.rank, order.sequences, BLOCK)
    os._exit(0)
