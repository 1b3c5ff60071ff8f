"""What things cost: devices, links and disks, measured or described, and the formulas on them."""

from gulliver.hardware._cluster import Axis, Cluster, Device, Disk, Link, described, described_names
from gulliver.hardware._costs import (
    all_gather_seconds,
    all_reduce_seconds,
    copy_seconds,
    disk_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
    wire_bytes,
)
from gulliver.hardware._probe import (
    fit_line,
    group_into_nodes,
    pair_rounds,
    probe_device,
    probe_disk,
    probe_links,
)

__all__ = [
    "Axis",
    "Cluster",
    "Device",
    "Disk",
    "Link",
    "all_gather_seconds",
    "all_reduce_seconds",
    "copy_seconds",
    "described",
    "described_names",
    "disk_seconds",
    "fit_line",
    "group_into_nodes",
    "matmul_seconds",
    "memory_seconds",
    "pair_rounds",
    "point_to_point_seconds",
    "probe_device",
    "probe_disk",
    "probe_links",
    "reduce_scatter_seconds",
    "wire_bytes",
]
