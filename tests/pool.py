"""A pooled world for tests: workers that are started once and fed with functions.

The workers are forked from a clean server that has imported torch and never run it, so that a world
of four costs a fraction of a second once, and a test costs a fresh gloo group. A call that passes
its deadline dumps the stacks of all its workers, fails, and the pool is built anew.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
GRACE_S = 5.0


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class WorkerLost(AssertionError):
    """A worker ended while it was running a function."""


class DeadlinePassed(AssertionError):
    """A call took too long; the message holds the stacks of its workers."""


def start_server() -> None:
    """Starts the clean server; call it before this process runs any torch operation."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "gulliver.comm"])
    from multiprocessing import forkserver

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forkserver.ensure_running()


class Pool:
    """Persistent workers that run functions as the ranks of a fresh world."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._workers: list[tuple[mp.process.BaseProcess, Connection, Path]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pool")
        self._store: Any = None
        self._calls = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``function(world, *args, **kwargs)`` on every rank of a fresh world.

        Returns:
            The results in the order of the ranks.

        Raises:
            Exception: what the first failing rank raised, its traceback as the cause.
            WorkerLost: a worker ended.
            DeadlinePassed: the call was not done in time.
        """
        self._grow(world_size)
        self._calls += 1
        call = (self._port(), self._calls, world_size, function, args, kwargs)
        for rank in range(world_size):
            self._workers[rank][1].send((rank, *call))
        return self._collect(world_size, deadline_s)

    def close(self) -> None:
        """Ends the workers."""
        for process, connection, _ in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid or 0 for process, _, _ in self._workers]

    def _port(self) -> int:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            stacks = Path(self._folder.name) / f"stacks-{self._calls}-{len(self._workers)}"
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, str(stacks)), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here, stacks))

    def _collect(self, world_size: int, deadline_s: float) -> list[Any]:
        pending = {self._workers[rank][1]: rank for rank in range(world_size)}
        results: dict[int, Any] = {}
        failure: BaseException | None = None
        end = time.monotonic() + deadline_s
        while pending and time.monotonic() < end:
            for connection in wait(list(pending), timeout=max(0.0, end - time.monotonic())):
                rank = pending.pop(connection)  # type: ignore[call-overload]
                error = self._receive(rank, results)
                if error is not None and failure is None:
                    # The others cannot finish without it: they get a moment to fail by themselves.
                    failure, end = error, min(end, time.monotonic() + GRACE_S)
        if pending:
            stacks = self._dump(list(pending.values()))
            failure = failure or DeadlinePassed(f"not done after {deadline_s} s\n{stacks}")
        if pending or isinstance(failure, WorkerLost):
            self.close()
        if failure is not None:
            raise failure
        return [results[rank] for rank in range(world_size)]

    def _receive(self, rank: int, results: dict[int, Any]) -> BaseException | None:
        try:
            results[rank], packed = self._workers[rank][1].recv()
        except (EOFError, ConnectionResetError):
            return self._lost(rank)
        if packed is None:
            return None
        error, trace = packed
        error.__cause__ = RemoteTraceback(trace)
        return error

    def _lost(self, rank: int) -> WorkerLost:
        process = self._workers[rank][0]
        process.join(GRACE_S)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerLost(f"rank {rank} ended with {how}")

    def _dump(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid or 0, signal.SIGUSR1)
        end, parts = time.monotonic() + GRACE_S, []
        for rank in ranks:
            path = self._workers[rank][2]
            # The stacks are complete when the file has stopped growing.
            size = -1
            while time.monotonic() < end and (not path.exists() or path.stat().st_size != size):
                size = path.stat().st_size if path.exists() else -1
                time.sleep(0.05)
            text = path.read_text() if path.exists() else "(no stacks)"
            parts.append(f"--- rank {rank} ---\n{text}")
        return "\n".join(parts)


def _serve(connection: Connection, stacks: str) -> None:
    """A worker: runs functions until the pool closes the connection."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        while True:
            try:
                task = connection.recv()
            except (EOFError, ConnectionResetError, OSError):
                return
            except BaseException as error:
                connection.send((None, _packed(error)))
                continue
            connection.send(_run_one(*task))


def _run_one(
    rank: int, port: int, call: int, size: int, function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, tuple[BaseException, str] | None]:
    import torch
    import torch.distributed as dist

    from gulliver.comm import World, adopt_world

    try:
        timeout = timedelta(seconds=30)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        group_store = dist.PrefixStore(f"call{call}", store)
        torch.manual_seed(0)
        if size > 1:
            dist.init_process_group(
                "gloo", store=group_store, rank=rank, world_size=size, timeout=timeout
            )
        world = World(rank, size, rank, torch.device("cpu"))
        adopt_world(world)
        return function(world, *args, **kwargs), None
    except BaseException as error:
        return None, _packed(error)
    finally:
        adopt_world(None)
        if dist.is_initialized():
            dist.destroy_process_group()


def _packed(error: BaseException) -> tuple[BaseException, str]:
    """The error, or what can be said of one that cannot be pickled, and its traceback."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, trace
