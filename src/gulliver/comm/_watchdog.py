"""Notices within a bounded time that a rank is gone, and names it.

Every rank counts upwards under its own key of the shared store and watches the others' counts. A
count that stands still for too long is a rank that ended or hangs. The main thread learns of it
when its collective fails; where it is stuck inside one, the process is ended with one line.
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

    def wait_for_lost(self) -> int | None:
        """Waits until a lost rank is known, no longer than a silence takes to be noticed."""
        self._known.wait(self.silence_s * 1.5 + GRACE_S)
        return self.lost

    def _watch(self) -> None:
        interval = min(1.0, self.silence_s / 10)
        others = [rank for rank in range(self.size) if rank != self.rank]
        seen: dict[int, tuple[bytes, float]] = {r: (b"", time.monotonic()) for r in others}
        beat = 0
        while not self._stop.wait(interval):
            beat += 1
            try:
                self._store.set(str(self.rank), str(beat))
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

    def _look(self, rank: int, seen: dict[int, tuple[bytes, float]]) -> None:
        count = self._store.get(str(rank)) if self._store.check([str(rank)]) else b""
        if count != seen[rank][0] or count == b"done":
            seen[rank] = (count, time.monotonic())

    def _declare(self, rank: int) -> None:
        """Tells the main thread, and ends the process where that cannot listen."""
        self.lost = rank
        self._known.set()
        if self._stop.wait(GRACE_S):
            return
        print(
            f"gulliver: rank {rank} is gone (nothing heard for {self.silence_s:.0f} s): "
            f"rank {self.rank} ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
