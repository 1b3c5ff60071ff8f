"""Uneven sharding: how many units each rank gets, and which regions of parameters that makes.

Units are dealt as evenly as can be, the first ranks getting one more. A unit may be several
features wide: an attention head is never cut, and with grouped heads it is a key-value head with
all the query heads that belong to it. Nothing is padded: padded features would change norms, the
number of parameters and what is saved.
"""

from __future__ import annotations

from gulliver.layout import Interval, deal, intervals


def share(total: int, units: int, size: int, place: int, blocks: int = 1) -> tuple[Interval, ...]:
    """Returns what one rank holds of features that come in blocks of equal units."""
    # A fused projection ``[q; k; v]`` is three blocks: cut as one, a rank would get queries without
    # their keys, so each block is dealt by itself.
    width, block = total // (units * blocks), total // blocks
    start, stop = intervals(deal(units, size))[place]
    return tuple((b * block + start * width, b * block + stop * width) for b in range(blocks))
