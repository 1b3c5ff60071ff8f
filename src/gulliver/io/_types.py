"""Arguments and results of the I/O engines, and the checks before anything is done."""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError

BLOCK = 4096
"""Bytes: alignment of pages, and of whatever goes past the page cache."""
Auto = bool | Literal["auto"]
Call = Literal["open", "fallocate", "write", "read", "fsync", "truncate"]
CALLS: tuple[Call, ...] = ("open", "fallocate", "write", "read", "fsync", "truncate")


class IoError(GulliverError):
    """A file could not be opened, written, read or forced to the disk.

    Attributes:
        path: file that it is about.
        offset: byte at which it failed; None where the call has none (opening, fsync).
        errno: error number of the system; `errno.ENODATA` where a file ended early.
    """

    def __init__(self, action: str, path: str | Path, offset: int | None, number: int) -> None:
        where = "" if offset is None else f" at byte {offset}"
        reason = "the file ends there" if number == errno.ENODATA else os.strerror(number)
        super().__init__(f"cannot {action} {path}{where}: {reason}")
        self.action = action
        self.path = Path(path)
        self.offset = offset
        self.errno = number

    def __reduce__(self) -> tuple[type[IoError], tuple[str, Path, int | None, int]]:
        return IoError, (self.action, self.path, self.offset, self.errno)

    def again(self) -> IoError:
        """Copies the error: several threads may raise one failure, each with its own traceback."""
        return IoError(self.action, self.path, self.offset, self.errno)


class File:
    """A file that an engine has open; only that engine takes it."""

    # Path that it was opened by.
    path: Path
    # Size when it was opened, or the size that `create` was given.
    nbytes: int


@dataclass(frozen=True)
class StridedView:
    """Elements that lie apart in memory, one behind the other in the row-major order of `sizes`.

    Attributes:
        address: address of the first element.
        itemsize: bytes of an element.
        sizes: size of each dim, in elements.
        strides: stride of each dim, in elements.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Page:
    """A page of the pool, lent by `Engine.acquire`.

    Attributes:
        index: number of the page in the pool.
        address: address of its first byte, a multiple of 4096.
        nbytes: size of the page.
    """

    index: int
    address: int
    nbytes: int

    @property
    def array(self) -> NDArray[np.uint8]:
        """The page's memory, (nbytes,); to be used only until it is written or released."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


@dataclass(frozen=True)
class Counters:
    """Counts of what an engine has done so far."""

    written: int
    read: int
    # Bytes, written and read, that went past the page cache.
    direct: int
    # Number of requests in flight or waiting.
    pending: int
    # Number of pages that nobody has.
    free_pages: int


@dataclass(frozen=True)
class Request:
    """A request as it is submitted, to either engine."""

    # Operation; `page` writes an acquired page.
    kind: Literal["stage", "page", "write", "read", "sync"]
    # File to read, write or sync.
    file: File
    # First byte in the file.
    offset: int = 0
    # First byte in memory; of a staged request the page is not known yet.
    address: int = 0
    # Number of bytes.
    nbytes: int = 0
    # Order of service; the higher goes first.
    priority: int = 0
    # Table (n, 2), address and bytes of the segments that are staged.
    table: NDArray[np.int64] | None = None
    # Views of segments whose elements lie apart, by the number of the segment.
    views: Mapping[int, StridedView] = field(default_factory=dict)
    # Acquired page that is written.
    page: Page | None = None
    # Whether what is read is to be summed.
    checksum: bool = False


def check_process(owner: int) -> None:
    """Refuses to use an engine, or to wait for its ticket, in another process than its own."""
    if os.getpid() != owner:
        raise GulliverError(
            "this I/O engine belongs to the parent process and has no threads here: make another "
            "one after forking"
        )


def check_range(offset: int, nbytes: int) -> None:
    """Refuses a negative range, or one beyond any file."""
    if offset < 0 or nbytes < 0:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: neither can be negative")
    if offset + nbytes >= 2**63:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: no file is that large")


def check_segments(segments: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    """Refuses segments that no page can hold."""
    table = np.ascontiguousarray(segments, dtype=np.int64)
    if table.size == 0:
        return table.reshape(0, 2)
    if table.ndim != 2 or table.shape[1] != 2:
        raise GulliverError(f"segments have shape {table.shape}: (n, 2), address and bytes")
    if int(table[:, 1].min()) < 0:
        raise GulliverError("a segment has a negative size")
    # Floats: a sum of 64-bit integers could wrap around.
    if float(table[:, 1].sum(dtype=np.float64)) > page_bytes:
        total = sum(table[:, 1].tolist())
        raise GulliverError(f"segments of {total} bytes do not fit a page of {page_bytes}")
    return table


def check_views(table: NDArray[np.int64], views: Mapping[int, StridedView]) -> None:
    """Refuses segments that are not whole elements of their views."""
    for number, view in views.items():
        begin, nbytes = (int(value) for value in table[number])
        if begin % view.itemsize or nbytes % view.itemsize:
            raise GulliverError(f"bytes {begin} to {begin + nbytes} of a view cut its elements")
        if begin < 0 or begin + nbytes > view.nbytes:
            raise GulliverError(f"a view of {view.nbytes} bytes has no byte {begin + nbytes}")


def check_sizes(page_bytes: int, pages: int, copiers: int, writers: int, queue: int) -> None:
    """Refuses an engine that could not work."""
    if page_bytes < BLOCK or page_bytes % BLOCK:
        raise GulliverError(f"page_bytes {page_bytes} is not a positive multiple of {BLOCK}")
    sizes = {"pages": pages, "copiers": copiers, "writers": writers, "queue": queue}
    for name, value in sizes.items():
        if value < 1:
            raise GulliverError(f"{name} {value}: at least 1")
