"""One piece of work for each file of many: by threads, with progress, taken up where it was left.

[Note: work that can be killed]
A step over a table may take hours, and its table is written whole, at its end. Until then each
result is a line of JSON in a journal beside the table, appended as soon as it is known: a process
that is killed loses the files that it was at. The next one reads the journal, leaves out a torn
last line, and does the rest. A result counts for a file of the same size and time of change only.
The journal goes when the table is there; one that is left behind by a kill between the two says
nothing that the table does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError
from gulliver.io import hold, named_errors, remove_leftovers
from gulliver.jobs import Display


@dataclass(frozen=True)
class Outcome:
    """Values of a file by column, and why others could not be had.

    A file that cannot be read has a problem and no values.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


Clips = Sequence[tuple[str, Path]]
Work = Callable[[Path], dict[str, Any] | Outcome]
Each = Callable[[Any, Iterable[tuple[str, Path]], int], Iterator[tuple[str, Outcome]]]


@contextmanager
def work_on(
    clips: Clips,
    work: Work,
    table: Path,
    step: str,
    settings: str = "",
    workers: int = 0,
    each: Each | None = None,
) -> Iterator[list[Outcome]]:
    """Yields the outcome of each file; the block writes the table, after which the journal goes.

    Args:
        clips: name and path of each file.
        work: values of a file, or its outcome; a `GulliverError` that it raises is its problem.
        table: table that is being made: the journal lies beside it.
        step: name of what is done, which names the journal and is shown with the progress.
        settings: what the values depend on besides the file; a journal of others starts anew.
        workers: threads; 0 takes one for each core.
        each: way to work on all files, which yields key and outcome of each; by default in threads.

    Raises:
        GulliverError: another process is at the same step of this table.
    """
    path = table.with_name(f".{table.name}.{step}.jsonl")
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        lock = hold(path)
        lock.__enter__()
    except BlockingIOError:
        raise GulliverError(f"another process is at {step} of {table}: wait for it") from None
    try:
        remove_leftovers(path.parent)
        journal = _Journal(path, settings)
        yield _worked(clips, work, journal, step, workers, each or _in_threads)
        path.unlink(missing_ok=True)
    finally:
        lock.__exit__(None, None, None)


def _worked(
    clips: Clips,
    work: Work,
    journal: _Journal,
    step: str,
    workers: int,
    each: Each,
) -> list[Outcome]:
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
) -> Iterator[tuple[str, Outcome]]:
    """Works on files in threads, which decoders leave each other, and yields what is ready."""
    pool = ThreadPoolExecutor(workers, "clips")
    try:
        keys: dict[Future[Outcome], str] = {}
        for key, path in jobs:
            keys[pool.submit(_tried, work, path)] = key
        for future in as_completed(keys):
            yield keys[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _tried(work: Work, path: Path) -> Outcome:
    try:
        found = work(path)
        return found if isinstance(found, Outcome) else Outcome(found)
    except GulliverError as error:
        return Outcome(problem=str(error))


def _key(name: str, path: Path) -> str:
    with suppress(OSError):
        found = path.stat()
        return f"{name}|{found.st_size}|{found.st_mtime_ns}"
    return f"{name}|missing"


class _Journal:
    """Outcomes by key, in a file that is only ever appended to."""

    def __init__(self, path: Path, settings: str) -> None:
        self.path, self.settings = path, settings
        self.found: dict[str, Outcome] = {}
        head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        self._begins = head != json.dumps(settings)
        for line in [] if self._begins else lines:
            with suppress(ValueError):
                key, values, problem = json.loads(line)
                self.found[key] = Outcome(values, problem)

    def __enter__(self) -> _Journal:
        with named_errors(self.path):
            self._file = self.path.open("w" if self._begins else "a", encoding="utf-8")
            # After a torn line the next one begins on its own.
            self._file.write(json.dumps(self.settings) + "\n" if self._begins else "\n")
        return self

    def add(self, key: str, outcome: Outcome) -> None:
        """Keeps the outcome of a file."""
        self.found[key] = outcome
        with named_errors(self.path):
            self._file.write(json.dumps([key, outcome.values, outcome.problem]) + "\n")
            self._file.flush()

    def __exit__(self, *caught: object) -> None:
        with named_errors(self.path):
            self._file.close()
