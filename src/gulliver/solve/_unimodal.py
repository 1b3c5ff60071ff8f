"""Candidate sizes for a cost that falls first and then rises."""

from __future__ import annotations


def geometric_sizes(smallest: int, largest: int, factor: float = 2.0) -> list[int]:
    """Returns sizes from `smallest`, each `factor` times the one before, up to `largest`."""
    # Where that is less than one more, as from 0, the next whole number follows.
    #
    # Steps are of equal ratio because a cost such as ``a / size + b * size`` changes as much from
    # one ratio to the next, however large the sizes are.
    sizes = [smallest]
    while max(sizes[-1] * factor, sizes[-1] + 1) <= largest:
        sizes.append(max(round(sizes[-1] * factor), sizes[-1] + 1))
    return sizes
