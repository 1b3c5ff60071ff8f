"""Publishes a step after all ranks have reported; heartbeats detect ranks that end early.

A heartbeat is a file in the step's temporary folder that its rank locks while it writes; rank 0 has
none. The system releases the lock when the process ends for any reason: rank 0, which waits for the
rank's report, then acquires the lock and reads from the file whether the rank had finished. There
is no timer: a slow rank still holds its lock and is not considered dead. On file systems without
locks, rank 0 relies on the timeout.
"""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint.files import DTYPES, read_json, write_json
from gulliver.checkpoint.folder import CheckpointFolder, lock_file, unlock
from gulliver.checkpoint.manifest import FORMAT, STATE, merge_parts, write_manifest
from gulliver.checkpoint.tree import merge_skeletons
from gulliver.errors import GulliverError

DONE = b"done"
TRIES, PAUSE_S = 200, 0.005
"""Attempts of a rank to lock its file, and seconds between them."""


def _heartbeat_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.alive"


def create_heartbeats(partial: Path, world_size: int) -> None:
    """Creates all heartbeat files on rank 0, so that no rank waits for one to appear."""
    for rank in range(1, world_size):
        _heartbeat_file(partial, rank).touch()


def remove_heartbeats(partial: Path, world_size: int) -> None:
    for rank in range(1, world_size):
        _heartbeat_file(partial, rank).unlink(missing_ok=True)


class Heartbeat:
    """Shows rank 0 that this rank is writing."""

    def __init__(self, partial: Path, rank: int) -> None:
        self._handle: int | None = None
        path = _heartbeat_file(partial, rank)
        try:
            # Rank 0 locks the file briefly to check it; giving up then would look like no start.
            for _ in range(TRIES if rank and path.exists() else 0):
                self._handle = lock_file(path)
                if self._handle is not None:
                    break
                time.sleep(PAUSE_S)
        except OSError:
            self._handle = None  # file system without locks

    def end(self, done: bool) -> None:
        """Records whether this rank has written its report, and releases the lock."""
        if self._handle is not None:
            if done:
                os.pwrite(self._handle, DONE, 0)
            unlock(self._handle)
            self._handle = None


class HeartbeatWatch:
    """Detects that a rank ended without a report."""

    def __init__(self, partial: Path, rank: int, silence_s: float) -> None:
        self._path, self.rank, self._silence_s = _heartbeat_file(partial, rank), rank, silence_s
        self._begun = time.monotonic()
        self._seen = False

    def check(self) -> None:
        try:
            handle = lock_file(self._path) if self.rank and self._path.exists() else None
        except OSError:
            return
        if handle is None:
            self._seen = True  # the rank holds the lock, or needs none
            return
        done = os.pread(handle, len(DONE), 0) == DONE
        unlock(handle)
        if done:
            self._seen = True
        elif self._seen or time.monotonic() - self._begun > self._silence_s:
            raise GulliverError(f"rank {self.rank} ended or failed before it had written its files")


# Completes a step on rank 0, from the reports of all ranks.
#
# A rank report is a small file in the step's temporary folder: what the rank wrote and where it
# belongs, or why it failed. Reports are files instead of a collective, because a failed collective
# does not tell which rank has ended (`publishing.py`).


PATIENCE_S, AT_EXIT_S = 1800.0, 60.0
"""Seconds that rank 0 waits for other ranks' reports: during a run, and at exit."""
POLL_S = 0.02


def write_rank_report(partial: Path, rank: int, save_id: str, report: Mapping[str, Any]) -> None:
    _check_there(partial)
    # Rank 0 may complete the step, and rename its folder, as soon as the last report exists:
    # nothing may access the folder after that, not even to sync it.
    content = {**report, "save_id": save_id}
    write_json(_report_file(partial, rank), content, indent=None, durable=False)


def publish(
    folder: CheckpointFolder,
    step: int,
    save_id: str,
    world_size: int,
    about: Mapping[str, Any],
    silence_s: float,
) -> None:
    """Waits for the reports of all ranks, and publishes the step."""
    partial = folder.partial(step)
    reports = [_awaited(partial, rank, save_id, silence_s) for rank in range(world_size)]
    for rank, report in enumerate(reports):
        if "error" in report:
            raise GulliverError(f"rank {rank}: {report['error']}")
    _check_there(partial)
    entries = dict.fromkeys(entry for report in reports for entry in report["parts"])
    tensors = {
        entry: merge_parts((report["parts"].get(entry, {}) for report in reports), f"{entry}: ")
        for entry in entries
    }
    texts = {STATE: _state(reports), **_indices(tensors, world_size)}
    files = {name: entry for report in reports for name, entry in report["files"].items()}
    # The manifest is last: it lists sizes and checksums of all files, including these two.
    for name, text in texts.items():
        write_json(partial / name, text, indent=None)
        files[name] = checksummed(partial / name)
    for rank in range(world_size):
        _report_file(partial, rank).unlink()
    # All ranks have reported, so none locks these files any more.
    remove_heartbeats(partial, world_size)
    manifest = {
        "format": FORMAT,
        "step": step,
        "order": folder.next_order(),
        "world_size": world_size,
        "about": {**versions(), **about},
        "files": files,
        "tensors": tensors,
    }
    write_manifest(partial, manifest)
    folder.publish(step)


def _report_file(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.json"


def _check_there(partial: Path) -> None:
    """Rejects a missing folder; writing a file would otherwise recreate it."""
    if not partial.is_dir():
        raise GulliverError(f"{partial} disappeared while being written")


def _awaited(partial: Path, rank: int, save_id: str, silence_s: float) -> dict[str, Any]:
    path, patience, begun = _report_file(partial, rank), PATIENCE_S, time.monotonic()
    watch = HeartbeatWatch(partial, rank, silence_s)
    while True:
        _check_there(partial)
        lost: GulliverError | None = None
        try:
            # Before looking for its report, which the rank writes before it releases its heartbeat.
            watch.check()
        except GulliverError as error:
            lost = error
        if path.exists():
            report = read_json(path)
            if report.get("save_id") == save_id:
                return report
        if lost is not None:
            raise lost
        if patience > AT_EXIT_S and not threading.main_thread().is_alive():
            # A killed rank writes no report, which must not keep the others from ending.
            patience, begun = AT_EXIT_S, time.monotonic()
        if time.monotonic() - begun > patience:
            raise GulliverError(f"rank {rank} has not written its files in {patience:.0f} s")
        time.sleep(POLL_S)


def _state(reports: list[dict[str, Any]]) -> dict[str, Any]:
    entries: dict[str, list[Any]] = {}
    for report in reports:
        for entry, skeleton in report["entries"].items():
            entries.setdefault(entry, []).append(skeleton)
    return {
        "entries": {entry: merge_skeletons(found) for entry, found in entries.items()},
        "ranks": [report["own"] for report in reports],
        "kinds": reports[0]["kinds"],
    }


def _indices(tensors: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Creates a Hugging Face index if the model's tensors are unsharded, but in several files."""
    named = tensors.get("model", {})
    whole = named and all(len(tensor["parts"]) == 1 for tensor in named.values())
    if world_size == 1 or not whole:
        return {}
    total = sum(
        math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]].itemsize for tensor in named.values()
    )
    places = {name: tensor["parts"][0][0] for name, tensor in named.items()}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return {"model.safetensors.index.json": index}


def checksummed(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    size = max(1, len(content))
    return {"bytes": len(content), "page_bytes": size, "crc32": [f"{zlib.crc32(content):08x}"]}


def versions() -> dict[str, Any]:
    import gulliver

    return {
        "gulliver": gulliver.__version__,
        "torch": torch.__version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "id": uuid.uuid4().hex,
    }
