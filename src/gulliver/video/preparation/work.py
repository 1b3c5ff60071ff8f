"""One piece of work per file of many: by threads, with progress, resumable."""

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


# [Note: one step at a time] Steps read a table at their beginning and replace it at their end, so
# of two at once one would lose what the other has done. Whoever writes a table holds the file
# `.NAME.lock` beside it, in which he says what he does. A table that was read before the lock was
# had is noticed by `Table.write`.
#
# [Note: work that can be killed] A step over a table may take hours, and its table is written
# whole, at its end. Until then each result is a line of JSON in a journal beside the table,
# appended as soon as it is known: a process that is killed loses the files that it was at. The next
# one reads the journal, leaves out a torn last line, and does the rest. A result counts for a file
# of the same size and time of change only. The journal goes when the table is there; one that is
# left behind by a kill between the two says nothing that the table does not.
@dataclass(frozen=True)
class FileOutcome:
    """Values of a file by column, and why others could not be had.

    A file that cannot be read has a problem and no values.
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
    """Yields the outcome of each file; the block writes the table, after which the journal goes."""
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
    """Fills cells of some rows with what is found of their files, as `work_on`.

    Yields name and reason of each file with a problem; cells without a new value stay.
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
    """Keeps a table for one step, from before it is worked on until it is written."""
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
                told = f"another process is at {step} of {table}"
                raise GulliverError(f"{told}: wait for it") from None
            # Who had it before may have removed the file that is locked now.
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
    # A file that several rows name is looked at once.
    first = {keys[place]: place for place in reversed(left)}
    with Display(step, len(keys), done, enabled=bool(keys)) as display, journal:
        jobs = ((key, clips[place][1]) for key, place in sorted(first.items(), key=lambda i: i[1]))
        for key, outcome in each(work, jobs, workers or usable_cores()):
            journal.add(key, outcome)
            display.advance()
        display.advance(len(left) - len(first))
    return [journal.found[key] for key in keys]


def usable_cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_threads(
    work: Work, jobs: Iterable[tuple[str, Path]], workers: int
) -> Iterator[tuple[str, FileOutcome]]:
    """Works on files in threads, which decoders leave each other, and yields what is ready."""
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
    """Outcomes by key, in a file that is only ever appended to."""

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
            # After a torn line the next one begins on its own.
            self._file.write(json.dumps(self.settings) + "\n" if self._begins else "\n")
        return self

    def add(self, key: str, outcome: FileOutcome) -> None:
        """Keeps the outcome of a file."""
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
    """Works on files in processes, and yields what is ready: a crash costs its file only."""
    # A pool of one process for each thread: so it is known what a process that died was at.
    local, pools = threading.local(), list[ProcessPoolExecutor]()
    # Not fork: this process may have threads, of torch and of the display.
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
    """Has a worker leave Ctrl+C to its parent, and end when that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "it is a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    # The pool's queue is open at both ends in a worker: it would wait for ever.
    threading.Thread(target=watch, daemon=True).start()
