"""Read locks: a snapshot still reads memory that the next step is about to write.

A snapshot that is copied while training goes on holds a read lock (`ReadLock`) on memory that it
has not copied yet. Whoever writes such memory in place asks `before_write` first, and is held up
for just that part. Autograd's version counters would only tell of a write when it is too late.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

ASKS = "asks_before_write"
"""Attribute of an optimizer that calls `before_write` itself, part by part; it is a function that
yields the tensors that a step changes."""


class ReadLock(Protocol):
    """A read lock on memory."""

    def release(self, storages: set[int] | None) -> None:
        """Returns once it needs these storages no more; None means all of its own."""
        ...


_read_locks: list[ReadLock] = []
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
# A child has its memory to itself, and no threads that could give a read lock up.
os.register_at_fork(after_in_child=_read_locks.clear)


def add_read_lock(lock: ReadLock) -> None:
    """Makes `before_write` wait for a read lock."""
    _read_locks.append(lock)


def drop_read_lock(lock: ReadLock) -> None:
    """Forgets a read lock; one that is not there is no error."""
    if lock in _read_locks:
        _read_locks.remove(lock)


def add_writer(optimizer: Any) -> None:
    """Notes an optimizer whose steps call `before_write` for all that they change."""
    _writers.add(optimizer)


def writers() -> tuple[Any, ...]:
    """Returns the optimizers that were noted and still exist."""
    return tuple(_writers)


def storage_of(tensor: Tensor) -> int:
    """Address of the memory behind a tensor; views of it have the same."""
    return tensor.untyped_storage().data_ptr()


def any_read_lock() -> bool:
    """Whether there is a read lock on any memory."""
    return bool(_read_locks)


def before_write(tensors: Iterable[Tensor]) -> None:
    """Waits until nobody reads the memory of `tensors` any more.

    Costs nothing while there are no read locks. Call it before writing in place what a checkpoint
    may be copying, where no torch optimizer does the writing.
    """
    if _read_locks:
        before_write_at({storage_of(tensor) for tensor in tensors})


def before_write_at(storages: set[int]) -> None:
    """Waits until nobody reads the memory that begins at these addresses any more."""
    for lock in tuple(_read_locks):
        lock.release(storages)


def before_any_write() -> None:
    """Waits until no read lock is left on any memory."""
    for lock in tuple(_read_locks):
        lock.release(None)
