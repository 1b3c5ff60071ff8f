"""The cost formulas, all of them: seconds from bytes and operations.

Messages follow Hockney's model, alpha + bytes / bandwidth. Collectives over several axes go step by
step: the whole payload along the innermost axis, what is left of it along the next. Along one axis
of n ranks a reduce-scatter and an all-gather are direct exchanges: every rank sends n-1 messages of
1/n of the payload at once, so that latency is paid once and each link carries (n-1)/n of it.

`axes` are pairs of size and link, outer to inner, as `Cluster.links` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gulliver.errors import GulliverError, nearest
from gulliver.hardware._cluster import Device, Disk, Link

Axes = Sequence[tuple[int, Link]]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


def matmul_seconds(device: Device, m: int, k: int, n: int, dtype: str = "float32") -> float:
    """A product of ``[m, k]`` and ``[k, n]``: 2 m k n operations, or its bytes if slower.

    Raises:
        GulliverError: the device has no rate for the dtype.
    """
    if dtype not in device.matmul:
        raise GulliverError(
            f"{device.name} has no rate for {dtype}: {nearest(dtype, device.matmul)}"
        )
    size = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}.get(dtype, 4)
    moved = size * (m * k + k * n + m * n)
    work = max(2 * m * k * n / device.matmul[dtype], moved / device.memory_rate)
    return device.launch_s + work


def memory_seconds(device: Device, count: int) -> float:
    """An operation that reads and writes `count` bytes together and computes little."""
    return device.launch_s + count / device.memory_rate


def copy_seconds(device: Device, count: int, to_device: bool) -> float:
    """A copy between pinned host memory and the device.

    Raises:
        GulliverError: the device is the host.
    """
    rate = device.to_device_rate if to_device else device.to_host_rate
    if rate is None:
        raise GulliverError(f"{device.name} has no copy rate: it computes in host memory")
    return device.launch_s + count / rate


def disk_seconds(disk: Disk, count: int, write: bool) -> float:
    """Reading or writing `count` bytes of a large file."""
    return count / (disk.write_rate if write else disk.read_rate)


def point_to_point_seconds(link: Link, count: int) -> float:
    """A message of `count` bytes."""
    return link.alpha_s + count / link.bandwidth


def reduce_scatter_seconds(axes: Axes, count: int) -> float:
    """Of `count` bytes, along the axes from the innermost outwards."""
    total, left = 0.0, float(count)
    for size, link in reversed(axes):
        if size > 1:
            total += link.alpha_s + left * (size - 1) / size / link.bandwidth
            left /= size
    return total


def all_gather_seconds(axes: Axes, count: int) -> float:
    """To `count` bytes, along the axes from the outermost inwards; as its mirror image."""
    return reduce_scatter_seconds(axes, count)


def all_reduce_seconds(axes: Axes, count: int) -> float:
    """Of `count` bytes: a reduce-scatter and an all-gather."""
    return reduce_scatter_seconds(axes, count) + all_gather_seconds(axes, count)


def wire_bytes(axes: Axes, count: int, collective: Collective) -> list[float]:
    """Bytes that each rank sends along each axis, in the order of `axes`."""
    sent, left = [], float(count)
    for size, _ in reversed(axes):
        sent.append(left * (size - 1) / size)
        left /= size
    times = 2 if collective == "all_reduce" else 1
    return [times * amount for amount in reversed(sent)]
