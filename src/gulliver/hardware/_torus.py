"""What the collectives of a step cost on a torus of any shape, laid over a cluster's places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Cluster, Link
from gulliver.hardware._costs import collective_seconds

Collectives = Sequence[tuple[str, int]]
"""Names of collectives, and bytes of the whole tensor of each."""


# [Note: like with like] A cluster that was measured knows its own collectives on its own axes and
# on all ranks at once, and of other shapes only what alpha and bandwidth say, which leave out what
# processors do. So a shape that was not measured is not compared with one that was: its seconds are
# those of all ranks at once, as measured, in the proportion in which the formulas see the two.
def torus_seconds(cluster: Cluster, sizes: Sequence[int], collectives: Collectives) -> float:
    """Seconds of collectives, one after the other, over all places of a cluster.

    Args:
        cluster: measured or described.
        sizes: ranks along each axis of the torus, outer to inner; one size is all ranks at once.
        collectives: names and bytes of what is run.

    Raises:
        GulliverError: the sizes do not make the cluster.
    """
    if math.prod(sizes) != cluster.size:
        shown = " x ".join(map(str, sizes))
        raise GulliverError(f"{shown} is no torus of {cluster.size} ranks")
    axes, flat = torus_links(cluster, sizes), torus_links(cluster, [cluster.size])
    if _measured(axes, collectives) == _measured(flat, collectives):
        return _sum(axes, collectives)
    bare = _sum(_bare(axes), collectives) / _sum(_bare(flat), collectives)
    return bare * _sum(flat, collectives)


def torus_links(cluster: Cluster, sizes: Sequence[int]) -> list[tuple[int, Link]]:
    """Size and link of each axis of a torus: the slowest link that one of its lines crosses."""
    found, stride = [], cluster.size
    for size in sizes:
        stride //= size
        if size > 1:
            found.append((size, _slowest(cluster, stride, size)))
    return found


def _slowest(cluster: Cluster, stride: int, size: int) -> Link:
    """The link of the outermost axis that lines of every `stride`-th place cross."""
    lines = [
        (block + place, block + place + stride * (size - 1))
        for block in range(0, cluster.size, stride * size)
        for place in range(stride)
    ]
    # The ends of a line are the farthest apart of its places.
    return cluster.axes[min(cluster.level(low, high) for low, high in lines)].link


def _measured(axes: Sequence[tuple[int, Link]], collectives: Collectives) -> bool:
    names = {name for name, _ in collectives}
    return not names or all(
        any(along.ranks == size and names <= along.collectives.keys() for along in link.along)
        for size, link in axes
    )


def _bare(axes: Sequence[tuple[int, Link]]) -> list[tuple[int, Link]]:
    return [(size, replace(link, messages=None, along=())) for size, link in axes]


def _sum(axes: Sequence[tuple[int, Link]], collectives: Collectives) -> float:
    return sum(collective_seconds(axes, name, count) for name, count in collectives)
