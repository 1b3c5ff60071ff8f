"""Stores below the fast tier, buffers of whole pages, and the states of managed tensors."""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io.engine import BLOCK, Engine, File, Ticket
from gulliver.io.files import PARTIAL, require_space
from gulliver.io.native import default_engine
from gulliver.solve.extents import Extents

WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which Python's mmap module lacks."""
HUGE = 1 << 21
ROOM = 4
"""Maximum ratio of a buffer's address range to its size."""


# [Note: pages] A fresh page is filled with zeros and costs a fault on first access, which takes
# longer than reading its content from a fast disk. Tensors have many sizes, so evicted and loaded
# tensors seldom have the same size, and freeing one buffer and allocating another would cost a
# fault for each page that moves.
#
# So a buffer has address space to grow, which costs nothing. A buffer that replaces another keeps
# its pages, and surplus pages are returned to the system immediately (MADV_DONTNEED), even if views
# of them are left.
@dataclass(frozen=True)
class _Room:
    """Address range of a buffer."""

    memory: mmap.mmap
    # Offset of the first byte, aligned to a page, or to a huge page if one fits.
    begin: int
    nbytes: int

    @classmethod
    def of(cls, nbytes: int, shared_with_forks: bool = False) -> _Room:
        # By default, forked processes see zeros in it. Copies of pages that change while a loader's
        # workers live would be memory outside of any budget, and a read in flight would end in the
        # child's copy.
        spare = HUGE if nbytes >= HUGE else 0
        memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not shared_with_forks:
            with suppress(OSError):  # other systems copy it
                memory.madvise(WIPE_ON_FORK)
        first = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        return cls(memory, -first % HUGE if spare else 0, nbytes)

    def shown(self, nbytes: int) -> Tensor:
        """Returns the first bytes as a flat uint8 tensor; later bytes must not be accessed."""
        # Fewer page faults on first access, which would cost more than a copy. Only for huge pages
        # entirely inside, because an accessed huge page is allocated as a whole.
        if self.nbytes >= HUGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
            inside = nbytes // HUGE * HUGE
            if inside:
                self.memory.madvise(mmap.MADV_HUGEPAGE, self.begin, inside)
            if self.nbytes > inside:
                rest = self.begin + inside, self.nbytes - inside
                self.memory.madvise(mmap.MADV_NOHUGEPAGE, *rest)
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=self.begin)

    def free(self, start: int, stop: int) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED, self.begin + start, stop - start)


def page_aligned(nbytes: int) -> Tensor:
    # Private memory, and counted as such; see `_Room.of` for forks.
    return _Room.of(nbytes).shown(nbytes)


def huge_pages(nbytes: int) -> Tensor:
    """Returns zeros in huge pages, if the system has them; forked processes see the content."""
    return _Room.of(nbytes, shared_with_forks=True).shown(nbytes)


class Pages:
    """Allocates buffers of whole pages, and resizes them in place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms: dict[int, _Room] = {}
        # Whether buffers keep pages, and can return them although views are left: on a CPU.
        self.keeps = device.type == "cpu" and hasattr(mmap, "MADV_NOHUGEPAGE")

    def fresh(self, size: int) -> Tensor:
        with torch.inference_mode(False):  # it must also be usable in training
            if self._device.type != "cpu":
                return torch.empty(size, dtype=torch.uint8, device=self._device)
            try:
                room = _Room.of(1 << (size - 1).bit_length() if self.keeps else size)
            except OSError:  # address space may also be limited
                room = _Room.of(size)
            memory = room.shown(size)
            self._rooms[memory.data_ptr()] = room
            return memory

    def wait_unused(self, memory: Tensor) -> None: ...

    def fits(self, memory: Tensor, size: int) -> bool:
        room = self._rooms.get(memory.data_ptr()) if self.keeps else None
        return room is not None and room.nbytes <= ROOM * size and size <= room.nbytes

    def resized(self, memory: Tensor, size: int) -> Tensor:
        """Resizes a buffer, keeping its pages; the old buffer becomes invalid."""
        room, before = self._rooms[memory.data_ptr()], memory.numel()
        if size < before:
            room.free(size, before)
        with torch.inference_mode(False):
            return room.shown(size)

    def forget(self, memory: Tensor) -> None:
        self._rooms.pop(memory.data_ptr(), None)

    def drop(self, memory: Tensor) -> None:
        room = self._rooms.pop(memory.data_ptr(), None)
        if room is not None and self.keeps:
            room.free(0, memory.numel())  # views of earlier buffers in this memory may still exist


# Stores: tiers below the fast tier, with asynchronous reads and writes.
#
# `DiskStore` is one file, unlinked as soon as it is open: it has no name that another run could
# mistake for its own, and the system frees it however the process ends. The threads of the native
# I/O engine bypass the page cache, so a memory limit of the system does not count it. `HostStore`
# is the pinned memory of a machine with a GPU.
#
# A store has offsets and bytes, without their meaning. Offsets and sizes are multiples of 4096.


NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
        *("afs", "fuse.sshfs", "fuse.glusterfs"),
    }
)
MOUNTS = "/proc/self/mounts"
IN_MEMORY = frozenset(("tmpfs", "ramfs"))


class Transfer(Protocol):
    """A transfer between the fast tier and a store."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None: ...


class Middle:
    """Callbacks for decisions about the fast tier; does nothing by default."""

    def expect(self, number: int) -> None:
        """Called when a read of a tensor is planned."""

    def end_prefetch(self, number: int) -> None:
        """Called when a tensor was read, or its planned read was cancelled."""

    def remove(self, number: int) -> None:
        """Called when a tensor was removed."""

    def end_step(self) -> None: ...

    def raise_write_error(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}


class Store(Protocol):
    """A memory tier below the fast tier."""

    # Name of the tier, such as ``disk``.
    name: str
    # Maximum bytes in the store.
    capacity: int
    # Whether the device waits for transfers, so that the host does not.
    in_stream: bool

    @property
    def used(self) -> int: ...

    @property
    def middle(self) -> Middle:
        """Callbacks for decisions about the fast tier."""
        ...

    def allocate(self, nbytes: int, owner: Any = None) -> int:
        """Reserves whole pages; returns their offset."""
        ...

    def free(self, offset: int, nbytes: int) -> None: ...

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Starts a read into a page-aligned flat uint8 tensor."""
        ...

    def write(self, offset: int, data: Tensor) -> Transfer:
        """Starts a write of a flat uint8 tensor, which must not change before the write ends."""
        ...

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        """Maps bytes as a flat, writable uint8 tensor."""
        ...

    def close(self) -> None: ...


def whole_pages(nbytes: int) -> int:
    return max(-(-nbytes // BLOCK), 1) * BLOCK


class DiskTransfer:
    """A disk transfer, which keeps its memory alive."""

    def __init__(self, ticket: Ticket, memory: Tensor, under_way: set[DiskTransfer]) -> None:
        self._ticket, self._memory, self._under_way = ticket, memory, under_way
        under_way.add(self)

    @property
    def done(self) -> bool:
        return self._ticket.done

    def wait(self) -> None:
        try:
            self._ticket.wait()
        finally:
            if self._ticket.done:
                self._under_way.discard(self)


class DiskStore:
    """A store in an unnamed file on a local disk."""

    # The space is reserved at the start, so that a full disk is detected here and not within a
    # step.
    #
    # [Note: no gaps] Freed space is reused for the same size; it is split or merged only when no
    # other space is left. So tensors whose sizes add up to the capacity always fit, in any order of
    # allocation: there are never more pieces of a size than tensors of that size.

    name = "disk"
    in_stream = False
    middle = Middle()

    def __init__(self, folder: str | Path, capacity: int, engine: Engine | None = None) -> None:
        self.folder, self.capacity, self.used = Path(folder), capacity // BLOCK * BLOCK, 0
        check_disk_folder(self.folder)
        if self.capacity < BLOCK:
            raise GulliverError(
                f"{capacity} bytes of disk ({folder}) are less than a page of {BLOCK} bytes: use "
                "a larger size, such as 100GiB"
            )
        require_space(self.folder, self.capacity)
        self._opened = _Opened(self.folder, self.capacity, engine)
        self._finish = weakref.finalize(self, self._opened.close)
        self._finish.atexit = False  # engines are closed at exit
        self._extents, self._left = Extents(), dict[int, list[int]]()
        self._extents.add(0, self.capacity)
        # Whether transfers bypass the page cache.
        self.direct = self._probe()

    def allocate(self, nbytes: int, owner: Any = None) -> int:
        size = whole_pages(nbytes)
        if left := self._left.get(size):
            self.used += size
            return left.pop()
        found = self._extents.take(size)
        if found is None:
            for many, offsets in self._left.items():
                for offset in offsets:
                    self._extents.give(0, offset, many)
            self._left.clear()
            found = self._extents.take(size)
        if found is None:
            raise GulliverError(
                f"the disk store in {self.folder} is full: {size} contiguous bytes are needed, but "
                f"only {self.capacity - self.used} of {self.capacity} are free; increase its size"
            )
        self.used += size
        return found[1]

    def free(self, offset: int, nbytes: int) -> None:
        size = whole_pages(nbytes)
        self._left.setdefault(size, []).append(offset)
        self.used -= size

    def read(self, offset: int, into: Tensor) -> DiskTransfer:
        opened = self._opened
        where = opened.source, offset, into.data_ptr(), into.numel()
        return DiskTransfer(opened.reader.read(*where), into, opened.under_way)

    def write(self, offset: int, data: Tensor) -> DiskTransfer:
        opened = self._opened
        where = opened.target, offset, data.data_ptr(), data.numel()
        return DiskTransfer(opened.writer.write(*where), data, opened.under_way)

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        memory = mmap.mmap(self._opened.handle, nbytes, offset=offset)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        self._finish()

    def _probe(self) -> bool:
        """Writes a page to test the disk and direct I/O; returns whether direct I/O works."""
        writer = self._opened.writer
        before = writer.counters.direct
        try:
            self.write(0, page_aligned(BLOCK).zero_()).wait()
        except BaseException:
            self.close()
            raise
        if writer.counters.direct > before:
            return True
        logging.getLogger("gulliver").warning(
            "the disk store in %s goes through the page cache, which a memory limit of the system "
            "counts: the file system or the I/O engine has no direct access",
            self.folder,
        )
        return False


class _Opened:
    """The file of a disk store, which stays open until all transfers have ended."""

    def __init__(self, folder: Path, capacity: int, engine: Engine | None) -> None:
        self.under_way: set[DiskTransfer] = set()
        self._process = os.getpid()
        self.reader, self.writer = (engine, engine) if engine else (_engine(), _engine())
        self._own = () if engine else (self.reader, self.writer)
        path = folder / f".gulliver-{os.getpid()}-{secrets.token_hex(6)}{PARTIAL}"
        try:
            self.target: File = self.writer.create(path, capacity)
            self.source: File = self.reader.open(path)
            self.handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            for own in self._own:
                own.close()
            raise
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child: the engine has no threads here
        for transfer in list(self.under_way):
            with suppress(GulliverError):
                transfer.wait()
        self.reader.close_file(self.source)
        self.writer.close_file(self.target)
        os.close(self.handle)
        for own in self._own:
            own.close()


def _engine() -> Engine:
    # The engine needs no pages, because bytes move directly between the file and the fast tier.
    return default_engine(page_bytes=BLOCK, pages=1, copiers=1, writers=2)


def check_disk_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise GulliverError(
            f"disk folder {folder} {what}; create it, or use a folder on a local disk"
        )
    kind = file_system(folder)
    if kind in NETWORK:
        raise GulliverError(
            f"disk folder {folder} is on a network mount ({kind}): use a local disk"
        )
    if kind in IN_MEMORY:
        logging.getLogger("gulliver").warning(
            "disk folder %s is in memory (%s), so it saves no memory", folder, kind
        )


def file_system(folder: Path) -> str:
    try:
        lines = Path(MOUNTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    path, best, kind = str(folder.resolve()), -1, ""
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of several mounts at one point, the last is visible.
        if inside and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


# Tensors of the memory manager, which are loaded and evicted as units.


class Residency(Enum):
    """Residency of a managed tensor."""

    AWAY = auto()
    """The tensor has no memory; the content is in the store, or zero."""
    QUEUED = auto()
    ARRIVING = auto()
    HERE = auto()
    LEAVING = auto()
    """The content is being written, after which its memory is freed."""


LEGAL_RESIDENCY = (
    (Residency.AWAY, Residency.QUEUED),
    (Residency.QUEUED, Residency.ARRIVING),  # there is memory, and the read begins
    (Residency.QUEUED, Residency.HERE),  # there is nothing to read
    (Residency.QUEUED, Residency.AWAY),  # no longer wanted
    (Residency.ARRIVING, Residency.HERE),
    (Residency.ARRIVING, Residency.AWAY),  # the read failed
    (Residency.HERE, Residency.LEAVING),
    (Residency.HERE, Residency.AWAY),  # the store has its content, or it is not needed
    (Residency.LEAVING, Residency.AWAY),
    (Residency.LEAVING, Residency.HERE),  # the write failed, and there is room for it
)
RESIDENT = (Residency.ARRIVING, Residency.HERE, Residency.LEAVING)
"""States that occupy memory in the fast tier."""


@dataclass(eq=False)
class ManagedTensor:
    """A tensor that a `Manager` keeps in the fast tier or in a store."""

    name: str
    kind: str
    numel: int
    dtype: torch.dtype
    # Flat tensor of `dtype` while in the fast tier, else None. Its memory moves between uses:
    # create new views after each `Manager.use`.
    tensor: Tensor | None = None
    number: int = -1
    # Whether its content is soon discarded.
    brief: bool = False
    residency: Residency = Residency.AWAY
    # Whole pages in the fast tier that it occupies.
    memory: Tensor | None = field(default=None, repr=False)
    # Offset of its content in the store; None if the store does not have it.
    offset: int | None = field(default=None, repr=False)
    # Addresses at which `view` mapped this offset; a checkpoint may be copying from there.
    shown: set[int] = field(default_factory=set, repr=False)
    transfer: Transfer | None = field(default=None, repr=False)
    # Whether a load has content to read.
    reads: bool = field(default=False, repr=False)
    # Whether its memory is filled with zeros on load.
    zero: bool = field(default=False, repr=False)
    # Whether others may still read its memory, which is not reused until they end.
    viewed: bool = field(default=False, repr=False)
    # Whether its memory is left to existing views when it is evicted.
    given: bool = field(default=False, repr=False)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def size(self) -> int:
        return whole_pages(self.nbytes)

    @property
    def kept(self) -> int:
        """Bytes that the tensor occupies in some tier even while it is not in use."""
        return 0 if self.brief else self.size

    @property
    def done(self) -> bool:
        return self.transfer is None or self.transfer.done

    def enter(self, residency: Residency) -> None:
        assert (self.residency, residency) in LEGAL_RESIDENCY, (
            f"{self.name}: {self.residency} -> {residency}"
        )
        self.residency, self.tensor = residency, None
        if residency is Residency.HERE:
            assert self.memory is not None
            self.tensor = typed(self.memory, self.nbytes, self.dtype)


def typed(memory: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
    # In inference mode a view of another dtype would be an inference tensor, which later training
    # could not save for backward.
    with torch.inference_mode(False):
        return memory[:nbytes].view(dtype)
