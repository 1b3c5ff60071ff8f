"""How many of a row of things each rank gets, and which regions of parameters that makes.

Things are dealt as evenly as can be, the first ranks getting one more. A thing may be several
features wide: an attention head is never cut, and with grouped heads it is a key-value head with
all the query heads that belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gulliver.memory import Region

Interval = tuple[int, int]
"""From the first up to, without, the second."""


def deal(count: int, size: int) -> tuple[int, ...]:
    """How many of `count` things each of `size` ranks gets."""
    each, more = divmod(count, size)
    return tuple(each + (rank < more) for rank in range(size))


def intervals(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """The places of parts that lie one after the other."""
    ends = tuple(accumulate(sizes))
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))


def share(total: int, units: int, size: int, place: int, blocks: int = 1) -> tuple[Interval, ...]:
    """What one rank holds of features that come in blocks of equal units.

    Args:
        total: features.
        units: indivisible things in each block; `total` for features one by one.
        size: ranks.
        place: of the rank.
        blocks: one after the other, each dealt alike: 3 for ``[q; k; v]``.

    Returns:
        The rank's part of each block.
    """
    width, block = total // (units * blocks), total // blocks
    start, stop = intervals(deal(units, size))[place]
    return tuple((b * block + start * width, b * block + stop * width) for b in range(blocks))


def region(shape: Sequence[int], dim: int, runs: Sequence[Interval]) -> Region:
    """The region of a parameter that lies in some runs along a dim."""
    return Region(tuple(shape), dim, tuple(runs))
