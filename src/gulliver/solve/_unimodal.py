"""Sizes to try where the cost falls first and rises then."""

from __future__ import annotations


def geometric_sizes(smallest: int, largest: int, factor: float = 2.0) -> list[int]:
    """Sizes from `smallest`, each `factor` times the one before; the last is at most `largest`."""
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(round(sizes[-1] * factor))
    return sizes
