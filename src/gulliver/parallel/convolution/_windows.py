"""Arithmetic of sliding windows: which inputs an output needs, and how many outputs there are.

A convolution, a pooling and a slice are the same thing along one dim: output `o` is made from the
`span` positions that begin at ``first + o * stride``. Everything here is plain numbers, so that all
ranks compute each other's needs alike and no rank has to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Interval = tuple[int, int]
"""First position and one past the last."""


@dataclass(frozen=True)
class SlidingWindow:
    """A window that slides along one dim."""

    first: int = 0  # Position at which the window of output 0 begins; negative in padding
    stride: int = 1  # Distance between the windows of neighbouring outputs
    span: int = 1  # Number of positions that a window covers

    def count(self, extent: int, after: int = 0) -> int:
        """Returns the number of outputs."""
        return max(0, (extent + after - self.first - self.span) // self.stride + 1)

    def needs(self, start: int, stop: int) -> Interval:
        """Returns the positions that outputs `start` up to `stop`, at least one, are made from."""
        return start * self.stride + self.first, (stop - 1) * self.stride + self.first + self.span


IDENTITY = SlidingWindow()


def even(extent: int, parts: int, grain: int = 1) -> tuple[int, ...]:
    """Splits an extent as evenly as possible in multiples of `grain`, larger parts first."""
    units = extent // grain
    return tuple(grain * (units // parts + (part < units % parts)) for part in range(parts))


def runs(sizes: Sequence[int]) -> tuple[Interval, ...]:
    """Returns the intervals of parts that lie one after the other."""
    ends = tuple(accumulate(sizes))
    return tuple((end - size, end) for end, size in zip(ends, sizes, strict=True))


def overlap(a: Interval, b: Interval) -> Interval:
    """Returns the positions in both intervals; an empty interval has its ends alike."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
