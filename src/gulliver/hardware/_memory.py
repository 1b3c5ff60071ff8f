"""How much memory there is for a process: the device's, or what its control group lets it have."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_ROOT = Path("/sys/fs/cgroup")
_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Files that hold the limit, by the hierarchy: of version 2, and of version 1."""
PLANNED = {"cuda": (0.9, "its GPU's"), "cpu": (0.1, "the machine's, for each rank")}
"""Share of a memory that is planned with."""


def memory_bytes(device: str) -> int:
    """Bytes that a process may have at most of the memory of a kind of device.

    Args:
        device: ``cuda``, for the present one, or ``cpu``: the machine's memory, or the limit of
            this process's control group (version 1 or 2) where that is less.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *group_limits()])


def planned_memory(kind: str, size: int | None = None) -> tuple[float, str]:
    """Bytes of a rank that data-centric steps are planned with unless told otherwise, and why."""
    share, whose = PLANNED[kind]
    return float(math.floor(share * (size or memory_bytes(kind)))), f"{share:.0%} of {whose}"


def group_limits(root: Path = _ROOT, member: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limits in bytes of the control groups that this process is in, from its own outwards."""
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
