"""What an I/O engine is given and gives back, and what of it is refused before anything is done."""

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
        path: the file.
        offset: byte at which it failed; None where the call has none (opening, fsync).
        errno: of the system; `errno.ENODATA` where a file ended early.
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
        """A copy to raise: one failure may be waited for by several threads."""
        return IoError(self.action, self.path, self.offset, self.errno)


class File:
    """A file that an engine has open; only that engine takes it.

    Attributes:
        path: as it was opened.
        nbytes: its size when it was opened, or what was asked of `create`.
    """

    path: Path
    nbytes: int


@dataclass(frozen=True)
class View:
    """Elements that lie apart in memory, one behind the other in the row-major order of `sizes`.

    Attributes:
        address: of the first.
        itemsize: bytes of an element.
        sizes: of the dims.
        strides: elements from one to the next, along each dim.
    """

    address: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.sizes) * self.itemsize


@dataclass(frozen=True)
class Page:
    """A page of the pool, lent by `Engine.acquire`.

    Attributes:
        index: its number in the pool.
        address: where it begins, a multiple of 4096.
        nbytes: its size.
    """

    index: int
    address: int
    nbytes: int

    @property
    def array(self) -> NDArray[np.uint8]:
        """Its memory, (nbytes,); to be used only until it is written or released."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


@dataclass(frozen=True)
class Counters:
    """What an engine has done so far.

    Attributes:
        written: bytes.
        read: bytes.
        direct: of both together, the bytes that went past the page cache.
        pending: requests under way or waiting.
        free_pages: pages that nobody has.
    """

    written: int
    read: int
    direct: int
    pending: int
    free_pages: int


@dataclass(frozen=True)
class Request:
    """What is submitted, whichever engine takes it.

    Attributes:
        kind: what is to be done; `page` writes an acquired page.
        file: file that it is done to.
        offset: first byte in the file.
        address: first byte in memory; of a staged request the page is not known yet.
        nbytes: number of bytes.
        priority: the higher goes first.
        table: (n, 2), address and bytes of the segments that are staged.
        views: by the number of a segment: what it is of, where its elements lie apart.
        page: acquired page that is written.
        checksum: whether what is read is to be summed.
    """

    kind: Literal["stage", "page", "write", "read", "sync"]
    file: File
    offset: int = 0
    address: int = 0
    nbytes: int = 0
    priority: int = 0
    table: NDArray[np.int64] | None = None
    views: Mapping[int, View] = field(default_factory=dict)
    page: Page | None = None
    checksum: bool = False


def check_process(owner: int) -> None:
    """Refuses to use an engine, or to wait for its ticket, in another process than its own."""
    if os.getpid() != owner:
        raise GulliverError(
            "this I/O engine belongs to the parent process and has no threads here: make another "
            "one after forking"
        )


def check_range(offset: int, nbytes: int) -> None:
    """Refuses what no file has."""
    if offset < 0 or nbytes < 0:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: neither can be negative")
    if offset + nbytes >= 2**63:
        raise GulliverError(f"offset {offset} and {nbytes} bytes: no file is that large")


def check_segments(segments: NDArray[np.int64], page_bytes: int) -> NDArray[np.int64]:
    """Refuses segments that no page can hold.

    Args:
        segments: (n, 2), address and bytes.
        page_bytes: what they may have together.

    Returns:
        The same, contiguous and of 64 bits.
    """
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


def check_views(table: NDArray[np.int64], views: Mapping[int, View]) -> None:
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
