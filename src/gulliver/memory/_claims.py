"""Who still reads memory that somebody else is about to write.

A snapshot that is copied while training goes on *claims* the memory it has not copied yet. Whoever
writes such memory in place asks `before_write` first, and is held up for just that part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

ASKS = "asks_before_write"
"""Attribute of an optimizer that calls `before_write` itself, part by part."""


class Claim(Protocol):
    """Something that reads memory for a while."""

    def release(self, storages: set[int] | None) -> None:
        """Returns once it needs these storages no more; None means all of its own."""
        ...


_claims: list[Claim] = []
# A child has its memory to itself, and no threads that could give a claim up.
os.register_at_fork(after_in_child=_claims.clear)


def add_claim(claim: Claim) -> None:
    """Lets `before_write` wait for a claim."""
    _claims.append(claim)


def drop_claim(claim: Claim) -> None:
    """Forgets a claim; one that is not there is none."""
    if claim in _claims:
        _claims.remove(claim)


def storage_of(tensor: Tensor) -> int:
    """Where the memory behind a tensor begins; views of it have the same."""
    return tensor.untyped_storage().data_ptr()


def is_claimed() -> bool:
    """Whether anybody reads memory for a while."""
    return bool(_claims)


def before_write(tensors: Iterable[Tensor]) -> None:
    """Waits until nobody reads the memory of `tensors` any more.

    Costs nothing while there are no claims. Call it before writing in place what a checkpoint may
    be copying, where no torch optimizer does the writing.
    """
    if not _claims:
        return
    storages = {storage_of(tensor) for tensor in tensors}
    for claim in tuple(_claims):
        claim.release(storages)


def before_any_write() -> None:
    """Waits until nobody reads any memory that is claimed."""
    for claim in tuple(_claims):
        claim.release(None)
