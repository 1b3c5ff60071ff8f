"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gulliver.errors import GulliverError

PARTIAL = ".partial"


def sync(path: Path) -> None:
    """Forces a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`, renamed to it when the block ends well.

    Raises:
        GulliverError: the disk is full, or the place cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def finish_folder(partial: Path, path: Path) -> None:
    """Forces everything in a folder to the disk and gives it its final name."""
    with named_errors(path):
        for found in sorted(partial.rglob("*")):
            sync(found)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)


def require_space(folder: Path, needed: int) -> None:
    """Refuses to begin what the disk has no room for.

    Args:
        folder: where bytes will be written; its nearest existing parent is asked.
        needed: bytes.

    Raises:
        GulliverError: naming the bytes needed and free.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise GulliverError(
            f"no space for {needed / 2**20:.1f} MiB in {folder}: {free / 2**20:.1f} MiB are free"
        )


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turns the system's refusals into one line that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise GulliverError(
                f"no space left for {path}: free some, nothing was changed"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise GulliverError(f"{path} cannot be written: {error.strerror}") from error
        raise
