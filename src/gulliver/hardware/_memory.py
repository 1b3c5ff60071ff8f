"""How much memory there is for a process: the device's, or what its control group lets it have."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_ROOT = Path("/sys/fs/cgroup")
_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Files that hold the limit, by the hierarchy: of version 2, and of version 1."""


def memory_bytes(device: str) -> int:
    """Bytes that a process may have at most of the memory of a kind of device.

    Args:
        device: ``cuda``, for the present one, or ``cpu``: the machine's memory, or the limit of
            this process's control group (version 1 or 2) where that is less.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *group_limits()])


def group_limits(root: Path = _ROOT, member: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limits in bytes of the control groups that this process is in, from its own outwards.

    Args:
        root: folder that the groups are mounted in.
        member: file that says which groups the process is in.
    """
    limits = list[int]()
    for line in _lines(member):
        _, kinds, path = line.split(":", 2)
        kind = "memory" if "memory" in kinds.split(",") else kinds
        if kind not in _LIMITS:
            continue
        folder = root / kind / path.strip("/")
        for group in (folder, *folder.parents):
            for text in _lines(group / _LIMITS[kind]):
                limits += [int(text)] if text.isdigit() else []
            if group == root / kind:
                break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
