"""Programs in processes of their own that are forked, not started anew: nothing is imported again.

Like `subprocess.Popen`, but the process is forked from the clean server of `tests/pool.py`, which
has imported torch and run nothing: that saves the seconds of the imports in each of them. Functions
of `atexit` run at the end; what else an interpreter does there happens in true subprocesses alone.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TextIO

from tests.patience import patient

TWO_RANKS = """
import atexit, json, os, sys

if __name__ == "__main__":
    rows, ports = [], []
    for case in sys.argv[1:]:
        for rank in range(2):
            read, write = os.pipe()
            ask, tell = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(write, 2)
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                               "MASTER_PORT": os.read(ask, 9).decode(), "LOCAL_RANK": str(rank),
                               "TORCHELASTIC_USE_AGENT_STORE": "True"}
                try:
                    run(rank, case)
                except BaseException as error:
                    sys.last_type, sys.last_value = type(error), error
                    print(f"{type(error).__name__}: {error}", file=sys.stderr)
                atexit._run_exitfuncs()
                os._exit(0)
            os.close(write)
            rows.append((case, pid, read))
            ports.append(tell)
    # Stores have threads, and what is forked beside a thread may find a lock that nobody opens.
    stores = [torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
              for _ in sys.argv[1:]]
    for number, tell in enumerate(ports):
        os.write(tell, str(stores[number // 2].port).encode())
    found = {}
    for case, pid, read in rows:
        with open(read) as errors:
            said = errors.read()
        found.setdefault(case, []).append((os.waitpid(pid, 0)[1], said))
    print(json.dumps(found))
"""
"""End of a program that forks two ranks for each argument, which call `run(rank, argument)`.

It prints their exit codes and errors, by argument.
"""


class Program:
    """A function, found by its name in a module, in a forked process whose output is read here."""

    def __init__(
        self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> None:
        context = mp.get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ends = [write for _, write in pipes]
        # The server began with the environment of the session's begin.
        environment = {**os.environ, **(env or {})}
        call = ends, environment, os.getcwd(), function, args
        self._process = context.Process(target=_begin, args=call, daemon=False)
        self._process.start()
        self.stdout, self.stderr = (_reader(read) for read, _ in pipes)
        for end in ends:
            end.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Reads all that comes, and waits for the end."""
        said = ["", ""]

        def read(number: int, file: TextIO) -> None:
            said[number] = file.read()

        threads = [
            threading.Thread(target=read, args=pair, daemon=True)
            for pair in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(patient(10))
        return said[0], said[1]


def run_program(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Runs a function in a forked process to its end; ended after so many patient seconds."""
    program = Program(function, *args, env=env)
    try:
        out, errors = program.communicate(patient(timeout))
    finally:
        program.kill()
    assert program.returncode is not None
    return subprocess.CompletedProcess([], program.returncode, out, errors)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank; the store belongs to whoever started it, here to the test."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def text(source: str, *argv: str) -> None:
    """Runs a program given as its text, as `python -c` does."""
    sys.argv = ["-c", *argv]
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})


def module(name: str, *argv: str) -> None:
    """Runs a module, as `python -m` does."""
    sys.argv = [name, *argv]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def script(path: str, *argv: str) -> None:
    """Runs a file, as `python PATH` does."""
    sys.argv = [path, *argv]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def _reader(end: Connection) -> TextIO:
    number = os.dup(end.fileno())
    end.close()
    return open(number, encoding="utf-8", errors="replace")


def _begin(
    ends: Sequence[Connection],
    environment: Mapping[str, str],
    folder: str,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    # A group of its own, as for what it starts in turn: to be ended with it.
    os.setsid()
    for number, end in zip((1, 2), ends, strict=True):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    import torch

    gc.freeze()  # what the server has imported
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    try:
        function(*args)
    except Exception:
        # As an interpreter does, for what asks at the end what went wrong.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
