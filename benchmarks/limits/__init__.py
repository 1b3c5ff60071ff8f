"""Limits that the kernel keeps: processes with so much memory, disks of such a rate, a swap file.

A process that needs more memory than its group has is killed, as on a machine that has no more; a
disk that is shaped is as slow as asked for whatever goes past the page cache. So that something
runs within a limit is shown here, not estimated. It needs root, and cgroups of version 1 or 2.

    with Group(memory=6 * GIB, read_bps=500 * MB, write_bps=500 * MB, disk=folder) as group:
        process = group.start(["python", "-m", "something"])
        ...
        print(group.peak, group.kills)
"""

from benchmarks.limits._group import Group, LimitsError, Place, check_limits, disk_bytes, places
from benchmarks.limits._swap import Swap

__all__ = ["Group", "LimitsError", "Place", "Swap", "check_limits", "disk_bytes", "places"]
