"""Arithmetic of sliding windows: which inputs an output needs, and how many outputs there are.

A convolution, a pooling and a slice are the same thing along one dim: output `o` is made from the
`span` positions that begin at ``first + o * stride``. Everything here is plain numbers, so that all
ranks compute each other's needs alike and no rank has to ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.layout import Interval


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


def overlap(a: Interval, b: Interval) -> Interval:
    """Returns the positions in both intervals; an empty interval has its ends alike."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
