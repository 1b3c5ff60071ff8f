"""Chooses the sizes of Ulysses, outer ring and inner ring by predicted cost."""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.hardware.attention import AttentionBytes as Volume
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.hardware.attention import (
    SequenceSplit,
    split_attention_bytes,
    split_attention_seconds,
)
from gulliver.hardware.cluster import Cluster
from gulliver.parallel.sequence.heads import deal_heads
from gulliver.parallel.sequence.layout import LayoutName, SequencePlan


@dataclass(frozen=True)
class SplitPrediction:
    """A plan and its predicted cost."""

    plan: SequencePlan
    seconds: float  # Seconds of a forward and a backward
    compute: float  # Seconds of both without communication
    exchanges: float  # Seconds of head exchanges
    sent: Volume  # Bytes that each rank sends


@dataclass(frozen=True)
class Chosen:
    """The plan with the lowest predicted time, and the alternatives."""

    plan: SequencePlan
    # Predictions of all considered plans, best first.
    predicted: tuple[SplitPrediction, ...]

    @property
    def reason(self) -> str:
        best, *others = self.predicted
        shown = [f"{p.plan}: {1e3 * p.seconds:.3g} ms" for p in others[:1]]
        return " against ".join([f"{best.plan}: {1e3 * best.seconds:.3g} ms", *shown])

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
    """Returns the factorization of a degree with the lowest predicted time.

    Args:
        cluster: links and device, measured or described.
        shape: shape of the attention.
        degree: ranks per sequence; None for all ranks.
        layout: name of the layout; None for zigzag if the shape is causal, otherwise contiguous.
        stride: distance between the ranks of a sequence; the ranks in between share its tensors.

    Raises:
        GulliverError: the degree is below 1, or the device has no rate for the dtype.
    """
    degree = cluster.size if degree is None else degree
    layout = layout or ("zigzag" if shape.causal else "contiguous")
    found = [
        predict(cluster, shape, SequencePlan(u, o, degree // u // o, layout), stride)
        for u in _divisors(degree)
        if u <= shape.heads
        for o in _divisors(degree // u)
        # An inner ring of size one is a single-level ring, which ``o == 1`` covers.
        if o == 1 or degree // u // o > 1
    ]
    found.sort(key=lambda p: (p.seconds, p.sent.forward + p.sent.backward, p.plan.outer))
    return Chosen(found[0].plan, tuple(found))


def predict(cluster: Cluster, shape: Shape, plan: SequencePlan, stride: int = 1) -> SplitPrediction:
    took = split_attention_seconds(cluster, shape, _split(plan, shape), stride)
    return SplitPrediction(plan, took.total, took.compute, took.exchanges, volume(plan, shape))


def volume(plan: SequencePlan, shape: Shape) -> Volume:
    return split_attention_bytes(_split(plan, shape), shape)


def _split(plan: SequencePlan, shape: Shape) -> SequenceSplit:
    keys = deal_heads(shape.heads, shape.kv_heads, plan.ulysses).keys
    sent = sum(last - first for first, last in keys)
    return SequenceSplit(plan.ulysses, plan.outer, plan.inner, sent, plan.layout == "zigzag")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
