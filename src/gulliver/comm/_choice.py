"""Flat or torus, direct or ring: which is predicted to be faster for so many bytes.

The predictions come from `gulliver.hardware`, or from whatever function the caller passes; nothing
here knows what a link costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gulliver.hardware import RING_BYTES, Cluster, Link, all_reduce_ways, collective_seconds

Kind = Literal["flat", "torus"]
Predict = Callable[[str, int], float]
"""Seconds of a collective ("all_reduce", "reduce_scatter", "all_gather") of so many bytes."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    # Name of the collective.
    collective: str
    # Bytes of the whole tensor.
    nbytes: int
    # The faster of the two.
    kind: Kind
    # Seconds over all ranks at once.
    predicted_flat_s: float
    # Seconds axis by axis.
    predicted_torus_s: float

    def __str__(self) -> str:
        flat, torus = self.predicted_flat_s * 1e3, self.predicted_torus_s * 1e3
        return (
            f"{self.collective} of {self.nbytes} bytes: {self.kind} "
            f"(predicted: flat {flat:.3g} ms, torus {torus:.3g} ms)"
        )


def choose(nbytes: int, collective: str, flat: Predict, torus: Predict) -> Choice:
    """The faster of flat and torus.

    Args:
        nbytes: bytes of the whole tensor.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        flat: predicts it over all ranks at once.
        torus: predicts it axis by axis.
    """
    flat_s, torus_s = flat(collective, nbytes), torus(collective, nbytes)
    kind: Kind = "torus" if torus_s < flat_s else "flat"
    return Choice(collective, nbytes, kind, flat_s, torus_s)


@dataclass
class Chooser:
    """Chooses once for each collective and size, and keeps what it chose.

    All ranks must predict alike: a collective that is flat on one and not on another never ends.

    Args:
        flat: predicts a collective over all ranks at once.
        torus: predicts it axis by axis.
        report: is given every new choice, such as `print` on one rank.
    """

    flat: Predict
    torus: Predict
    report: Callable[[Choice], object] | None = None
    choices: dict[tuple[str, int], Choice] = field(default_factory=dict)

    def __call__(self, collective: str, nbytes: int) -> Choice:
        """The choice for a collective of so many bytes."""
        key = collective, nbytes
        if key not in self.choices:
            self.choices[key] = choose(nbytes, collective, self.flat, self.torus)
            if self.report is not None:
                self.report(self.choices[key])
        return self.choices[key]

    @classmethod
    def of_links(
        cls,
        links: Sequence[tuple[int, Link]],
        report: Callable[[Choice], object] | None = None,
    ) -> Chooser:
        """Predicts from the size and the link of each axis, outer to inner.

        Flat, all of the payload is charged to the outermost link, which most of it crosses.

        Args:
            links: size and link of each axis, as `gulliver.hardware.Cluster.links` gives them.
            report: is given every new choice.
        """
        flat = [(math.prod(size for size, _ in links), links[0][1])]
        return cls(
            lambda collective, nbytes: collective_seconds(flat, collective, nbytes),
            lambda collective, nbytes: collective_seconds(links, collective, nbytes),
            report,
        )


@dataclass(frozen=True)
class ReduceChoice:
    """How an all-reduce over gloo goes, and why."""

    # Size of the tensor.
    nbytes: int
    # Ranks of the world that take part.
    ranks: tuple[int, ...]
    # "ring", gloo's own, or "direct", an exchange from each rank to all others.
    kind: Literal["direct", "ring"]
    # Seconds of each kind, where they were measured.
    measured: Mapping[str, float]

    def __str__(self) -> str:
        what = f"all_reduce of {self.nbytes} bytes among {len(self.ranks)} ranks: {self.kind}"
        if not self.measured:
            return f"{what} (not measured: ring from {RING_BYTES} bytes on)"
        told = ", ".join(f"{kind} {1e3 * s:.3g} ms" for kind, s in self.measured.items())
        return f"{what} (measured: {told})"


_cluster: Cluster | None = None
_reduce_choices: dict[tuple[int, tuple[int, ...]], ReduceChoice] = {}


def use_links(cluster: Cluster | None) -> None:
    """Takes the links of a cluster as those that all-reduces are chosen by."""
    global _cluster
    _cluster = cluster
    _reduce_choices.clear()


def choose_all_reduce(nbytes: int, ranks: tuple[int, ...]) -> ReduceChoice:
    """The faster way of an all-reduce over gloo, chosen once for each size."""
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
    """The choices that were made for all-reduces, in their order."""
    return list(_reduce_choices.values())
