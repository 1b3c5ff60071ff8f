"""Predicts the components of a training step's time.

A step consists of compute, communication and the optimizer update. Messages that may overlap with
compute are hidden while compute lasts; all other communication is exposed. Pipeline ranks also wait
for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from gulliver.hardware.cluster import Device, Link
from gulliver.hardware.costs import (
    RING_BYTES,
    Axes,
    all_reduce_ways,
    collective_seconds,
    host_seconds,
    linear_flops,
    memory_seconds,
    point_to_point_seconds,
    wire_bytes,
)

SAME_LINK = 1.5
"""Maximum ratio of the rates of two mesh axes that are assumed to use the same link."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sends"]
Pass = Literal["forward", "backward"]


# [Note: what cannot hide] Gradients of a chunk are available when backward has computed them, those
# of the last chunk only at its end; the first chunk's parameters are needed at the start of
# forward. So of N equal messages one is never hidden, and the others overlap with (N - 1) / N of
# the pass. A ring hop is hidden by the part of its attention computed meanwhile, not by other
# layers. And the CPU posts every message, which takes as long as launching an operation.
#
# [Note: one queue] Over sockets all messages of a rank share one queue. So a rank that blocks on a
# message while others are in flight also waits for those: each of them overlaps only with the
# compute between two blocking messages. (On shaped links a forward with head exchanges takes as
# long as the gathers plus its compute, docs/lab-notes.md.) A blocking message on a link that is no
# faster also waits for the message in flight, if there is one: with the probability that is the
# fraction of the pass that messages take. Links with rings, as in NCCL, have separate queues.
#
# The bytes are those of ZeRO (Rajbhandari et al. 2020): shards, gathered chunks that are needed at
# once, and buffers in flight.
@dataclass(frozen=True)
class Message:
    """Identical messages of a step."""

    # Collective, or point-to-point sends.
    kind: Kind
    # Size of the whole tensor.
    bytes: int
    # Size and link of each axis used, outer to inner.
    axes: Axes
    # Number of them.
    count: float = 1
    # Whether the rank may compute meanwhile.
    hidden: bool = False
    # Pass with which all of them may overlap.
    beside: Pass = "backward"
    # Fraction of that pass available for overlap: with several micro-batches only the last one.
    part: float = 1.0
    # Compute seconds that hide one of them, in any pass; None for those of the pass, which all
    # share.
    behind_s: float | None = None
    # Packing operations per message.
    launches: float = 0.0
    # Packing seconds per message, without compute.
    packing_s: float = 0.0
    # Whether ranks on one host read each other's memory instead.
    reads: bool = False

    @property
    def stops(self) -> float:
        return self.count if self.axes and (not self.hidden or self.behind_s is not None) else 0.0

    @property
    def queued(self) -> bool:
        """Whether these messages share one queue with all other messages of the rank."""
        read = self.reads and host_seconds(self.axes, self.kind, self.bytes) is not None
        return not read and any(not link.ring for size, link in self.axes if size > 1)

    @property
    def rate(self) -> float:
        """Bytes/s of the slowest link."""
        return min((link.bandwidth for _, link in self.axes), default=math.inf)

    @property
    def seconds(self) -> float:
        return self.count * self._one if self.axes else 0.0

    @cached_property
    def _one(self) -> float:
        if self.reads and (found := host_seconds(self.axes, self.kind, self.bytes)) is not None:
            return found
        # A rank that blocks on a message waits for others that arrive later, and wakes sleeping
        # threads: use the measurement between computing if there is one. Collectives that overlap
        # with compute are waited for late, and cost the same as alone. Ring sends go hop by hop:
        # even if hidden, each waits for a neighbour.
        waits = not self.hidden or self.kind == "sends"
        axes = [(n, _among_computing(link) if waits else link) for n, link in self.axes]
        if self.kind == "all_reduce" and waits and len(axes) == 1:
            # Large sums use gloo's ring, if that was measured.
            size, link = axes[0]
            ways = all_reduce_ways(link, size, self.bytes)
            if ways:
                return ways["ring" if self.bytes >= RING_BYTES else "direct"]
        if self.kind != "sends":
            return collective_seconds(axes, self.kind, self.bytes)
        size, link = axes[-1]
        measured = (a.collectives.get("sends") for a in link.along if a.ranks == size)
        curve = next((curve for curve in measured if curve is not None), None)
        return point_to_point_seconds(link, self.bytes) if curve is None else curve.at(self.bytes)

    @property
    def sent(self) -> float:
        if self.kind == "sends":
            return self.count * self.bytes
        return self.count * sum(wire_bytes(self.axes, self.bytes, self.kind))


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step on one rank."""

    # Seconds of forward and backward.
    compute: float
    # Seconds of recomputation in backward.
    recompute: float
    # Seconds of all messages by kind, hidden or not.
    messages: dict[str, float]
    # Bytes of all messages.
    sent: float
    # Seconds of messages, including packing, in which the rank does not compute.
    exposed: float
    # Seconds of waiting for other stages.
    bubble: float
    # Seconds of the optimizer.
    update: float

    @property
    def step(self) -> float:
        return self.compute + self.recompute + self.exposed + self.bubble + self.update


def predict_step(
    passes_s: tuple[float, float],
    recompute_s: float,
    update_s: float,
    messages: Sequence[Message],
    bubble_s: float = 0.0,
    free: float = 1.0,
    launch_s: float = 0.0,
) -> StepCosts:
    spent: dict[str, float] = {}
    for message in messages:
        spent[message.kind] = spent.get(message.kind, 0.0) + message.seconds
    hidden = [m for m in messages if m.hidden]
    windows = {"forward": passes_s[0], "backward": passes_s[1] + recompute_s}
    stopping = [m for m in messages if m.queued and m.stops]
    stops, whole = sum(m.stops for m in stopping), sum(windows.values())
    between = whole / stops if stops else math.inf
    # Messages on much faster links do not wait for those in flight.
    rate = max((SAME_LINK * m.rate for m in hidden if m.behind_s is None), default=0.0)
    waiting = sum(m.stops for m in stopping if m.rate <= rate)
    shown = 0.0
    for name, window in windows.items():
        own = [m for m in hidden if m.beside == name]
        shown += exposed_seconds(own, window, between, waiting * window / whole if whole else 0.0)
    posting = launch_s * sum(m.count * (m.hidden + m.launches) for m in messages)
    packing = sum(m.count * m.packing_s for m in messages)
    exposed = sum(spent.values()) - free * (sum(m.seconds for m in hidden) - shown)
    exposed += posting + packing
    sent = sum(message.sent for message in messages)
    return StepCosts(sum(passes_s), recompute_s, spent, sent, exposed, bubble_s, update_s)


def exposed_seconds(
    messages: Sequence[Message],
    window_s: float,
    between_s: float = math.inf,
    waiting: float = 0.0,
) -> float:
    """Exposed seconds of messages that overlap with a pass, on which `waiting` others may wait."""
    own = [m for m in messages if m.behind_s is not None and m.count]
    hops = sum(max(0.0, m.seconds - m.count * (m.behind_s or 0.0)) for m in own)
    shared = [m for m in messages if m.behind_s is None and m.seconds]
    if not shared:
        return hops
    number, part = sum(m.count for m in shared), max(m.part for m in shared)
    last = max(m.seconds / m.count for m in shared)
    within = part * window_s * max(0.0, 1 - 1 / number)
    total, waits = sum(m.seconds for m in shared), 0.0
    if any(m.queued for m in shared):
        within = min(within, between_s * max(0.0, number - 1))
        if waiting:  # not longer than the messages take that can be in flight meanwhile
            waits = min(total - last, part * waiting * last * min(1.0, total / window_s))
    return hops + max(last + waits, total - within)


def pipeline_seconds(
    schedule: str,
    stages: Sequence[float],
    backward: float,
    micro_batches: int,
    chunks: int = 1,
    link_s: float = 0.0,
    recomputes: bool = False,
) -> float:
    # Every micro-batch passes the slowest rank, and the first and the last also pass the others:
    # entirely (GPipe, 1F1B), one chunk of them (interleaved: Narayanan et al. 2021), or without
    # gradients of weights, which fill the bubbles (Qi et al. 2024: ZB-H1, and ZB-V for folded
    # schedules). A simulation of the schedule is exact, and takes seconds for large ones.
    slowest = max(stages)
    others = sum(stages) - slowest
    # Folded schedules have no bubbles once each rank has micro-batches for both its stages.
    folded = max(1 - backward, 1 - micro_batches / (3 * len(stages)))
    part = {"zero_bubble": 1 - backward, "zbv": folded, "dualpipev": folded}.get(schedule, 1.0)
    part = 1.0 if recomputes else part
    hops = _hops(schedule, len(stages), chunks, micro_batches) * link_s
    # One micro-batch passes all ranks, and the others follow; separate gradients of weights come
    # last.
    split = backward / 2 * (part < 1)
    after = slowest * (1 - split) / (chunks if part == 1 else 1)
    alone = sum(stages) * (1 - split) + slowest * split
    alone += (min(micro_batches, len(stages)) - 1) * after
    alone += hops if chunks > 1 else 2 * (len(stages) - 1) * link_s
    return max(alone, micro_batches * slowest + others * part / chunks + hops)


def _hops(schedule: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """Number of sequential messages between ranks that a step waits for."""
    # [Note: what a schedule waits for] GPipe waits while the pipeline fills and drains. Under 1F1B
    # a rank has p - i micro-batches in flight, and each returns two messages late: (p - 1) / p of
    # them are exposed per micro-batch. More micro-batches in flight, of chunks or of a split
    # backward, hide those. The numbers are the slopes of a simulation of the schedules, exact
    # except for DualPipeV, whose slope increases with the link's seconds.
    ends = 2 * (ranks - 1)
    one = max(ends, ends * micro_batches / ranks + 2 * (ranks - 2))
    turned = 2 * ends if micro_batches < 2 * ranks else 5 * ranks - 7
    return {
        "gpipe": ends,
        "1f1b": one,
        "interleaved": 2 * (ranks * chunks - 1),
        "zero_bubble": min(one, 2 * ends),
        "zbv": turned,
        "dualpipev": max(turned, 2 * ends),
    }.get(schedule, one)


def _among_computing(link: Link) -> Link:
    busy = tuple(replace(a, collectives={**a.collectives, **a.busy}) for a in link.along)
    return replace(link, along=busy)


def layer_seconds(device: Device, weights: int, tokens: int, dtype: str = "float32") -> float:
    """Forward seconds of linear layers with `weights` elements in total."""
    rate = device.matmul.get(dtype, max(device.matmul.values()))
    return linear_flops(weights, tokens) / rate


UNFUSED = {0: 3, 1: 8, 2: 21}
"""Number of tensors that unfused torch optimizers read and write, by number of states: SGD, SGD
with momentum, and AdamW.
"""


def update_seconds(device: Device, parameter_bytes: int, states: float) -> float:
    """Seconds of an element-wise optimizer: reads all tensors, writes all except gradients."""
    # On a CPU each of its operations is a separate pass: for AdamW a decay, averages, a root and
    # their quotient, three times as much.
    passes = 3 + 2 * states
    if device.to_device_rate is None:
        passes = UNFUSED.get(int(states), 3 * passes)
    return memory_seconds(device, int(parameter_bytes * passes))
