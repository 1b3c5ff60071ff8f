"""Threads that take collectives from step to step while Python computes.

[Note: no deadlock] A collective waits only for its own messages, in a thread of its own, and jobs
are begun in the order in which they were handed in, which is the same on all ranks. So the oldest
unfinished collective has a thread on every rank, and always goes on; however many are in flight,
and whichever a rank waits for first. (In one thread for all, a rank that waits for an old
collective before it starts a new one can block those that have started the new one.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from gulliver.comm._ledger import wait_for

THREADS = 8
"""Collectives that are on their way at once; more wait for their turn."""


class Job:
    """Work for a thread, under way, done or failed."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Returns when it is done.

        Raises:
            Exception: what the work raised.
        """
        wait_for(self._done)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def run(self) -> None:
        """Does the work; called once, by a thread."""
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:
            self._error = error
        # What the work held is let go, whoever keeps the job.
        self._run = None
        self._done.set()


class Workers:
    """Daemon threads that are started when they are needed."""

    def __init__(self, threads: int = THREADS) -> None:
        self._most, self._threads, self._unfinished = threads, 0, 0
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, run: Callable[[], None]) -> Job:
        """Hands in work."""
        job = Job(run)
        with self._lock:
            self._unfinished += 1
            more = self._threads < min(self._most, self._unfinished)
            self._threads += more
            self._jobs.put(job)
        if more:
            name = f"gulliver-torus-{self._threads}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        return job

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            del job
            with self._lock:
                self._unfinished -= 1

    def drain(self, until: float) -> None:
        """Lets work that is under way end, no later than a moment of `time.monotonic`."""
        while self._unfinished and time.monotonic() < until:
            time.sleep(0.01)


_workers: Workers | None = None


def drain(until: float) -> None:
    """Lets the work of this process's threads end; see `Workers.drain`."""
    if _workers is not None:
        _workers.drain(until)


def submit(run: Callable[[], None]) -> Job:
    """Hands in work for the threads of this process."""
    global _workers
    if _workers is None:
        _workers = Workers()
    return _workers.submit(run)
