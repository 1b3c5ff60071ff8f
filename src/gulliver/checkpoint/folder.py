"""Folder of a run's steps: their order, retention, and the writer's lock."""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from gulliver.checkpoint.files import read_json
from gulliver.checkpoint.manifest import MANIFEST, STATE, is_complete, order_of
from gulliver.comm.collectives import group_rank
from gulliver.errors import GulliverError
from gulliver.io.files import (
    PARTIAL,
    name_folder,
    named_errors,
    remove_all,
    remove_folder,
    sync,
    write_text,
)
from gulliver.options import whole_number


# [Note: the newest step] A run that loads step 100 of 300 and continues to train goes back: the
# steps saved afterwards are the run, although 300 is a higher number. So the ``order`` in a step's
# manifest is one more than the highest order in the folder at the time, and the newest step is the
# one with the highest order. Orders do not change when steps are deleted, copied or linked.
def order_in(folder: Path) -> int | None:
    """Returns a step's position in saving order; None if its manifest cannot be read."""
    path = Path(folder) / MANIFEST
    try:
        found = os.stat(path)
        return _read_order(str(path), found.st_ino, found.st_mtime_ns, found.st_size)
    except (OSError, GulliverError):
        return None


@functools.lru_cache(maxsize=4096)
def _read_order(path: str, inode: int, mtime_ns: int, nbytes: int) -> int:
    """Reads the order from a manifest, which may be large; cached until the file changes."""
    return order_of(read_json(Path(path)))


def by_age(folders: Iterable[tuple[int, Path]]) -> list[int]:
    ages = ((order_in(folder), step) for step, folder in folders)
    return [step for _, step in sorted((order, step) for order, step in ages if order is not None)]


# Folder of checkpoints, whose newest complete one can always be loaded.
#
# A step is written under a temporary name, synced to disk, and renamed; then `latest` is updated. A
# process killed at any moment leaves complete steps and possibly temporary folders, which the next
# save removes. `saving.py` describes which rank writes what.


LATEST, LOCK = "latest", ".lock"
STEP = re.compile(r"step-([0-9]{8,})")
OURS = re.compile(rf".+\.safetensors(\.index\.json)?|{re.escape(STATE)}", re.DOTALL)
"""Pattern of the names of a step's files other than the manifest."""

OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_log = logging.getLogger("gulliver")


def steps_of(root: Path) -> list[tuple[int, Path]]:
    """Lists the numbers and folders of all steps in a folder, complete or not, in numeric order."""
    if not root.is_dir():
        return []
    found = ((STEP.fullmatch(entry.name), entry) for entry in root.iterdir())
    return sorted((int(match[1]), entry) for match, entry in found if match)


def _was_step(path: Path) -> bool:
    """Whether a folder is or was a step: it has a manifest, or only a step's files."""
    # Other content under a step's name is not ours to remove.
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    return MANIFEST in names or all(OURS.fullmatch(name) for name in names)


class CheckpointFolder:
    """Checkpoints of one run, by step.

    Args:
        root: folder of the run; created when the first step is saved.
        keep: number of newest steps to keep; 0 keeps all.

    Raises:
        GulliverError: `keep` is not a non-negative integer.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        keep = whole_number("keep", keep)
        if keep < 0:
            raise GulliverError(f"keep={keep} is negative: use 1 or more, or 0 to keep all steps")
        self.root, self.keep = Path(root), keep

    def path(self, step: int) -> Path:
        """Returns the path of a step's folder."""
        return self.root / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Returns the temporary path of a step's folder while it is written."""
        return self.root / f"{self.path(step).name}{PARTIAL}"

    def steps(self) -> list[int]:
        """Lists the complete steps in numeric order."""
        return [step for step in self._numbers() if is_complete(self.path(step))]

    def _numbers(self) -> list[int]:
        return [step for step, _ in steps_of(self.root)]

    def _ages(self) -> list[int]:
        """Lists steps with readable manifests, complete or not, oldest first."""
        return by_age((step, self.path(step)) for step in self._numbers())

    def next_order(self) -> int:
        """Returns the next step's position in saving order; see [Note: the newest step]."""
        orders = (order_in(self.path(step)) for step in self._numbers())
        return 1 + max((order for order in orders if order), default=0)

    def latest(self) -> Path | None:
        """Returns the folder of the complete step that was saved last; None if there is none.

        Rank 0 logs a warning if the `latest` file names an incomplete step.
        """
        newest = None
        for step in reversed(self._ages()):
            if is_complete(self.path(step)):
                newest = self.path(step)
                break
        named = self._named()
        if named and group_rank() == 0 and not self._is_step(named):
            what = f"taking {newest.name}" if newest else "there is no other step"
            _log.warning("checkpoint %s is not complete: %s", self.root / named, what)
        return newest

    def _named(self) -> str | None:
        """Returns the step that the file `latest` names, which may not exist; None without it."""
        try:
            return (self.root / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{LATEST} ({error.strerror})"

    def _is_step(self, name: str) -> bool:
        return STEP.fullmatch(name) is not None and is_complete(self.root / name)

    def begin(self, step: int) -> Path:
        """Removes leftovers of killed processes and creates the temporary folder."""
        partial, final = self.partial(step), self.path(step)
        if final.exists() and not final.is_symlink() and not _was_step(final):
            raise GulliverError(
                f"{final} exists and is not a step: move it, or save to another folder"
            )
        with named_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            for kind in ("step-*", f".{LATEST}.*"):
                for entry in self.root.glob(f"{kind}{PARTIAL}"):
                    remove_all(entry)
            partial.mkdir()
        return partial

    def publish(self, step: int) -> None:
        """Renames a step to its final name, updates `latest`, and removes old steps.

        After the rename the step is saved and can be found without `latest`, so later failures are
        only logged.
        """
        # The rename is the commit: a crash before it leaves a temporary folder, after it a complete
        # step.
        name_folder(self.partial(step), self.path(step))
        for what, settle in (
            ("its rename may not survive a power failure", lambda: sync(self.root)),
            (f"the file {LATEST} does not name it", lambda: self._point_to(step)),
            ("old checkpoints stay", lambda: self._retire(step)),
        ):
            try:
                settle()
            except (GulliverError, OSError) as error:
                _log.warning("step %d of %s is saved, but %s: %s", step, self.root, what, error)

    def _point_to(self, step: int) -> None:
        write_text(self.root / LATEST, self.path(step).name + "\n")

    def _retire(self, step: int) -> None:
        for old in self._expired_steps():
            if old != step:
                remove_folder(self.path(old))

    def discard(self, step: int) -> None:
        remove_all(self.partial(step))

    def _expired_steps(self) -> list[int]:
        if not self.keep:
            return []  # without reading the steps, which may be many
        complete = set(self.steps())
        return [step for step in self._ages() if step in complete][: -self.keep]

    def needs(self) -> str:
        """Describes the disk space that `keep` requires, in steps, for error messages."""
        return f"keep={self.keep} needs room for {self.keep + 1} steps" if self.keep else ""


class FolderLock:
    """Prevents other jobs from writing to a folder while this process holds the lock."""

    # The system releases the lock when the process ends for any reason. Forked processes do not
    # have it.

    def __init__(self, root: Path) -> None:
        self.path = Path(root) / LOCK
        self._handle: int | None = None

    def take(self) -> None:
        if self._handle is not None:
            if self._is_there(self._handle):
                return
            self.release()  # the folder was removed
        with named_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_symlink():
                raise GulliverError(f"{self.path} is a link: remove the link (its target stays)")
            handle = os.open(self.path, OPEN_LOCK, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(handle, 200).decode("utf-8", "replace").strip() or "another process"
                os.close(handle)
                raise GulliverError(
                    f"{self.path.parent} is being written by {owner}: use another folder, or stop "
                    "that job first"
                ) from None
            except OSError:
                os.close(handle)
                raise
            # Identifies the owner in the error of a rejected process.
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._handle = handle
        _handles.add(handle)

    def _is_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), self.path.stat())
        except OSError:
            return False

    def release(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            unlock(handle)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_file(path: Path) -> int | None:
    """Opens and locks a file; None if another process or handle has it locked."""
    handle = os.open(path, OPEN_LOCK, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    _handles.add(handle)
    return handle


def unlock(handle: int) -> None:
    """Unlocks a handle; does nothing in a forked process, which does not own the lock."""
    if handle in _handles:
        _handles.discard(handle)
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


_handles: set[int] = set()


def _forget_all() -> None:
    """Closes the lock handles in a forked process; the parent owns the locks."""
    # Closed, not unlocked: the lock is shared, and unlocking would release the parent's.
    while _handles:
        os.close(_handles.pop())


os.register_at_fork(after_in_child=_forget_all)
