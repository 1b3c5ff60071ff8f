"""Choice of the torus that the collectives of a step follow, if any, by predicted seconds.

Every way to factorise the ranks into up to three axes is considered, on the links that a cluster
has; what they cost is computed by `gulliver.hardware`. All ranks at once win where a torus is not
predicted to be faster by a margin: predictions are not better than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gulliver.comm._collectives import broadcast_object
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, torus_seconds

MOST_AXES = 3
MARGIN = 0.05
"""Share of the seconds by which a torus must be faster to be taken."""
NAMES = {2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
"""Names of axes that are not the cluster's own."""


@dataclass(frozen=True)
class ChosenAxes:
    """The chosen torus, if any, and the predictions behind the choice."""

    axes: dict[str, int]  # Name and size of each axis, outer to inner; empty for all ranks at once
    # Ranks in the order of their places on the axes; None for 0, 1, 2 ...
    order: tuple[int, ...] | None
    seconds: float  # Predicted seconds of the collectives along `best`, the fastest torus
    flat_s: float  # Predicted seconds with all ranks at once
    best: dict[str, int]  # The fastest torus, chosen or not; empty where the ranks make none

    def __str__(self) -> str:
        torus, flat = f"{1e3 * self.seconds:.3g} ms", f"{1e3 * self.flat_s:.3g} ms"
        if self.axes:
            return f"torus {self.axes}: {torus} against {flat} flat"
        return f"flat: {flat}" + (f" against {torus} as torus {self.best}" if self.best else "")


def choose_axes(
    cluster: Cluster, collectives: Sequence[tuple[str, int]], size: int | None = None
) -> ChosenAxes:
    """Chooses the axes of collectives; every rank calls it and gets rank 0's result.

    Args:
        cluster: links of the ranks, measured or described.
        collectives: names ("all_reduce", "reduce_scatter", "all_gather") and bytes of the whole
            tensor of each, such as `gulliver.hardware.zero_collectives` lists for a step.
        size: ranks of the world, to be checked; None for what the cluster has.

    Raises:
        GulliverError: the cluster has another number of ranks.
    """
    if size is not None and cluster.size != size:
        raise GulliverError(
            f"the cluster {cluster.name!r} has {cluster.size} ranks, and there are {size}: pass "
            f"cluster.resized({size}), or measure it with gulliver probe"
        )
    found = {sizes: torus_seconds(cluster, sizes, collectives) for sizes in tori(cluster.size)}
    flat_s = torus_seconds(cluster, [cluster.size], collectives)
    sizes = min(found, key=lambda sizes: (found[sizes], len(sizes)), default=())
    best = dict(zip(_names(cluster, sizes), sizes, strict=True))
    seconds = found.get(sizes, flat_s)
    taken = best if seconds < (1 - MARGIN) * flat_s else {}
    # The ranks may have been given different clusters, and must go one way.
    return broadcast_object(
        ChosenAxes(taken, cluster.rank_order if taken else None, seconds, flat_s, best)
    )


def tori(ranks: int, axes: int = MOST_AXES) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of a number into two factors or more, each above 1."""
    for first in range(2, ranks // 2 + 1):
        if ranks % first == 0:
            yield first, ranks // first
            if axes > 2:
                yield from ((first, *rest) for rest in tori(ranks // first, axes - 1))


def _names(cluster: Cluster, sizes: tuple[int, ...]) -> Sequence[str]:
    own = [axis for axis in cluster.axes if axis.size > 1]
    if sizes == tuple(axis.size for axis in own):
        return [axis.name for axis in own]
    return NAMES.get(len(sizes), ())
