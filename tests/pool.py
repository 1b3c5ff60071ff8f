"""A pooled world for tests: workers that are started once and fed with functions.

The workers are forked from a clean server that has imported torch and never run it: a world of
four costs a fraction of a second once, and a call costs a fresh gloo group (tens of milliseconds).
A call that passes its deadline dumps the stacks of its workers and fails; a worker that dies is
named; in both cases the pool is built anew, and also when workers keep threads of old groups.

Read `Pool.run`, `Pool._collect`, then the worker's side from `_serve`. Threads, fake and local
tensor worlds, for what needs no processes, are in `tests/worlds.py`.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.patience import Deadline, patient

DEADLINE_S = 60.0
MANY_THREADS = 40
"""Of backends, in a worker that has left its world: so many belong to groups of worlds before."""

PRELOADED = (
    "torch",
    "gulliver.checkpoint",
    "gulliver.booster",
    "pytest",
    "hypothesis",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)
"""Modules that most tests import: a worker finds them there. What is not installed is left out."""

PRELOADED_FOR_MANY = (
    "gulliver.video",
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "peft",
    "transformers.trainer",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "torch._inductor.compile_fx",
    "av",
    "lightning.pytorch",
)
"""Modules that some tests import, each seconds of every worker: for runs of many files."""

MANY_FILES = 12
"""A run of more files than these is one of many."""

GRACE_S = 5.0


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class WorkerLost(AssertionError):
    """A worker ended while it was running a function."""


class DeadlinePassed(AssertionError):
    """A call took too long; the message holds the stacks of its workers."""


def start_server(many: bool = False) -> None:
    """Starts the clean server, once: a new program, whatever this process has run.

    Args:
        many: whether files of many kinds run, so that it is worth importing what few need.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(PRELOADED_FOR_MANY if many else ())])
    forkserver.ensure_running()


@dataclass(frozen=True)
class Worker:
    """A process, the pipe to it, and the file that its stacks are dumped to."""

    process: BaseProcess
    connection: Connection
    stacks: Path

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid


class Pool:
    """Persistent workers that run functions as the ranks of a fresh world."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._workers: list[Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gulliver-pool-")
        self._calls = 0
        self._interrupted = False

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``function(world, *args, **kwargs)`` on every rank of a fresh world.

        Args:
            function: found by its name in a module, so not a lambda.
            world_size: ranks; a world of one has no process group.
            args: pickled, as is the result.
            deadline_s: seconds after which the call fails, on an idle core of 2.1 GHz.

        Returns:
            The results in the order of the ranks.

        Raises:
            Exception: what the first failing rank raised, its traceback as the cause.
            WorkerLost: a worker ended.
            DeadlinePassed: the call was not done in time.
        """
        if self._interrupted:
            # A deadline of the test ended the call before: its answers are still to come.
            self._kill()
        self._interrupted = True
        self._grow(world_size)
        self._calls += 1
        # A file, because a store over TCP asks the name server about each of its clients.
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for rank, worker in enumerate(self._workers[:world_size]):
            call = (rank, world_size, store, function, args, kwargs)
            worker.connection.send_bytes(pickle.dumps(call))
        return self._collect(world_size, deadline_s)

    def close(self) -> None:
        """Ends the workers; those that are idle may write their coverage first."""
        for worker in self._workers:
            worker.connection.close()
        end = time.monotonic() + GRACE_S
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
        self._kill()

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            stacks = Path(self._folder.name) / f"stacks-{self._calls}-{len(self._workers)}"
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, str(stacks)), daemon=True)
            process.start()
            there.close()
            self._workers.append(Worker(process, here, stacks))

    def _collect(self, world_size: int, deadline_s: float) -> list[Any]:
        pending: dict[Any, int] = {self._workers[r].connection: r for r in range(world_size)}
        results: dict[int, Any] = {}
        failures: list[BaseException] = []
        due, stale = Deadline(deadline_s), False
        while pending and (left := due.left()) > 0:
            for connection in wait(list(pending), timeout=left):
                rank = pending.pop(connection)
                value, failure, burdened = self._receive(rank)
                results[rank] = value
                stale |= burdened
                if failure is not None:
                    # The others cannot finish without it: they get a moment to fail as well.
                    due = due if failures else Deadline(GRACE_S)
                    failures.append(failure)
        stacks = self._dump(list(pending.values())) if pending else ""
        self._interrupted = False
        # What broke is the failure; that the connection to it broke too is only its consequence.
        failure = min(failures, key=_consequence, default=None)
        if pending or isinstance(failure, WorkerLost):
            self._kill()
        if failure is not None:
            for other in failures:
                if other is not failure:
                    failure.add_note(f"another rank: {other}")
            if stacks:
                failure.add_note(f"meanwhile the other ranks hung:\n{stacks}")
            raise failure
        if pending:
            raise DeadlinePassed(f"not done after {deadline_s} s\n{stacks}")
        if stale:
            self.close()
        return [results[rank] for rank in range(world_size)]

    def _receive(self, rank: int) -> tuple[Any, BaseException | None, bool]:
        """A rank's result, its failure, and whether it keeps threads of worlds before."""
        worker = self._workers[rank]
        try:
            value, packed, stale = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.join(GRACE_S)
            lost = WorkerLost(f"rank {rank} ended with {_end(worker.process.exitcode)}")
            return None, lost, False
        if packed is None:
            return value, None, stale
        error, trace = packed
        error.__cause__ = RemoteTraceback(f"rank {rank}: {trace}")
        return None, error, stale

    def _dump(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank].pid, signal.SIGUSR1)
        end = time.monotonic() + GRACE_S
        return "\n".join(
            f"--- rank {rank} ---\n{_read_when_quiet(self._workers[rank].stacks, end)}"
            for rank in ranks
        )


def _end(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _consequence(error: BaseException) -> int:
    """0 for a death, 1 for an error of the function's own, 2 for a connection that broke."""
    if isinstance(error, WorkerLost):
        return 0
    broken = r"connection (closed|reset|refused)|broken pipe|gloo"
    return 2 if isinstance(error, RuntimeError) and re.search(broken, str(error), re.I) else 1


def _read_when_quiet(path: Path, end: float) -> str:
    """The text of a file that has stopped growing."""
    size = -1
    while time.monotonic() < end and (path.stat().st_size != size or size == 0):
        size = path.stat().st_size
        time.sleep(0.05)
    return path.read_text() or "(no stacks: the process is stopped)"


def _serve(connection: Connection, stacks: str) -> None:
    """A worker: runs functions until the pool closes the connection."""
    import torch

    gc.freeze()  # what the server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                call = connection.recv_bytes()
            except (EOFError, OSError):
                _leave()
                return
            connection.send_bytes(_answer(call))


def _answer(call: bytes) -> bytes:
    """Runs a call; its result or its error with the traceback, and what `_leave` says."""
    # The last world was kept until now: to leave it while slower ranks still work would fail them.
    stale = _leave()
    try:
        answer = pickle.dumps((_run(*pickle.loads(call)), None, stale))
    except BaseException as error:
        # To leave at once makes the others' collectives fail instead of waiting.
        _leave()
        answer = pickle.dumps((None, _packed(error), stale))
    return answer


def _run(
    rank: int, size: int, store: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    import torch
    import torch.distributed as dist

    from gulliver.comm import World
    from gulliver.comm.world import adopt_world

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=patient(DEADLINE_S)),
        )
        # gloo hangs, in this world or the next, when a rank leaves while another still connects.
        dist.barrier()
    world = World(rank, size, rank, torch.device("cpu"))
    adopt_world(world)
    return function(world, *args, **kwargs)


def _leave() -> bool:
    """Leaves the world; whether threads of groups stay that nothing can end but a new process."""
    import torch.distributed as dist

    from gulliver.comm.world import adopt_world

    adopt_world(None)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not _has_many_threads():
        return False
    # Models hold their groups in circles, and every group three threads.
    gc.collect()
    return _has_many_threads()


def _has_many_threads() -> bool:
    return threading.active_count() < len(os.listdir("/proc/self/task")) - MANY_THREADS


def _packed(error: BaseException) -> tuple[BaseException, str]:
    """The error, or what can be said of one that cannot be pickled, and its traceback."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return error, trace
