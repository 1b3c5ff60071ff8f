"""Seconds and bytes of looking rows of tables up: in memory, over the host link, between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.hardware._cluster import Cluster
from gulliver.hardware._costs import copy_seconds, memory_seconds, point_to_point_seconds

PASSES = 4
"""Times that the elements of a row that is used go through memory in a step: read in the forward,
written as a gradient, read and written by the update."""


@dataclass(frozen=True)
class LookupLoad:
    """Work of one rank in a step."""

    # Rows used, with repetitions.
    rows: float
    # Elements of a row.
    width: float
    # Elements of optimizer state of a row.
    state: float
    # Rows that are brought from the host, and as many sent back.
    missed: float
    # Bytes to other ranks, forward; as many come back as gradients.
    sent: float


def lookup_seconds(cluster: Cluster, load: LookupLoad) -> dict[str, float]:
    """Returns the seconds of a step's lookups by what takes them."""
    device = cluster.device
    touched = int(4 * load.rows * (PASSES * load.width + 2 * load.state))
    record = int(4 * load.missed * (load.width + load.state))
    if device.to_device_rate is None:
        fetch = 2 * memory_seconds(device, record) if record else 0.0
    else:
        fetch = copy_seconds(device, record, True) + copy_seconds(device, record, False)
    links = [axis.link for axis in cluster.axes if axis.size > 1]
    slow = min(links, key=lambda link: link.bandwidth) if links else None
    sent = int(load.sent)
    exchange = 2 * point_to_point_seconds(slow, sent) if slow is not None and sent else 0.0
    return {
        "memory": memory_seconds(device, touched) if touched else 0.0,
        "fetch": fetch if record else 0.0,
        "exchange": exchange,
    }
