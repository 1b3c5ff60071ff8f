"""Work on files in several processes: a file that crashes its decoder costs that file only.

Each process has a pipe of its own, so it is known what the one that died was at. Processes that
lose their parent end at their next message.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gulliver.video.preparation._work import FileOutcome

FileWork = Callable[[Path], FileOutcome]
Busy = dict[Any, tuple[str, Any]]
"""Key and process of what is under way, by pipe."""


def in_processes(
    work: FileWork, jobs: Iterable[tuple[str, Path]], workers: int
) -> Iterator[tuple[str, FileOutcome]]:
    """Works on files, and yields key and outcome of each as it is done."""
    # Not fork: this process may have threads, of torch and of the display.
    context = get_context("forkserver")
    context.set_forkserver_preload([work_module(work)])
    left, busy = iter(jobs), Busy()
    try:
        for _ in range(workers):
            _give(_started(context, work), left, busy)
        while busy:
            for pipe in wait(list(busy)):
                key, process = busy.pop(pipe)
                outcome = _received(pipe, process)
                worker = (pipe, process) if process.is_alive() else _started(context, work)
                _give(worker, left, busy)
                yield key, outcome
    finally:
        for _, process in busy.values():
            process.kill()
            process.join()


def work_module(work: Any) -> str:
    """Names the module of a function, which may be a partial one."""
    return getattr(work, "func", work).__module__


def _started(context: Any, work: FileWork) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _give(worker: tuple[Any, Any], left: Iterator[tuple[str, Path]], busy: Busy) -> None:
    """Sends the next file to a process, or tells it that there is none."""
    pipe, process = worker
    job = next(left, None)
    if job is None:
        pipe.send(None)
        process.join()
        return
    pipe.send(job[1])
    busy[pipe] = job[0], process


def _received(pipe: Any, process: Any) -> FileOutcome:
    """Receives an outcome; a process that died has none."""
    try:
        found = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return FileOutcome(problem=f"crashed its decoder (exit code {process.exitcode})")
    if isinstance(found, BaseException):
        process.kill()
        raise found
    return found


def _serve(pipe: Connection, work: FileWork) -> None:
    """Works on what comes through a pipe until None does, or its other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for path in iter(pipe.recv, None):
            try:
                outcome: Any = work(path)
            except Exception as error:
                outcome = error
            pipe.send(outcome)
    except (EOFError, BrokenPipeError):
        pass
