"""A process that imports torch once and forks ranks, so that they start in tenths of a second."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import selectors
import signal
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

# Modules, because packages import theirs lazily.
PRELOADED = (
    *("torch", "gulliver.booster.booster", "gulliver.booster.plugins"),
    *("gulliver.booster.checkpoint", "gulliver.schedule.live.training"),
)
DIE_WITH_PARENT = 1  # `PR_SET_PDEATHSIG` of prctl


class Forker:
    """State of the forking process: its ranks by process id."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.keys: dict[int, str] = {}
        self.rest = b""

    def run(self) -> None:
        """Serves requests until the input ends; a forked rank never returns."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        with selectors.DefaultSelector() as selector:
            for handle in (self.commands, read):
                selector.register(handle, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == read:
                        with suppress(BlockingIOError):
                            os.read(read, 4096)
                    elif not self._take():
                        self._end()
                        return
                self._reap_children()

    def _take(self) -> bool:
        data = os.read(self.commands, 1 << 16)
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "start" in command:
                self._fork(command["start"])
            else:
                for pid in [p for p, key in self.keys.items() if key == command["kill"]]:
                    kill_group(pid)
        return bool(data)

    def _fork(self, rank: dict[str, Any]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.keys[pid] = rank["key"]
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self.commands)
        os.close(self.answers)
        die_with_parent(parent)
        os.setsid()
        _run_rank(rank)

    def _reap_children(self) -> None:
        while self.keys:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            key = self.keys.pop(pid, None)
            # Processes started by the rank are killed with it.
            kill_group(pid)
            if key is not None:
                self._answer({"key": key, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, value: dict[str, Any]) -> None:
        os.write(self.answers, json.dumps(value).encode() + b"\n")

    def _end(self) -> None:
        for pid in self.keys:
            kill_group(pid)


def kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_rank(rank: dict[str, Any]) -> None:
    code = 1
    try:
        _redirect(rank["log"])
        os.environ.update(rank["environment"])
        os.chdir(rank["folder"])
        script, *arguments = rank["argv"]
        if rank["fresh"]:
            os.execv(sys.executable, [sys.executable, "-u", script, *arguments])
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        # An exit with an error notifies the other ranks; see `gulliver.comm`.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        traceback.print_exc()
    _leave(code)


def _leave(code: int) -> None:
    """Exits like an interpreter, but without freeing memory shared through the fork."""
    # On a busy machine freeing took more than ten seconds, for memory that the system reclaims
    # anyway.
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _redirect(log: str) -> None:
    empty = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(empty, 0)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(empty)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def main() -> None:
    """Serves requests on stdin and stdout; output of imports goes to stderr."""
    commands, answers = os.dup(0), os.dup(1)
    os.set_inheritable(commands, False)
    os.set_inheritable(answers, False)
    os.dup2(2, 1)
    from gulliver._compat import COMPILER  # imports torch, which may print

    for name in (*PRELOADED, COMPILER):
        import_module(name)
    os.write(answers, b'{"ready": true}\n')
    Forker(commands, answers).run()


if __name__ == "__main__":
    main()
