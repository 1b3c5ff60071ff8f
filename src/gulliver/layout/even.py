"""Even partitions, whose parts differ by at most one unit, and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Interval = tuple[int, int]
"""First index, and one past the last."""


def split_evenly(count: int, parts: int) -> tuple[int, ...]:
    """Splits a count as evenly as possible, larger parts first."""
    each, more = divmod(count, parts)
    return tuple(each + (part < more) for part in range(parts))


def intervals(sizes: Sequence[int]) -> tuple[Interval, ...]:
    ends = tuple(accumulate(sizes))
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))
