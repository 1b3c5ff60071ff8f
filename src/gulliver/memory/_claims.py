"""Read locks: a snapshot still reads memory that the next step is about to write.

A snapshot that is copied while training goes on holds a read lock (a `Claim`) on the memory that it
has not copied yet. Whoever writes such memory in place asks `before_write` first, and is held up
for just that part. Autograd's version counters would only tell of a write when it is too late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

ASKS = "asks_before_write"
"""Attribute of an optimizer that calls `before_write` itself, part by part."""


class Claim(Protocol):
    """A read lock on memory."""

    def release(self, storages: set[int] | None) -> None:
        """Returns once it needs these storages no more; None means all of its own."""
        ...


_claims: list[Claim] = []
# A child has its memory to itself, and no threads that could give a read lock up.
os.register_at_fork(after_in_child=_claims.clear)


def add_claim(claim: Claim) -> None:
    """Lets `before_write` wait for a read lock."""
    _claims.append(claim)


def drop_claim(claim: Claim) -> None:
    """Forgets a read lock; one that is not there is no error."""
    if claim in _claims:
        _claims.remove(claim)


def storage_of(tensor: Tensor) -> int:
    """Address of the memory behind a tensor; views of it have the same."""
    return tensor.untyped_storage().data_ptr()


def is_claimed() -> bool:
    """Whether there is a read lock on any memory."""
    return bool(_claims)


def before_write(tensors: Iterable[Tensor]) -> None:
    """Waits until nobody reads the memory of `tensors` any more.

    Costs nothing while there are no read locks. Call it before writing in place what a checkpoint
    may be copying, where no torch optimizer does the writing.
    """
    if _claims:
        before_write_at({storage_of(tensor) for tensor in tensors})


def before_write_at(storages: set[int]) -> None:
    """Waits until nobody reads the memory that begins at these addresses any more."""
    for claim in tuple(_claims):
        claim.release(storages)


def before_any_write() -> None:
    """Waits until no read lock is left on any memory."""
    for claim in tuple(_claims):
        claim.release(None)
