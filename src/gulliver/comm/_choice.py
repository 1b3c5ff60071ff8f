"""Direct exchange or ring for an all-reduce over gloo: the faster one, measured or by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gulliver.hardware import RING_BYTES, Cluster, Link, all_reduce_ways


@dataclass(frozen=True)
class ReduceChoice:
    """The algorithm chosen for an all-reduce over gloo, and why."""

    nbytes: int
    ranks: tuple[int, ...]  # Ranks of the world that take part
    # "ring", gloo's own, or "direct", an exchange from each rank to all others.
    kind: Literal["direct", "ring"]
    measured: Mapping[str, float]  # Seconds of each kind, where they were measured

    def __str__(self) -> str:
        what = f"all_reduce of {self.nbytes} bytes among {len(self.ranks)} ranks: {self.kind}"
        if not self.measured:
            return f"{what} (not measured: ring from {RING_BYTES} bytes on)"
        shown = ", ".join(f"{kind} {1e3 * s:.3g} ms" for kind, s in self.measured.items())
        return f"{what} (measured: {shown})"


_cluster: Cluster | None = None
_reduce_choices: dict[tuple[int, tuple[int, ...]], ReduceChoice] = {}


def use_links(cluster: Cluster | None) -> None:
    """Sets the cluster whose links decide how all-reduces run."""
    global _cluster
    _cluster = cluster
    _reduce_choices.clear()


def choose_all_reduce(nbytes: int, ranks: tuple[int, ...]) -> ReduceChoice:
    """The faster all-reduce over gloo, chosen once for each size."""
    key = nbytes, ranks
    if key not in _reduce_choices:
        known = _cluster is not None and max(ranks) < _cluster.size
        link = _cluster.link_between(ranks) if _cluster is not None and known else Link(0.0, 1.0)
        ways = all_reduce_ways(link, len(ranks), nbytes)
        if ways:
            kind = "ring" if ways["ring"] < ways["direct"] else "direct"
        else:
            kind = "ring" if nbytes >= RING_BYTES else "direct"
        _reduce_choices[key] = ReduceChoice(nbytes, ranks, kind, ways)
    return _reduce_choices[key]


def reduce_choices() -> list[ReduceChoice]:
    """The choices made for all-reduces so far."""
    return list(_reduce_choices.values())
