"""A step of training: its seconds by kind and its bytes, from plain numbers.

A step is compute, messages and the optimizer's update. Messages that may travel while a rank
computes are hidden as far as it computes that long; the others, and what is left of the first, are
exposed. A rank of a pipeline waits for the others besides.
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
    linear_flops,
    memory_seconds,
    point_to_point_seconds,
    wire_bytes,
)

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sends"]
Pass = Literal["forward", "backward"]


# [Note: what cannot hide] Gradients of a chunk are there when backward has computed them, and those
# of the last chunk when it ends; the first chunk's parameters are needed as forward begins. So of N
# equal messages one never hides, and the others have (N - 1) / N of the pass. A hop of a ring hides
# behind the part of its attention that is computed meanwhile, not behind other layers. And the
# processor posts every message, which takes as long as launching an operation.
#
# [Note: one queue] Over sockets all messages of a rank leave by one queue. So a rank that stops for
# a message, while others are under way beside its computing, stops until those have left, too: of
# each of those it can compute beside no more than lies between two stops. (On shaped links a
# forward with exchanges of heads takes as long as the gathers beside it and its computing one after
# the other, docs/lab-notes.md.) Links that are rings, as of NCCL, have queues of their own.
#
# The bytes are those of ZeRO (Rajbhandari et al. 2020): shards, whole chunks of those that are
# needed at once, and buffers under way.
@dataclass(frozen=True)
class Message:
    """Equal messages of a step."""

    # Collective, or sends from rank to rank.
    kind: Kind
    # Size of the whole tensor.
    bytes: int
    # Size and link of each axis that they go along, outer to inner.
    axes: Axes
    # Number of them.
    count: float = 1
    # Whether the rank may compute meanwhile.
    hidden: bool = False
    # Pass that all of them travel beside.
    beside: Pass = "backward"
    # Share of that pass in which they may: of several micro-batches the last alone.
    part: float = 1.0
    # Seconds of computing that hide one of them, whatever pass that is in; None for those of the
    # pass, which all share.
    behind_s: float | None = None
    # Number of operations that pack and unpack one of them.
    launches: float = 0.0
    # Seconds in which the rank packs and unpacks one of them, and does not compute.
    packing_s: float = 0.0

    @property
    def stops(self) -> float:
        """Number of times that a rank stops for them."""
        return self.count if self.axes and (not self.hidden or self.behind_s is not None) else 0.0

    @property
    def queued(self) -> bool:
        """Whether they leave by one queue with all others of a rank."""
        return any(not link.ring for size, link in self.axes if size > 1)

    @property
    def seconds(self) -> float:
        """Seconds of all of them, one after the other."""
        return self.count * self._one if self.axes else 0.0

    @cached_property
    def _one(self) -> float:
        # A rank that stops for a message waits for the others, who are not as far at that moment,
        # and wakes threads that have slept: between computing, where that was measured. Collectives
        # under way beside computing are asked for late, and cost what they cost alone. Sends in a
        # ring go hop by hop: however hidden, each waits for a neighbour.
        waits = not self.hidden or self.kind == "sends"
        axes = [(n, _among_computing(link) if waits else link) for n, link in self.axes]
        if self.kind == "all_reduce" and waits and len(axes) == 1:
            # Large sums go round gloo's ring, where that was measured.
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
        """Bytes that a rank sends in all of them."""
        if self.kind == "sends":
            return self.count * self.bytes
        return self.count * sum(wire_bytes(self.axes, self.bytes, self.kind))


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of one rank."""

    # Seconds of forward and backward.
    compute: float
    # Seconds of forwards that backward repeats.
    recompute: float
    # Seconds of all messages by kind, hidden or not.
    messages: dict[str, float]
    # Bytes of all messages.
    sent: float
    # Seconds of messages, packing included, in which the rank does not compute.
    exposed: float
    # Seconds that it waits for other stages.
    bubble: float
    # Seconds of the optimizer.
    update: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
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
    """Seconds of a step."""
    spent: dict[str, float] = {}
    for message in messages:
        spent[message.kind] = spent.get(message.kind, 0.0) + message.seconds
    hidden = [m for m in messages if m.hidden]
    windows = {"forward": passes_s[0], "backward": passes_s[1] + recompute_s}
    stops = sum(m.stops for m in messages if m.queued)
    between = sum(windows.values()) / stops if stops else math.inf
    shown = sum(
        exposed_seconds([m for m in hidden if m.beside == name], window, between)
        for name, window in windows.items()
    )
    posting = launch_s * sum(m.count * (m.hidden + m.launches) for m in messages)
    packing = sum(m.count * m.packing_s for m in messages)
    exposed = sum(spent.values()) - free * (sum(m.seconds for m in hidden) - shown)
    exposed += posting + packing
    sent = sum(message.sent for message in messages)
    return StepCosts(sum(passes_s), recompute_s, spent, sent, exposed, bubble_s, update_s)


def exposed_seconds(
    messages: Sequence[Message], window_s: float, between_s: float = math.inf
) -> float:
    """Seconds of messages beside a pass in which the rank does not compute."""
    own = [m for m in messages if m.behind_s is not None and m.count]
    hops = sum(max(0.0, m.seconds - m.count * (m.behind_s or 0.0)) for m in own)
    shared = [m for m in messages if m.behind_s is None and m.seconds]
    if not shared:
        return hops
    number, part = sum(m.count for m in shared), max(m.part for m in shared)
    last = max(m.seconds / m.count for m in shared)
    within = part * window_s * max(0.0, 1 - 1 / number)
    if any(m.queued for m in shared):
        within = min(within, between_s * max(0.0, number - 1))
    return hops + max(last, sum(m.seconds for m in shared) - within)


def pipeline_seconds(
    schedule: str,
    stages: Sequence[float],
    backward: float,
    micro_batches: int,
    chunks: int = 1,
    link_s: float = 0.0,
) -> float:
    """Seconds of a pipeline's step, in closed form."""
    # Every micro-batch passes the slowest rank, and the first and the last the others besides: as a
    # whole (GPipe, 1F1B), a chunk of them (interleaved: Narayanan et al. 2021), or but for
    # gradients of weights, which are computed while ranks would wait (Qi et al. 2024: ZB-H1, and
    # for schedules that are folded ZB-V). A simulation of the schedule is exact, and costs seconds
    # for large ones.
    slowest = max(stages)
    others = sum(stages) - slowest
    # Folded schedules wait for nothing once each rank has micro-batches for both its stages.
    folded = max(1 - backward, 1 - micro_batches / (3 * len(stages)))
    part = {"zero_bubble": 1 - backward, "zbv": folded, "dualpipev": folded}.get(schedule, 1.0)
    hops = _hops(schedule, len(stages), chunks, micro_batches) * link_s
    # One micro-batch passes all ranks, and few follow it one by one; gradients of weights come
    # after, where they are apart.
    split = backward / 2 * (part < 1)
    after = slowest * (1 - split) / (chunks if part == 1 else 1)
    alone = sum(stages) * (1 - split) + slowest * split
    alone += (min(micro_batches, len(stages)) - 1) * after
    alone += hops if chunks > 1 else 2 * (len(stages) - 1) * link_s
    return max(alone, micro_batches * slowest + others * part / chunks + hops)


def _hops(schedule: str, ranks: int, chunks: int, micro_batches: int) -> float:
    """Messages between ranks that a step waits for one after the other."""
    # [Note: what a schedule waits for] GPipe waits while the pipeline fills and empties. Under 1F1B
    # a rank has p - i micro-batches under way, and each comes back two messages late: (p - 1) / p
    # of them show for every micro-batch. More micro-batches under way, of chunks or of a split
    # backward, hide those. The numbers are the slopes of a simulation of the schedules, exact but
    # for DualPipeV, whose slope rises with the link's seconds.
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
    """Seconds of a forward of matrices with so many elements for so many rows."""
    rate = device.matmul.get(dtype, max(device.matmul.values()))
    return linear_flops(weights, tokens) / rate


UNFUSED = {0: 3, 1: 8, 2: 21}
"""Tensors that torch's optimizers read and write where each of their operations is a pass over
memory, by the states of an element: SGD, with momentum, and AdamW."""


def update_seconds(device: Device, parameter_bytes: int, states: float) -> float:
    """Seconds of an element-wise optimizer: reads all, writes all but the gradients."""
    # On a CPU each operation of it is a pass of its own: of AdamW a decay, averages, a root and
    # their quotient, three times as much.
    passes = 3 + 2 * states
    if device.to_device_rate is None:
        passes = UNFUSED.get(int(states), 3 * passes)
    return memory_seconds(device, int(parameter_bytes * passes))
