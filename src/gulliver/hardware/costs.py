"""Cost formulas: seconds, bytes and FLOPs from sizes.

`axes` are pairs of size and link, outer to inner, as returned by `Cluster.links`; n is the size of
an axis, alpha and B are the latency and bandwidth of its link. Messages follow Hockney's model
(Parallel Computing 20, 1994). Collectives run axis by axis.

| cost | along one axis | over several |
| --- | --- | --- |
| point to point | alpha + bytes / B | |
| reduce-scatter | h alpha + (n-1)/n bytes / B | inner to outer, passing on 1/n |
| all-gather | the same | outer to inner, in reverse |
| all-reduce | a reduce-scatter and an all-gather | both, around an all-reduce on the outermost |
| all-to-all | h alpha + (n-1)/n bytes / B | all bytes along every axis |

h is the number of latencies: 1 if every rank sends to all others together (Gulliver over gloo), n-1
in a ring (NCCL; Thakur, Rabenseifner, Gropp 2005). Measured curves of a device, of messages, or of
a collective over n ranks take precedence over formulas.

Attention over several ranks is in `attention.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from gulliver.errors import GulliverError, check_known
from gulliver.hardware.cluster import Cluster, Device, Link

Axes = Sequence[tuple[int, Link]]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
BACKWARD_OF_LINEAR, BACKWARD_OF_ATTENTION = 2.0, 2.5
"""FLOPs of backward relative to forward: linear layers have 2 products for 1, attention 5 for 2."""
RING_BYTES = 1 << 20
"""Message size from which gloo's ring is faster with more than two ranks. Below, its 2 (n - 1)
sequential messages cost more than the CPU time it saves (4 ranks, see docs/lab-notes.md).
"""


def matmul_seconds(device: Device, m: int, k: int, n: int, dtype: str = "float32") -> float:
    """Seconds of ``[m, k] @ [k, n]``: 2 m k n operations, or the memory traffic if slower."""
    size = ITEM_BYTES.get(dtype, 1 if dtype.startswith("float8") else 4)
    return roofline_seconds(device, 2 * m * k * n, size * (m * k + k * n + m * n), dtype)


def roofline_seconds(device: Device, operations: float, count: int, dtype: str) -> float:
    """Roofline for matrix products: the slower of compute and memory (Williams et al. 2009)."""
    if dtype not in device.matmul:
        raise GulliverError(
            f"{device.name} has no rate for {dtype}, only for {', '.join(device.matmul)}; convert "
            "the model, or add that rate to the cluster file"
        )
    moved = memory_seconds(device, count)
    if dtype in device.matmul_curves:
        return max(device.matmul_curves[dtype].at(operations), moved)
    return max(device.launch_s + operations / device.matmul[dtype], moved)


def linear_flops(weights: int, tokens: int = 1) -> float:
    """Forward FLOPs of matrices with `weights` elements: one multiply-add per element and token."""
    return 2.0 * weights * tokens


def linear_seconds(
    device: Device,
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: str = "float32",
    backward: bool = False,
) -> float:
    """Seconds of a linear layer; `backward` adds the gradients of input and weight."""
    forward = matmul_seconds(device, tokens, inputs, outputs, dtype)
    return forward * (1 + BACKWARD_OF_LINEAR) if backward else forward


def memory_seconds(device: Device, count: int) -> float:
    # On a CPU, a tensor that is written without being read counts twice: its cache lines are
    # fetched before the write.
    if device.memory_curve is not None:
        return device.memory_curve.at(count)
    return device.launch_s + count / device.memory_rate


def copy_seconds(device: Device, count: int, to_device: bool) -> float:
    rate = device.to_device_rate if to_device else device.to_host_rate
    if rate is None:
        raise GulliverError(f"{device.name} has no copy rate because it computes in host memory")
    return device.launch_s + count / rate


def point_to_point_seconds(link: Link, count: int) -> float:
    """Seconds of a message, while another is sent in the opposite direction."""
    if link.messages is not None:
        return link.messages.at(count)
    return link.alpha_s + count / link.bandwidth


def reduce_scatter_seconds(axes: Axes, count: int) -> float:
    return _shrinking("reduce_scatter", axes, count)


def all_gather_seconds(axes: Axes, count: int) -> float:
    return _shrinking("all_gather", axes, count)


def all_reduce_seconds(axes: Axes, count: int) -> float:
    """Seconds of reduce-scatters, then an all-reduce on the outermost axis, then all-gathers."""
    total, left = 0.0, float(count)
    several = [axis for axis in axes if axis[0] > 1]
    for size, link in reversed(several[1:]):
        total += _one_axis("reduce_scatter", size, link, left)
        total += _one_axis("all_gather", size, link, left)
        left /= size
    return total + sum(_one_axis("all_reduce", size, link, left) for size, link in several[:1])


def host_seconds(axes: Axes, collective: str, count: int) -> float | None:
    """Seconds of a collective whose ranks read each other's memory; None if they cannot."""
    if len(axes) != 1 or os.environ.get("GULLIVER_SHARED_MEMORY") == "off":
        return None
    size, link = axes[0]
    if link.host_rate is None:
        return None
    times = 2 if collective == "all_reduce" else 1
    return times * (size - 1) / size * count / link.host_rate


def all_reduce_ways(link: Link, ranks: int, count: int) -> dict[str, float]:
    """Seconds of an all-reduce over gloo by algorithm, if both were measured.

    "direct" sends from each rank to all others, "ring" is gloo's own. Both send the same bytes but
    differ in CPU time per message, which formulas do not describe.
    """
    for measured in link.along:
        curves = measured.collectives
        if measured.ranks == ranks and {"all_reduce", "ring_all_reduce"} <= curves.keys():
            direct, ring = curves["all_reduce"], curves["ring_all_reduce"]
            return {"direct": direct.at(count), "ring": ring.at(count)}
    return {}


def all_to_all_seconds(axes: Axes, count: int) -> float:
    """Seconds of an all-to-all of `count` bytes per rank; all bytes cross every axis."""
    return sum(_one_axis("all_to_all", size, link, count) for size, link in axes if size > 1)


def packing_seconds(
    collective: str,
    axes: Axes,
    elements: int,
    pack_s: float,
    unpack_s: float,
    call_s: float = 0.0,
) -> float:
    """Seconds that a rank spends packing and unpacking for a collective in a wire format."""
    ranks = max(1, math.prod(size for size, _ in axes))
    others = 1 - 1 / ranks
    packed, unpacked, parts = {
        "all_gather": (1 / ranks, 1.0, ranks),
        "reduce_scatter": (others, others, 2 * ranks),
        "all_reduce": (1.0, 1.0 + others, 3 * ranks),
    }.get(collective, (1.0, 1.0, 2))
    return elements * (packed * pack_s + unpacked * unpack_s) + parts * call_s


def wire_bytes(axes: Axes, count: int, collective: Collective) -> list[float]:
    """Bytes sent by each rank along each axis, in the order of `axes`."""
    _check_collective(collective)
    sent, left = [], float(count)
    for size, _ in reversed(axes):
        sent.append(left * (size - 1) / size)
        if collective != "all_to_all":
            left /= size
    times = 2 if collective == "all_reduce" else 1
    return [times * amount for amount in reversed(sent)]


def resharding_bytes(before: Sequence[int], after: Sequence[int], item: float) -> float:
    """Mean bytes sent by each rank when a matrix is resharded from rows to columns.

    Args:
        before: rows of each rank before resharding.
        after: columns of each rank after resharding.
        item: bytes per element of the matrix.
    """
    stay = sum(rows * columns for rows, columns in zip(before, after, strict=True))
    return (sum(before) * sum(after) - stay) * item / len(before)


def zero_collectives(stage: int, chunks: Sequence[int]) -> list[tuple[Collective, int]]:
    """Collectives of a ZeRO step, with the bytes of each full tensor."""
    # Gradients of a chunk are reduce-scattered and its parameters gathered, at stage 3 once for the
    # forward and once for the backward, except for the last chunk, which backward uses first and
    # which is still gathered; stage 0 all-reduces gradients instead (Rajbhandari et al., ZeRO,
    # 2020, section 7).
    names: dict[int, tuple[Collective, ...]] = {
        0: ("all_reduce",),
        3: ("reduce_scatter", "all_gather", "all_gather"),
    }
    found: list[tuple[Collective, int]] = [
        (name, count)
        for count in chunks
        for name in names.get(stage, ("reduce_scatter", "all_gather"))
    ]
    return found[:-1] if stage == 3 else found


def conversion_seconds(device: Device, kind: str, axes: Axes, before: int, after: int) -> float:
    """Seconds of one step of a layout conversion, including reads and writes of memory."""
    local = memory_seconds(device, before + after)
    if kind == "swap":
        return local + max(point_to_point_seconds(link, before) for _, link in axes)
    if kind in ("slice", "split") or not axes:
        return local
    name, count = {
        "gather": ("all_gather", after),
        "exchange": ("all_to_all", before),
        "reduce": ("all_reduce", before),
        "scatter": ("reduce_scatter", before),
    }[kind]
    return local + collective_seconds(axes, name, count)


def collective_seconds(axes: Axes, collective: str, count: int) -> float:
    _check_collective(collective)
    return _SECONDS[collective](axes, count)


def _shrinking(collective: Collective, axes: Axes, count: int) -> float:
    total, left = 0.0, float(count)
    for size, link in reversed(axes):
        if size > 1:
            total += _one_axis(collective, size, link, left)
            left /= size
    return total


def _one_axis(collective: Collective, size: int, link: Link, count: float) -> float:
    for measured in link.along:
        if measured.ranks == size and collective in measured.collectives:
            return measured.collectives[collective].at(count)
    waits = (size - 1) * link.alpha_s if link.ring else link.alpha_s + (size - 2) * link.message_s
    times = 2 if collective == "all_reduce" else 1
    return times * (waits + (size - 1) / size * count / link.bandwidth)


def _check_collective(collective: str) -> None:
    check_known("collective", collective, get_args(Collective))


_SECONDS = {
    "all_reduce": all_reduce_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_gather": all_gather_seconds,
    "all_to_all": all_to_all_seconds,
}


# Costs of a step's collectives on a torus of any shape, mapped to a cluster.


Collectives = Sequence[tuple[str, int]]  # names of collectives, and bytes of their full tensors


# [Note: like with like] A measured cluster has timings of collectives on its own axes and on all
# ranks at once; for other shapes only latency and bandwidth are known, which ignore CPU time. To
# keep unmeasured shapes comparable with measured ones, their seconds are the measured ones of all
# ranks at once, scaled by the ratio of the formulas.
def torus_seconds(cluster: Cluster, sizes: Sequence[int], collectives: Collectives) -> float:
    """Seconds of sequential collectives over all ranks of a cluster.

    Args:
        cluster: measured or described cluster.
        sizes: ranks along each axis of the torus, outer to inner; a single size is a flat group of
            all ranks.
        collectives: names and bytes of the collectives.
    """
    if math.prod(sizes) != cluster.size:
        shown = " x ".join(map(str, sizes))
        raise GulliverError(
            f"{shown} is not a torus of {cluster.size} ranks; the product of the sizes must be "
            f"{cluster.size}"
        )
    axes, flat = torus_links(cluster, sizes), torus_links(cluster, [cluster.size])
    if _measured(axes, collectives) == _measured(flat, collectives):
        return _sum(axes, collectives)
    bare = _sum(_bare(axes), collectives) / _sum(_bare(flat), collectives)
    return bare * _sum(flat, collectives)


def torus_links(cluster: Cluster, sizes: Sequence[int]) -> list[tuple[int, Link]]:
    """Size and link of each axis of a torus; the link is the slowest one that its lines cross."""
    found, stride = [], cluster.size
    for size in sizes:
        stride //= size
        if size > 1:
            found.append((size, _slowest(cluster, stride, size)))
    return found


def _slowest(cluster: Cluster, stride: int, size: int) -> Link:
    lines = [
        (block + place, block + place + stride * (size - 1))
        for block in range(0, cluster.size, stride * size)
        for place in range(stride)
    ]
    # The ends of a line are the most distant positions in it.
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
