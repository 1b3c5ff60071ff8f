"""A measured curve: seconds by size, where one rate does not say enough.

Caches, small matrices and protocols that change with the message bend the line that alpha and a
bandwidth draw. A curve is a few measured points with straight lines between, which is exact where
Hockney's model is, and says nothing of sizes far outside the points.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Curve:
    """Seconds that something took, by size."""

    # Ascending, in bytes (of matrix products, operations).
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    # The distance between the quartiles, relative to the median, of the middle point.
    spread: float | None = None

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise GulliverError("a curve needs sizes and as many seconds")
        if any(a >= b for a, b in itertools.pairwise(self.sizes)):
            raise GulliverError("the sizes of a curve must ascend")

    def at(self, size: float) -> float:
        """Seconds at a size: between points on a line, beyond the last at its rate."""
        right = bisect.bisect_left(self.sizes, size)
        if right == 0:
            return self.seconds[0]
        if right == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        x, y = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y[0] + (size - x[0]) / (x[1] - x[0]) * (y[1] - y[0])
