"""Notices within a bounded time that a rank is gone or has failed, and names it.

Every rank counts upwards under its own key of the shared store and watches the others' counts. A
count that stands still for too long is a rank that ended or hangs. The main thread learns of it
when its collective fails; where it is stuck inside one, the process is ended with one line.

[Note: failures] A rank that raises in the middle of what all do together, such as the steps of a
pipeline, lives on, and so do its connections: the others would wait for messages that it never
sends. So it writes beside its count which passage failed, and why. Those that are in the same
passage by their own count, and do not come out of it by themselves, are ended as above. gloo has
no call that would wake a thread which waits for a message.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import torch.distributed as dist

GRACE_S = 5.0
"""Time for the main thread to end by itself once a rank is known to be lost."""

MESSAGE_LENGTH = 500
"""Characters of an error that the other ranks are told."""


class Watchdog:
    """Heartbeats of one rank, in a daemon thread.

    Args:
        store: shared by the ranks and used by nobody else.
        rank: of this process.
        size: of the world.
        silence_s: a rank whose count stood still for so long is lost.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, silence_s: float) -> None:
        self._store, self.rank, self.size, self.silence_s = store, rank, size, silence_s
        self._stop = threading.Event()
        self._known = threading.Event()
        self.lost: int | None = None
        self.failed: tuple[int, str] | None = None
        self._failures: dict[int, tuple[int, str]] = {}
        self._passages, self._inside, self._beat, self._failure = 0, False, 0, ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begins to beat and to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Says good-bye, so that nobody takes this rank for lost."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        # A store that is gone has nobody left who could listen.
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(str(self.rank), "done")

    def enter(self) -> None:
        """The main thread enters the next passage that no rank leaves without the others."""
        self._passages += 1
        self._inside = True

    def leave(self, error: BaseException | None) -> None:
        """It has left it; an error is told to the others, unless it was one of theirs."""
        self._inside = False
        if error is None or self.failed is not None:
            return
        lines = str(error).strip().splitlines() or [""]
        self._failure = f" {self._passages} {type(error).__name__}: {lines[0][:MESSAGE_LENGTH]}"
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._tell()

    def wait_for_reason(self) -> str | None:
        """Waits until a lost or failed rank is known, no longer than a silence takes to be seen."""
        until = time.monotonic() + self.silence_s * 1.5 + GRACE_S
        while time.monotonic() < until and not self._known.wait(0.1):
            if self.failed is not None:
                return "rank {} failed: {}".format(*self.failed)
        if self.lost is None:
            return None
        return f"rank {self.lost} is gone: it ended or stopped answering"

    def _tell(self) -> None:
        self._store.set(str(self.rank), f"{self._beat}{self._failure}")

    def _watch(self) -> None:
        interval = min(1.0, self.silence_s / 10)
        others = [rank for rank in range(self.size) if rank != self.rank]
        seen: dict[int, tuple[bytes, float]] = {r: (b"", time.monotonic()) for r in others}
        stuck_since: float | None = None
        while not self._stop.wait(interval):
            self._beat += 1
            try:
                self._tell()
                for rank in others:
                    self._look(rank, seen)
            except (RuntimeError, dist.DistError):
                # Rank 0's process, or the launcher beside it, keeps the store.
                self._declare(0)
                return
            silent = [r for r in others if time.monotonic() - seen[r][1] > self.silence_s]
            if silent:
                self._declare(silent[0])
                return
            if self._same_passage_failed():
                stuck_since = stuck_since or time.monotonic()
                if time.monotonic() - stuck_since > GRACE_S:
                    self._end("rank {} failed: {}".format(*self.failed or ()))
            else:
                stuck_since = None

    def _same_passage_failed(self) -> bool:
        return self._inside and any(n == self._passages for n, _ in self._failures.values())

    def _look(self, rank: int, seen: dict[int, tuple[bytes, float]]) -> None:
        count = self._store.get(str(rank)) if self._store.check([str(rank)]) else b""
        if count != seen[rank][0] or count == b"done":
            seen[rank] = (count, time.monotonic())
        _, _, failure = count.decode().partition(" ")
        if failure:
            passage, _, message = failure.partition(" ")
            self._failures[rank] = int(passage), message
            self.failed = self.failed or (rank, message)

    def _declare(self, rank: int) -> None:
        """Tells the main thread, and ends the process where that cannot listen."""
        self.lost = rank
        self._known.set()
        if self._stop.wait(GRACE_S):
            return
        self._end(f"rank {rank} is gone (nothing heard for {self.silence_s:.0f} s)")

    def _end(self, reason: str) -> None:
        print(f"gulliver: {reason}: rank {self.rank} ends", file=sys.stderr, flush=True)
        os._exit(1)
