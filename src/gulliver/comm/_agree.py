"""Runs an action on all ranks; none goes on where one of them failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gulliver.comm._collectives import Group, gather_objects
from gulliver.errors import GulliverError

T = TypeVar("T")


def raise_on_any_rank(function: Callable[[], T], group: Group = None) -> T:
    """Calls a function on every rank and returns its value, unless it failed on any rank.

    Every rank of the group calls this. One small gather, so that no rank waits in a later
    collective for one that has raised.

    Args:
        function: function to call; it starts no collective after a point where it can fail.
        group: ranks that call it; None for the whole world.

    Raises:
        Exception: what the function raised on this rank.
        GulliverError: it failed on another rank, which is named.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = function()
    except Exception as error:
        failure = error
    reason = None if failure is None else str(failure) or type(failure).__name__
    reasons = gather_objects(reason, group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(reasons):
        if other is not None:
            raise GulliverError(f"rank {rank} failed: {other}")
    return value  # type: ignore[return-value]
