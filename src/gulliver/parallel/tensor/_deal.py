"""Uneven sharding: how many units each rank gets, and which regions of parameters that makes.

Units are dealt as evenly as can be, the first ranks getting one more. A unit may be several
features wide: an attention head is never cut, and with grouped heads it is a key-value head with
all the query heads that belong to it. Nothing is padded: padded features would change norms, the
number of parameters and what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gulliver.memory import Region

Interval = tuple[int, int]
"""First index and one past the last."""


def deal(count: int, size: int) -> tuple[int, ...]:
    """Returns how many of `count` units each of `size` ranks gets."""
    each, more = divmod(count, size)
    return tuple(each + (rank < more) for rank in range(size))


def intervals(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Returns the intervals of parts of some sizes that lie one after the other."""
    ends = tuple(accumulate(sizes))
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))


def share(total: int, units: int, size: int, place: int, blocks: int = 1) -> tuple[Interval, ...]:
    """Returns what one rank holds of features that come in blocks of equal units."""
    # A fused projection ``[q; k; v]`` is three blocks: cut as one, a rank would get queries without
    # their keys, so each block is dealt by itself.
    width, block = total // (units * blocks), total // blocks
    start, stop = intervals(deal(units, size))[place]
    return tuple((b * block + start * width, b * block + stop * width) for b in range(blocks))


def region(shape: Sequence[int], dim: int, runs: Sequence[Interval]) -> Region:
    """Returns the region of a parameter that lies in some intervals along a dim."""
    return Region(tuple(shape), dim, tuple(runs))
