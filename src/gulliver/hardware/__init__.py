"""What things cost: devices, links and disks, measured or described, and the formulas on them."""

from gulliver.hardware._cluster import (
    Along,
    Axis,
    Cluster,
    Device,
    Disk,
    Link,
    described,
    described_names,
)
from gulliver.hardware._costs import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    broadcast_seconds,
    copy_seconds,
    disk_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
    wire_bytes,
)
from gulliver.hardware._curve import Curve
from gulliver.hardware._kept import current_cluster, kept_path
from gulliver.hardware._links import (
    fit_line,
    group_into_nodes,
    pair_rounds,
    probe_collectives,
    probe_links,
    proposed_axes,
)
from gulliver.hardware._probe import probe_device, probe_disk

__all__ = [
    "Along",
    "Axis",
    "Cluster",
    "Curve",
    "Device",
    "Disk",
    "Link",
    "all_gather_seconds",
    "all_reduce_seconds",
    "all_to_all_seconds",
    "broadcast_seconds",
    "copy_seconds",
    "current_cluster",
    "described",
    "described_names",
    "disk_seconds",
    "fit_line",
    "group_into_nodes",
    "kept_path",
    "matmul_seconds",
    "memory_seconds",
    "pair_rounds",
    "point_to_point_seconds",
    "probe_collectives",
    "probe_device",
    "probe_disk",
    "probe_links",
    "proposed_axes",
    "reduce_scatter_seconds",
    "wire_bytes",
]
