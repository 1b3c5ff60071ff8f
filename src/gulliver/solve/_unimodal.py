"""Candidate sizes for a cost that falls first and then rises."""

from __future__ import annotations


def geometric_sizes(smallest: int, largest: int, factor: float = 2.0) -> list[int]:
    """Returns sizes from `smallest`, each `factor` times the one before, up to `largest`.

    Steps are of equal ratio because a cost such as ``a / size + b * size`` changes as much from one
    ratio to the next, however large the sizes are.
    """
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(round(sizes[-1] * factor))
    return sizes
