"""Errors that every rank raises together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from gulliver.comm._collectives import gather_objects
from gulliver.errors import GulliverError

T = TypeVar("T")


def raise_on_any_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Calls a function on every rank and returns its value, unless it failed on any of them.

    Args:
        function: function to call; it must not communicate.
        group: ranks that call it; None for the world.

    Raises:
        Exception: the error of this rank.
        GulliverError: the error of another rank.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = function()
    except Exception as error:
        failure = error
    # Ranks must not go on to a collective operation that a failed rank never enters.
    reasons = gather_objects(
        None if failure is None else str(failure) or type(failure).__name__, group
    )
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise GulliverError(f"rank {rank} failed: {reason}")
    return value  # type: ignore[return-value]
