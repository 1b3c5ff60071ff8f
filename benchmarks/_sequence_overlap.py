"""How well a ring computes while it sends.

*Computing alone* is one call of the kernel over all keys, *sending alone* the same messages with
nothing between them; both in the same ranks, taking turns with the ring. The link is shaped so that
sending takes a third of computing, as long, and three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate, at_most
from benchmarks._sequence_shared import Options, milli, seconds_of, shape_of, slowest, tensors
from benchmarks.netlab import Net, run
from benchmarks.netlab._net import bits_per_second
from gulliver.comm import init_world
from gulliver.hardware import Cluster
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.hardware.cluster import Axis, Device, Link
from gulliver.parallel.sequence import SequencePlan, attention, make_groups
from gulliver.parallel.sequence.choice import predict, volume
from gulliver.parallel.sequence.kernels import BlockArguments
from gulliver.parallel.sequence.layout import SequenceGroups
from gulliver.parallel.sequence.mask import Rules
from gulliver.parallel.sequence.ring import RingCall, _Pack, round_trip, turn

RANKS, RING = 4, SequencePlan(inner=4)
WAYS = ("forward", "backward")
Steps = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Gives what to call for a forward, and what for its backward."""


def of_overlap(options: Options) -> Shape:
    """The attention whose overlap is measured."""
    return shape_of(options, RANKS, options.overlap_local, options.overlap_heads)


def time_computing(options: Options) -> tuple[float, ...]:
    """Seconds of computing alone, each rank for itself."""
    init_world()
    steps = _computing(*tensors(of_overlap(options), RANKS))
    return alternate({"": lambda: sum(_timed(steps))}, 2)[""].values


def time_overlap(options: Options) -> dict[str, tuple[float, ...]]:
    """Seconds of a forward and of a backward: as they are, computing alone, sending alone."""
    init_world()
    groups, shape = make_groups(RING), of_overlap(options)
    q, k, v, grad = tensors(shape, RANKS)

    def ring() -> tuple[Callable[[], Any], Callable[[], Any]]:
        out: list[Tensor] = []
        forward = lambda: out.append(attention(q, k, v, groups, length=shape.length))  # noqa: E731
        return forward, lambda: out[0].backward(grad)

    everything: dict[str, Steps] = {
        "ring": ring,
        "computing": _computing(q, k, v, grad),
        "sending": _sending(k, v, groups, shape),
    }
    found: dict[str, list[float]] = {f"{n}, {way}": [] for n in everything for way in WAYS}

    def measured(name: str) -> float:
        seconds = _timed(everything[name])
        for way, value in zip(WAYS, seconds, strict=True):
            found[f"{name}, {way}"].append(value)
        return sum(seconds)

    both = alternate({name: lambda n=name: measured(n) for name in everything}, options.rounds)
    ways = {name: tuple(values[-options.rounds :]) for name, values in found.items()}
    return {name: spread.values for name, spread in both.items()} | ways


def _timed(steps: Steps) -> tuple[float, float]:
    forward, backward = steps()
    return seconds_of(forward), seconds_of(backward)


def _computing(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Steps:
    alone = SequenceGroups(SequencePlan())
    wide_k, wide_v = (t.detach().repeat(1, 1, RANKS, 1).requires_grad_() for t in (k, v))
    lengths: Any = {"length": q.shape[2], "key_length": wide_k.shape[2]}

    def steps() -> tuple[Callable[[], Any], Callable[[], Any]]:
        out: list[Tensor] = []
        forward = lambda: out.append(attention(q, wide_k, wide_v, alone, **lengths))  # noqa: E731
        return forward, lambda: out[0].backward(grad)

    return steps


def _sending(k: Tensor, v: Tensor, groups: SequenceGroups, shape: Shape) -> Steps:
    """The messages of a forward and a backward, without what is computed in between."""
    layout = groups.plan.lay(shape.length)
    call = RingCall(groups, layout, layout, BlockArguments(1.0, Rules(), ()))
    pack = _Pack([k.detach(), v.detach()], call)
    part = torch.zeros(pack.numel(0, 0))

    def forward() -> None:
        for _ in turn(pack.own(), pack.bytes, groups):
            pass

    def backward() -> None:
        round_trip(
            *(pack.own(), pack.bytes, pack.numel, groups),
            lambda visit: part,
        )

    return lambda: (forward, backward)


def rate_for(ratio: float, computing: float, sent: float) -> str:
    """The rate at which so many bytes take `ratio` times as long as computing."""
    return f"{8e-6 * sent / (ratio * computing):.0f}mbit"


def report_overlap(options: Options, report: Report) -> None:
    """Rows and a bar for each link."""
    shape = of_overlap(options)
    sent = volume(RING, shape)
    alone = run(time_computing, None, options, ranks=RANKS)
    computing = Spread(tuple(map(max, zip(*alone, strict=True)))).low
    for ratio in options.ratios:
        rate = rate_for(ratio, computing, sent.forward + sent.backward)
        with Net(RANKS, rate) as net:
            times = slowest(run(time_overlap, net, options))
        for way in (*WAYS, "both"):
            _row_of_overlap(report, times, rate, way)
        bound = max(times["computing"].median, times["sending"].median)
        value = times["ring"].median / bound
        name = f"overlap: sending {ratio:g} x computing, ring / max(alone)"
        report.bars.append(at_most(name, value, 1.15))
        expected = predicted(shape, rate, times["computing"].median)
        shown = f"{expected * 1e3:.0f} ms", f"{times['ring'].median / expected:.3f}"
        report.rows.append(("overlap", f"{rate}, predicted", milli(times["ring"]), *shown))
        report.figures[f"overlap {rate}"] = {n: list(s.values) for n, s in times.items()}


def _row_of_overlap(report: Report, times: dict[str, Spread], rate: str, way: str) -> None:
    of = "" if way == "both" else f", {way}"
    ring, computing, sending = (times[f"{n}{of}"] for n in ("ring", "computing", "sending"))
    ratio = ring.median / max(computing.median, sending.median)
    shown = f"{milli(computing)} / {milli(sending)}"
    report.rows.append(("overlap", f"{rate}, {way}", milli(ring), shown, f"{ratio:.3f}"))


def predicted(shape: Shape, rate: str, computing: float) -> float:
    """Seconds of the ring by the library's formula, from the time that computing takes alone."""
    local = shape.length // RANKS
    operations = 4 * shape.heads * local * shape.length * shape.head_dim
    speed = {"float32": 3.5 * operations / computing}
    device = Device("a core", speed, memory_rate=1e10, memory_bytes=1 << 30)
    link = Link(1e-3, bits_per_second(rate) / 8)
    cluster = Cluster("shaped", device, (Axis("local", RANKS, link),))
    return predict(cluster, shape, RING).seconds
