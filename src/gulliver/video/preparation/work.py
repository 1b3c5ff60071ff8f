"""Runs a function per file in parallel, with progress; resumes after an interruption."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.io.files import hold, named_errors, remove_leftovers
from gulliver.jobs.display import Display
from gulliver.video.preparation.table import Table


# [Note: one step at a time] Steps read a table at the start and replace it at the end, so of two
# concurrent steps one would lose the results of the other. A writer therefore locks the file
# `.NAME.lock` next to the table, and writes its step into it. `Table.write` detects a table that
# was read before the lock was acquired.
#
# [Note: work that can be killed] A step over a table may take hours, and its table is written at
# the end. Until then each result is appended immediately as a line of JSON to a journal next to the
# table: an interruption loses only the files in progress. The next run reads the journal, ignores a
# partial last line, and does the rest. A result is valid only for the same file size and
# modification time. The journal is deleted once the table is written; one left by an interruption
# in between contains nothing that the table does not.
@dataclass(frozen=True)
class FileOutcome:
    """Values of a file by column, and errors.

    An unreadable file has a problem and no values.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


Clips = Sequence[tuple[str, Path]]
Work = Callable[[Path], dict[str, Any] | FileOutcome]
Each = Callable[[Any, Iterable[tuple[str, Path]], int], Iterator[tuple[str, FileOutcome]]]


@contextmanager
def work_on(
    clips: Clips,
    work: Work,
    table: Path,
    step: str,
    settings: str = "",
    workers: int = 0,
    each: Each | None = None,
    within: bool = False,
) -> Iterator[list[FileOutcome]]:
    """Yields a result per file; deletes the journal after the with block has written the table."""
    path = table.with_name(f".{table.name}.{step}.jsonl")
    with nullcontext() if within else held_table(table, step):
        remove_leftovers(path.parent)
        with named_errors(path):
            path.touch()
        journal = _Journal(path, settings)
        yield _worked(clips, work, journal, step, workers, each or _in_threads)
        path.unlink(missing_ok=True)


@contextmanager
def fill_columns(
    table: Table,
    rows: Sequence[int],
    work: Work,
    out: Path,
    step: str,
    columns: Mapping[str, list[Any]],
    settings: str = "",
    workers: int = 0,
) -> Iterator[list[tuple[str, str]]]:
    """Fills cells of some rows with results for their files, like `work_on`.

    Yields name and reason of each file with a problem; cells without a new value are kept.
    """
    clips = table.clips()
    with work_on([clips[row] for row in rows], work, out, step, settings, workers) as outcomes:
        found = list(zip(rows, outcomes, strict=True))
        for row, outcome in found:
            for name, values in columns.items():
                values[row] = outcome.values.get(name, values[row])
        yield [(clips[row][0], outcome.problem) for row, outcome in found if outcome.problem]


@contextmanager
def held_table(table: Path, step: str) -> Iterator[None]:
    """Locks a table during one step, from before it is read until it is written."""
    path = table.with_name(f".{table.name}.lock")
    with ExitStack() as stack:
        while True:
            with named_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                before = path.stat().st_ino
            try:
                stack.enter_context(hold(path))
            except FileNotFoundError:
                continue
            except BlockingIOError:
                with suppress(OSError):
                    step = path.read_text(encoding="utf-8") or step
                told = f"another process is running {step} on {table}"
                raise GulliverError(f"{told}; wait until it ends") from None
            # The previous owner may have deleted the locked file.
            if path.exists() and path.stat().st_ino == before:
                break
            stack.close()
        path.write_text(f"{step} (process {os.getpid()})", encoding="utf-8")
        stack.callback(path.unlink, missing_ok=True)
        yield


def _worked(
    clips: Clips,
    work: Work,
    journal: _Journal,
    step: str,
    workers: int,
    each: Each,
) -> list[FileOutcome]:
    keys = [_key(name, path) for name, path in clips]
    left = [place for place, key in enumerate(keys) if key not in journal.found]
    done = len(keys) - len(left)
    # A file in several rows is processed once.
    first = {keys[place]: place for place in reversed(left)}
    with Display(step, len(keys), done, enabled=bool(keys)) as display, journal:
        jobs = ((key, clips[place][1]) for key, place in sorted(first.items(), key=lambda i: i[1]))
        for key, outcome in each(work, jobs, workers or usable_cores()):
            journal.add(key, outcome)
            display.advance()
        display.advance(len(left) - len(first))
    return [journal.found[key] for key in keys]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_threads(
    work: Work, jobs: Iterable[tuple[str, Path]], workers: int
) -> Iterator[tuple[str, FileOutcome]]:
    """Processes files in threads (decoders release the GIL), in order of completion."""
    return _threaded(partial(_tried, work), jobs, workers)


def _threaded(
    call: Callable[[Path], FileOutcome],
    jobs: Iterable[tuple[str, Path]],
    workers: int,
    end: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, FileOutcome]]:
    pool = ThreadPoolExecutor(workers, "clips")
    try:
        keys = {pool.submit(call, path): key for key, path in jobs}
        for future in as_completed(keys):
            yield keys[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        end()
        pool.shutdown()


def _tried(work: Work, path: Path) -> FileOutcome:
    try:
        found = work(path)
        return found if isinstance(found, FileOutcome) else FileOutcome(found)
    except GulliverError as error:
        return FileOutcome(problem=str(error))


def _key(name: str, path: Path) -> str:
    with suppress(OSError):
        found = path.stat()
        return f"{name}|{found.st_size}|{found.st_mtime_ns}"
    return f"{name}|missing"


class _Journal:
    """Results by key, in an append-only file."""

    def __init__(self, path: Path, settings: str) -> None:
        self.path, self.settings = path, settings
        self.found: dict[str, FileOutcome] = {}
        head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        self._begins = head != json.dumps(settings)
        for line in [] if self._begins else lines:
            with suppress(ValueError):
                key, values, problem = json.loads(line)
                self.found[key] = FileOutcome(values, problem)

    def __enter__(self) -> _Journal:
        with named_errors(self.path):
            self._file = self.path.open("w" if self._begins else "a", encoding="utf-8")
            # Start on a new line after a partial one.
            self._file.write(json.dumps(self.settings) + "\n" if self._begins else "\n")
        return self

    def add(self, key: str, outcome: FileOutcome) -> None:
        self.found[key] = outcome
        with named_errors(self.path):
            self._file.write(json.dumps([key, outcome.values, outcome.problem]) + "\n")
            self._file.flush()

    def __exit__(self, *caught: object) -> None:
        with named_errors(self.path):
            self._file.close()


FileWork = Callable[[Path], FileOutcome]


def in_processes(
    work: FileWork, jobs: Iterable[tuple[str, Path]], workers: int
) -> Iterator[tuple[str, FileOutcome]]:
    """Processes files in worker processes, in order of completion; a crash costs only one file."""
    # One single-process pool per thread, so that a dead process can be attributed to its file.
    local, pools = threading.local(), list[ProcessPoolExecutor]()
    # Not fork: this process may have threads, of torch and of the progress display.
    context = get_context("forkserver")
    context.set_forkserver_preload([getattr(work, "func", work).__module__])

    def one(path: Path) -> FileOutcome:
        if getattr(local, "pool", None) is None:
            local.pool = ProcessPoolExecutor(1, context, _end_with_parent)
            pools.append(local.pool)
        try:
            return local.pool.submit(work, path).result()
        except BrokenProcessPool:
            local.pool = None
            return FileOutcome(problem="crashed its decoder")

    def kill() -> None:
        for pool in pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown()

    return _threaded(one, jobs, workers, kill)


def _end_with_parent() -> None:
    """Leaves Ctrl+C to the parent process, and exits if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "it is a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    # The pool's queue is open at both ends in a worker, so it would wait forever.
    threading.Thread(target=watch, daemon=True).start()
