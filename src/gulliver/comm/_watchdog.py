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
from collections.abc import Mapping

import torch.distributed as dist

GRACE_S = 5.0
"""Time for the main thread to end by itself once a rank is known to be lost."""

SUSPECTED_S = 8.0
"""A silence that is long enough once a collective has failed, too."""

DONE, FAILED, GONE = "done", "failed", "gone"
"""What a rank says at its end in place of a count: that it is done, why it failed, or which other
rank was lost to it, and why."""


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
        self._suspected = threading.Event()
        self.lost: int | None = None
        self.reason = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begins to beat and to watch."""
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Says good-bye, so that nobody takes this rank for lost.

        Args:
            failure: why it ends before its time; the others learn of it at once.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        # A store that is gone has nobody left who could listen.
        with contextlib.suppress(RuntimeError, dist.DistError):
            last = DONE if failure is None else f"{FAILED} {failure}"
            if self.lost is not None:
                last = f"{GONE} {self.lost} {self.reason}"  # not this rank's fault
            self._store.set(str(self.rank), last)

    def wait_for_lost(self) -> int | None:
        """Waits until a lost rank is known, no longer than a silence takes to be noticed.

        For those whose collective has failed: a rank that ended as it should is lost to them, too.
        """
        self._suspected.set()
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
                self._declare(0, "ended, and its store with it")
                return
            lost = self._lost({rank: count.decode() for rank, (count, _) in seen.items()})
            if lost is None:
                longest = min(SUSPECTED_S, self.silence_s) if self._failing() else self.silence_s
                silent = [r for r in others if time.monotonic() - seen[r][1] > longest]
                lost = (silent[0], f"was not heard of for {longest:.0f} s") if silent else None
            if lost is not None:
                self._declare(*lost)
                return

    def _failing(self) -> bool:
        """Whether a collective of this rank has failed."""
        return self._suspected.is_set()

    def _lost(self, said: Mapping[int, str]) -> tuple[int, str] | None:
        """A rank that says itself, or of which another says, that it is gone, and why."""
        for rank, word in said.items():
            if word.startswith(FAILED):
                return rank, word
            if word.startswith(GONE):
                _, other, reason = word.split(" ", 2)
                if int(other) != self.rank:
                    return int(other), reason
            if word == DONE and self._failing():
                return rank, "ended, having made fewer steps or calls than this one"
        return None

    def _look(self, rank: int, seen: dict[int, tuple[bytes, float]]) -> None:
        count = self._store.get(str(rank)) if self._store.check([str(rank)]) else b""
        if count != seen[rank][0] or count == DONE.encode():
            seen[rank] = (count, time.monotonic())

    def _declare(self, rank: int, reason: str) -> None:
        """Tells the main thread, and ends the process where that cannot listen."""
        self.lost, self.reason = rank, reason
        self._known.set()
        if self._stop.wait(GRACE_S):
            return
        print(
            f"gulliver: rank {rank} is gone (it {reason}): rank {self.rank} ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
