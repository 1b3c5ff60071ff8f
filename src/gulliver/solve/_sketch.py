"""Counts how often rows were used, more for what was of late, in memory that does not grow.

A count-min sketch (Cormode and Muthukrishnan, 2005) with conservative update (Estan and Varghese,
2002): each row has a counter in each of a few tables, which it shares with others; the smallest of
them is its estimate, never too low.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
LARGE = 2.0**20


# [Note: decay] Counts of long ago weigh less by making those of now weigh more: the unit grows by a
# factor with every tick. What is not used keeps its number, so that numbers which were read at
# different times may be compared. When the unit becomes large all are divided by it.
class DecayedCounts:
    """A sketch of decayed counts."""

    def __init__(self, width: int, half_life: float, depth: int = 4) -> None:
        self._bits = max(width - 1, 1).bit_length()
        # Counters, (depth, width).
        self.tables = np.zeros((depth, 1 << self._bits), np.float32)
        self._growth = 2.0 ** (1.0 / half_life)
        # Weight of one use now.
        self.unit = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.tables.nbytes

    def tick(self) -> float:
        """Lets all counts age; returns what kept estimates are to be multiplied by, mostly 1."""
        self.unit *= self._growth
        if self.unit < LARGE:
            return 1.0
        factor = 1.0 / self.unit
        self.tables *= np.float32(factor)
        self.unit = 1.0
        return factor

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Counts uses of distinct rows, and returns their estimates."""
        places = self._places(rows)
        now = self._smallest(places) + (counts * self.unit).astype(np.float32)
        for table, place in zip(self.tables, places, strict=True):
            np.maximum.at(table, place, now)
        return now

    def estimate(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the estimates of rows, in multiples of which `unit` is one use now."""
        return self._smallest(self._places(rows))

    def _places(self, rows: NDArray[np.int64]) -> list[NDArray[np.uint64]]:
        keys, shift = rows.astype(np.uint64), np.uint64(64 - self._bits)
        mixed = (keys ^ (keys >> np.uint64(31))) * np.uint64(0xFF51AFD7ED558CCD)
        return [((mixed ^ (mixed >> np.uint64(29))) * odd) >> shift for odd in self._odd()]

    def _odd(self) -> NDArray[np.uint64]:
        return _ODD[: len(self.tables)]

    def _smallest(self, places: list[NDArray[np.uint64]]) -> NDArray[np.float32]:
        found = self.tables[0][places[0]]
        for table, place in zip(self.tables[1:], places[1:], strict=True):
            found = np.minimum(found, table[place])
        return found
