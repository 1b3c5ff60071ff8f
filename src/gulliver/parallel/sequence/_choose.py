"""Chooses Ulysses x outer x inner from the costs of a cluster, and says what it expects.

A step of the ring sends while it computes: with c the seconds of a block and f, s those of a hop
along the inner and the outer ring, a forward takes

    turn = (i - 1) max(c, f) + c        forward = (o - 1) max(turn, s) + turn

and a backward the same with the backward's messages and 5/2 of the operations. An exchange of
heads is not hidden. Under a causal mask zigzag gives every rank half of the pairs; the plain
layout's last rank has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.errors import GulliverError
from gulliver.hardware import (
    Cluster,
    Link,
    all_to_all_seconds,
    matmul_seconds,
    point_to_point_seconds,
)
from gulliver.parallel.sequence._layout import LayoutName
from gulliver.parallel.sequence._plan import SequencePlan
from gulliver.parallel.sequence._volume import Shape, Volume, hops, ulysses_bytes, volume

BACKWARD_OPERATIONS = 2.5
"""Five products of matrices instead of two."""


@dataclass(frozen=True)
class Predicted:
    """A plan and what it should cost.

    Attributes:
        plan: considered.
        seconds: of a forward and a backward.
        compute: of that, if nothing had to be sent.
        exchanges: of heads.
        sent: bytes of each rank.
    """

    plan: SequencePlan
    seconds: float
    compute: float
    exchanges: float
    sent: Volume


@dataclass(frozen=True)
class Chosen:
    """The plan with the least predicted seconds, and the others.

    Attributes:
        plan: to use.
        predicted: all that were considered, the best first.
    """

    plan: SequencePlan
    predicted: tuple[Predicted, ...]

    @property
    def reason(self) -> str:
        """Why this one, in a few words."""
        best, *others = self.predicted
        told = [f"{p.plan}: {1e3 * p.seconds:.3g} ms" for p in others[:1]]
        return " against ".join([f"{best.plan}: {1e3 * best.seconds:.3g} ms", *told])

    def __str__(self) -> str:
        head = f"{'plan':<34} {'ms':>9} {'compute':>9} {'heads':>9} {'MB sent':>9}"
        rows = [
            f"{f'Ulysses {p.plan.ulysses} x ring {p.plan.outer} x {p.plan.inner}':<34} "
            f"{p.seconds * 1e3:9.3f} {p.compute * 1e3:9.3f} {p.exchanges * 1e3:9.3f} "
            f"{(p.sent.forward + p.sent.backward) / 1e6:9.2f}"
            for p in self.predicted
        ]
        return "\n".join([f"chosen: {self.plan}", head, *rows])


def choose(
    cluster: Cluster,
    shape: Shape,
    degree: int | None = None,
    layout: LayoutName | None = None,
    stride: int = 1,
) -> Chosen:
    """Considers every factorisation of a degree.

    Args:
        cluster: measured or described.
        shape: of the attention.
        degree: ranks of a sequence; None is the whole cluster.
        layout: None is zigzag for a causal shape, and contiguous else.
        stride: a sequence lies on every so many-th rank; those between share its tensors.

    Raises:
        GulliverError: no degree of at least 1; the device has no rate for the dtype.
    """
    degree = cluster.size if degree is None else degree
    if degree < 1:
        raise GulliverError(f"a sequence needs at least 1 rank, not {degree}")
    layout = layout or ("zigzag" if shape.causal else "contiguous")
    found = [
        predict(cluster, shape, SequencePlan(u, o, degree // u // o, layout), stride)
        for u in _divisors(degree)
        if u <= shape.heads
        for o in _divisors(degree // u)
        # An inner ring of one is a ring of one level, which the last of these is.
        if o == 1 or degree // u // o > 1
    ]
    found.sort(key=lambda p: (p.seconds, p.sent.forward + p.sent.backward, p.plan.outer))
    return Chosen(found[0].plan, tuple(found))


def predict(cluster: Cluster, shape: Shape, plan: SequencePlan, stride: int = 1) -> Predicted:
    """What a plan should cost on every `stride`-th rank of a cluster."""
    forward = _block_seconds(cluster, shape, plan)
    hop = hops(plan, shape)
    links = _Lines(cluster.resized(plan.degree * stride), plan, stride)
    seconds = links.ring_seconds(forward, hop.forward + hop.forward_home)
    seconds += links.ring_seconds(BACKWARD_OPERATIONS * forward, hop.backward + hop.backward_home)
    exchanges = 2 * links.exchange_seconds(ulysses_bytes(plan, shape))
    compute = plan.ring * (1 + BACKWARD_OPERATIONS) * forward
    return Predicted(plan, seconds + exchanges, compute, exchanges, volume(plan, shape))


def _block_seconds(cluster: Cluster, shape: Shape, plan: SequencePlan) -> float:
    """Of a place's queries and another's keys, forward, on the rank that has most to do."""
    half = shape.causal and (plan.layout == "zigzag" or plan.ring == 1)
    wide = shape.batch * -(-shape.heads // plan.ulysses)
    rows = max(1, shape.length // plan.ring // (2 if half else 1))
    keys = max(1, shape.keys // plan.ring)
    return sum(
        matmul_seconds(cluster.device, rows, wide * dim, keys, shape.dtype)
        for dim in (shape.head_dim, shape.values)
    )


class _Lines:
    """What the lines of a plan travel on."""

    def __init__(self, cluster: Cluster, plan: SequencePlan, stride: int) -> None:
        self._cluster, self._plan, self._stride = cluster, plan, stride

    def ring_seconds(self, block: float, hop_bytes: float) -> float:
        """A turn of both rings, `block` seconds of work for each block."""
        plan = self._plan
        fast = self._hop(plan.ulysses, plan.inner, hop_bytes)
        slow = self._hop(plan.ulysses * plan.inner, plan.outer, hop_bytes)
        turn = (plan.inner - 1) * max(block, fast) + block
        return (plan.outer - 1) * max(turn, slow) + turn

    def exchange_seconds(self, sent: float) -> float:
        """An all-to-all in which each rank sends so much."""
        u = self._plan.ulysses
        if u == 1:
            return 0.0
        return all_to_all_seconds(self._axes(1, u), int(sent * u / (u - 1)))

    def _hop(self, stride: int, size: int, count: float) -> float:
        axes = self._axes(stride, size)
        return point_to_point_seconds(axes[0][1], int(count)) if axes else 0.0

    def _axes(self, stride: int, size: int) -> list[tuple[int, Link]]:
        """The axes that a line of every `stride`-th rank crosses, outer to inner."""
        stride *= self._stride
        crossed, unit, span = [], 1, stride * size
        for axis in reversed(self._cluster.axes):
            whole = unit * axis.size
            count = -(-min(span, whole) // max(stride, unit))
            if count > 1 and stride < whole:
                crossed.append((count, axis.link))
            unit = whole
        return crossed[::-1]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
