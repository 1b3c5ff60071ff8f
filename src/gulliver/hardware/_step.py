"""A step of training: its seconds by kind and its bytes, from plain numbers.

A step is compute, messages and the optimizer's update. Messages that may travel while a rank
computes are hidden as far as it computes that long; the others, and what is left of the first, are
exposed. A rank of a pipeline waits for the others besides.

The bytes are those of ZeRO (Rajbhandari et al. 2020): shards, whole chunks of those that are needed
at once, and buffers under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gulliver.hardware._cluster import Device
from gulliver.hardware._costs import (
    Axes,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    memory_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "sends"]
MATMUL_PASSES = 3
"""Products of a layer in a step: one forward, two backward."""
FLOPS_PER_WEIGHT = 2


@dataclass(frozen=True)
class Message:
    """Equal messages of a step.

    Attributes:
        kind: collective, or sends from rank to rank.
        bytes: size of the whole tensor.
        axes: size and link of each axis that they go along, outer to inner.
        count: number of them.
        hidden: whether the rank may compute meanwhile.
    """

    kind: Kind
    bytes: int
    axes: Axes
    count: float = 1
    hidden: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of all of them, one after the other."""
        if self.kind == "sends":
            one = point_to_point_seconds(self.axes[-1][1], self.bytes) if self.axes else 0.0
            return self.count * one
        formulas = {
            "all_gather": all_gather_seconds,
            "reduce_scatter": reduce_scatter_seconds,
            "all_reduce": all_reduce_seconds,
            "all_to_all": all_to_all_seconds,
        }
        return self.count * formulas[self.kind](self.axes, self.bytes)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step of one rank.

    Attributes:
        compute: seconds of forward and backward.
        recompute: seconds of forwards that backward repeats.
        messages: seconds of all messages by kind, hidden or not.
        exposed: seconds of messages in which the rank does not compute.
        bubble: seconds that it waits for other stages.
        update: seconds of the optimizer.
    """

    compute: float
    recompute: float
    messages: dict[str, float]
    exposed: float
    bubble: float
    update: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.recompute + self.exposed + self.bubble + self.update


def predict_step(
    compute_s: float,
    recompute_s: float,
    update_s: float,
    messages: Sequence[Message],
    bubble_s: float = 0.0,
    free: float = 1.0,
) -> StepCosts:
    """Seconds of a step.

    Args:
        compute_s: seconds of forward and backward of this rank.
        recompute_s: seconds of what backward computes again.
        update_s: seconds of the optimizer's step.
        messages: everything that the rank sends in a step.
        bubble_s: seconds that it waits for other stages.
        free: share of messages that need nothing that computes: 1 on GPUs, 0 where every core
            computes and carries messages as well.
    """
    spent: dict[str, float] = {}
    for message in messages:
        spent[message.kind] = spent.get(message.kind, 0.0) + message.seconds
    hidden = free * sum(m.seconds for m in messages if m.hidden)
    open_s = sum(spent.values()) - hidden
    exposed = open_s + max(0.0, hidden - compute_s - recompute_s - update_s)
    return StepCosts(compute_s, recompute_s, spent, exposed, bubble_s, update_s)


def layer_seconds(device: Device, weights: int, tokens: int, dtype: str = "float32") -> float:
    """Seconds of a forward of matrices with so many elements for so many rows."""
    rate = device.matmul.get(dtype, max(device.matmul.values()))
    return FLOPS_PER_WEIGHT * weights * tokens / rate


def update_seconds(device: Device, parameter_bytes: int, states: float) -> float:
    """Seconds of an element-wise optimizer: reads all, writes all but the gradients."""
    return memory_seconds(device, int(parameter_bytes * (3 + 2 * states)))


@dataclass(frozen=True)
class ChunkSize:
    """Bytes of a chunk of ZeRO.

    Attributes:
        whole: size of all of it.
        shard: size of the part that a rank steps.
        trained: whether it is stepped.
        copied: whether the shard is a copy in another dtype.
    """

    whole: int
    shard: int
    trained: bool = True
    copied: bool = False


def zero_bytes(
    chunks: Sequence[ChunkSize],
    stage: int,
    parts: int,
    ahead: int,
    in_flight: int,
    state: int,
) -> dict[str, int]:
    """Bytes that a rank of ZeRO holds at the peak: parameters, gradients, optimizer state.

    Parameters: the whole chunks, or with stage 3 the shards and the chunks that are gathered at
    once. Gradients: the shards, with stage 1 the whole buffers, from stage 2 on those under way and
    the one being filled. A float32 copy of 16-bit parameters counts as state of the optimizer.

    Args:
        chunks: chunks in the order of use.
        stage: stage of ZeRO.
        parts: number of shards of a chunk.
        ahead: number of chunks that are gathered ahead.
        in_flight: number of gradient buffers under way.
        state: bytes that the optimizer itself keeps.
    """
    sizes = [chunk.whole for chunk in chunks]
    trained = [chunk for chunk in chunks if chunk.trained]
    buffers = [chunk.whole for chunk in trained]
    copies = sum(chunk.shard for chunk in trained if chunk.copied)
    parameters = sum(sizes)
    if stage == 3:
        homes = sum(chunk.shard for chunk in chunks if not chunk.copied)
        parameters = homes + _most(sizes, ahead + 2)
    gradients = sum(buffers) if stage < 2 or parts == 1 else _most(buffers, in_flight + 1)
    gradients += copies if parts == 1 else sum(chunk.shard for chunk in trained)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer_state": state + copies,
    }


def _most(sizes: Sequence[int], neighbours: int) -> int:
    """The largest sum of so many chunks that follow each other."""
    count = max(1, len(sizes) - neighbours + 1)
    return max(sum(sizes[start : start + neighbours]) for start in range(count))
