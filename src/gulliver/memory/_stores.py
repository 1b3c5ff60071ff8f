"""Stores: what lies behind the fast tier, with bytes that come and go asynchronously.

`DiskStore` is one file, unlinked as soon as it is open: it has no name that another run could mix
up with its own, and the system frees it when the process ends, however it ends. It is read and
written past the page cache by the threads of the native I/O engine, so that a memory limit of the
system counts none of it. `HostStore` is the pinned memory of a machine with a GPU.

A store knows offsets and bytes, not what lies there. Offsets and sizes are whole pages of 4096.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import BLOCK, PARTIAL, Engine, File, Ticket, default_engine, require_space
from gulliver.solve import Extents

NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
        *("afs", "fuse.sshfs", "fuse.glusterfs"),
    }
)
"""File systems whose disk is another machine's."""
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
"""File systems whose disk is memory."""


class Transfer(Protocol):
    """Bytes on their way between the fast tier and a store."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def wait(self) -> None:
        """Waits until it has ended.

        Raises:
            GulliverError: it failed.
        """
        ...


class Store(Protocol):
    """Memory behind the fast tier.

    Attributes:
        name: name of the tier, such as ``disk``.
        capacity: most bytes that it holds.
        used: bytes that are allocated.
    """

    name: str
    capacity: int
    used: int

    def allocate(self, nbytes: int) -> int:
        """Reserves whole pages and returns their offset.

        Raises:
            GulliverError: they do not fit.
        """
        ...

    def free(self, offset: int, nbytes: int) -> None:
        """Gives back what `allocate` reserved."""
        ...

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Starts to read into a flat uint8 tensor that begins on a page."""
        ...

    def write(self, offset: int, data: Tensor) -> Transfer:
        """Starts to write a flat uint8 tensor, which must not change until the transfer ends."""
        ...

    def mapped(self, offset: int, nbytes: int) -> Tensor:
        """Shows bytes as a flat uint8 tensor that is read as it is touched, and can be written."""
        ...

    def close(self) -> None:
        """Ends what is under way, and frees everything."""
        ...


def whole_pages(nbytes: int) -> int:
    """Rounds bytes up to pages, at least one."""
    return max(-(-nbytes // BLOCK), 1) * BLOCK


class DiskStore:
    """Space in one file without a name, on a local disk.

    The space is reserved at once: a full disk is found here, not in the middle of a step.

    Args:
        folder: folder on the disk.
        capacity: size of the file, in bytes.
        engine: I/O engine that moves the bytes; the store makes its own by default.

    Attributes:
        direct: whether transfers go past the page cache.

    Raises:
        GulliverError: the folder does not exist or lies on another machine, or the disk has no room
            for the file.
    """

    name = "disk"

    def __init__(self, folder: str | Path, capacity: int, engine: Engine | None = None) -> None:
        self.folder, self.capacity, self.used = Path(folder), capacity // BLOCK * BLOCK, 0
        _check_folder(self.folder)
        if self.capacity < BLOCK:
            raise GulliverError(f"a disk store of {capacity} bytes: at least one page of {BLOCK}")
        require_space(self.folder, self.capacity)
        # No pages: bytes go straight between the file and the fast tier.
        self.engine = engine or default_engine(page_bytes=BLOCK, pages=1, copiers=1, writers=4)
        path = self.folder / f".gulliver-{os.getpid()}-{secrets.token_hex(6)}{PARTIAL}"
        self._file: File = self.engine.create(path, self.capacity)
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finally:
            path.unlink()
        self._extents = Extents()
        self._extents.add(0, self.capacity)
        own = self.engine if engine is None else None
        self._finish: Callable[[], object] = weakref.finalize(
            self, _close, self.engine, self._file, self._handle, own is not None, os.getpid()
        )
        self.direct = self._probe()

    def allocate(self, nbytes: int) -> int:
        """Reserves whole pages and returns their offset.

        Raises:
            GulliverError: they do not fit.
        """
        size = whole_pages(nbytes)
        found = self._extents.take(size)
        if found is None:
            raise GulliverError(
                f"the disk store in {self.folder} is full: {size} bytes needed, "
                f"{self.capacity - self.used} of {self.capacity} are free: give it more"
            )
        self.used += size
        return found[1]

    def free(self, offset: int, nbytes: int) -> None:
        """Gives back what `allocate` reserved."""
        size = whole_pages(nbytes)
        self._extents.give(0, offset, size)
        self.used -= size

    def read(self, offset: int, into: Tensor) -> Ticket:
        """Starts to read into a flat uint8 tensor that begins on a page."""
        return self.engine.read(self._file, offset, into.data_ptr(), into.numel())

    def write(self, offset: int, data: Tensor) -> Ticket:
        """Starts to write a flat uint8 tensor, which must not change until the transfer ends."""
        return self.engine.write(self._file, offset, data.data_ptr(), data.numel())

    def mapped(self, offset: int, nbytes: int) -> Tensor:
        """Shows bytes as a flat uint8 tensor that is read as it is touched, and can be written."""
        memory = mmap.mmap(self._handle, nbytes, offset=offset)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Ends what is under way, and frees the space."""
        self._finish()

    def _probe(self) -> bool:
        """Writes a page: does the disk take it, and past the page cache?"""
        before = self.engine.counters.direct
        page = page_aligned(BLOCK)
        page.zero_()
        try:
            self.write(0, page).wait()
        except BaseException:
            self.close()
            raise
        if self.engine.counters.direct > before:
            return True
        logging.getLogger("gulliver").warning(
            "the disk store in %s goes through the page cache, which a memory limit of the system "
            "counts: the file system or the I/O engine has no direct access",
            self.folder,
        )
        return False


def page_aligned(nbytes: int) -> Tensor:
    """Makes a flat uint8 tensor of memory that begins on a page, and returns to the system."""
    memory = mmap.mmap(-1, max(nbytes, 1))
    if nbytes >= 1 << 21 and hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer page faults when it is first touched, which would cost more than a copy.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def _close(engine: Engine, file: File, handle: int, own: bool, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child: the engine has no threads here
    engine.close_file(file)
    os.close(handle)
    if own:
        engine.close()


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise GulliverError(f"disk folder {folder} {what}: make it, or name one on a local disk")
    kind = _file_system(folder)
    if kind in NETWORK:
        raise GulliverError(
            f"disk folder {folder} lies on a network mount ({kind}): name a local disk"
        )
    if kind in IN_MEMORY:
        logging.getLogger("gulliver").warning(
            "disk folder %s lies in memory (%s): it saves none", folder, kind
        )


def _file_system(folder: Path, mounts: str = "/proc/self/mounts") -> str:
    """Returns the kind of file system that a folder lies on; empty where that is not known."""
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    path, best, kind = str(folder.resolve()), -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last of several on one point is the one that is seen.
        if inside and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind
