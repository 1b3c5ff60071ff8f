"""Heartbeats of the ranks that write a step, in its temporary folder.

A heartbeat is a file that its rank holds a lock on while it writes; rank 0 has none. The system
takes the lock away when the process ends, however it ends: rank 0, which waits for the rank's
report, then gets the lock itself, and finds in the file whether the rank had finished. Nothing
beats in time: a rank that is only slow still holds its lock, and must not be taken for dead. On
file systems without locks rank 0 only has its patience.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gulliver.checkpoint._folder import lock_file, unlock
from gulliver.errors import GulliverError

DONE = b"done"
TRIES, PAUSE_S = 200, 0.005
"""Attempts of a rank to lock its file, and seconds between them."""


def _heartbeat_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.alive"


def create_heartbeats(partial: Path, world_size: int) -> None:
    """Makes the files; rank 0 does, so that no rank has to wait for another's to be seen."""
    for rank in range(1, world_size):
        _heartbeat_file(partial, rank).touch()


def remove_heartbeats(partial: Path, world_size: int) -> None:
    """Removes the files."""
    for rank in range(1, world_size):
        _heartbeat_file(partial, rank).unlink(missing_ok=True)


class Heartbeat:
    """Shows rank 0 that this rank is writing."""

    def __init__(self, partial: Path, rank: int) -> None:
        self._handle: int | None = None
        path = _heartbeat_file(partial, rank)
        try:
            # Rank 0 looks by locking, for a moment: who gave way to that would seem never to begin.
            for _ in range(TRIES if rank and path.exists() else 0):
                self._handle = lock_file(path)
                if self._handle is not None:
                    break
                time.sleep(PAUSE_S)
        except OSError:
            self._handle = None  # no locks here

    def end(self, done: bool) -> None:
        """Notes whether this rank has written its report, and gives the lock back."""
        if self._handle is not None:
            if done:
                os.pwrite(self._handle, DONE, 0)
            unlock(self._handle)
            self._handle = None


class HeartbeatWatch:
    """Notices that a rank ended without a report."""

    def __init__(self, partial: Path, rank: int, silence_s: float) -> None:
        self._path, self.rank, self._silence_s = _heartbeat_file(partial, rank), rank, silence_s
        self._begun = time.monotonic()
        self._seen = False

    def check(self) -> None:
        """Checks that the rank still writes, or has reported."""
        try:
            handle = lock_file(self._path) if self.rank and self._path.exists() else None
        except OSError:
            return
        if handle is None:
            self._seen = True  # it has the lock, or needs none
            return
        done = os.pread(handle, len(DONE), 0) == DONE
        unlock(handle)
        if done:
            self._seen = True
        elif self._seen or time.monotonic() - self._begun > self._silence_s:
            raise GulliverError(
                f"rank {self.rank} ended, or failed, before it had written its files"
            )
