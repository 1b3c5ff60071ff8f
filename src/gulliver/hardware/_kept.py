"""Where measurements are kept, and which cluster counts as the present one.

A measurement is good for the machines it was made on: its file is named by a fingerprint of hosts,
processor, cores, threads, GPUs, torch and the number of ranks, so that it is not found when any of
them changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Cluster, described
from gulliver.hardware._probe import processor
from gulliver.io import cache_folder, write_text

LIKE = {
    "H100": "8xh100-infiniband",
    "H200": "8xh200-infiniband",
    "B200": "8xb200-infiniband",
    "A100": "8xa100-infiniband",
    "": "4x4090-pcie",
}
"""The description for a GPU whose name has a word in it; the first that fits."""
CPU = "cpu-loopback"
Seconds = TypeVar("Seconds", bound=tuple[float, ...])


def current_cluster(world_size: int) -> Cluster:
    """What these machines can do, as far as it is known.

    The measurement that ``gulliver probe`` kept for this fingerprint, or else a description of
    machines with the same kind of device, with `measured` False. Where a process group of
    `world_size` ranks is up, every rank calls it and gets what rank 0 found.

    Args:
        world_size: ranks.

    Raises:
        GulliverError: the kept file was edited into something that cannot be read.
    """
    path = kept_path(world_size)
    together = _together(world_size)
    found: list[Any] = [None]
    if not together or dist.get_rank() == 0:
        try:
            found[0] = Cluster.load(path) if path.exists() else likely_cluster(world_size)
        except Exception as error:
            # The others are waiting for it.
            found[0] = error
    if together:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def likely_cluster(world_size: int) -> Cluster:
    """A description of machines with this kind of device, resized to so many ranks."""
    if not torch.cuda.is_available():
        return described(CPU).resized(world_size)
    gpu = torch.cuda.get_device_properties(0)
    cluster = described(next(name for word, name in LIKE.items() if word in gpu.name))
    device = replace(cluster.device, name=gpu.name, memory_bytes=gpu.total_memory)
    return replace(cluster, device=device).resized(world_size)


def kept_path(world_size: int) -> Path:
    """The file of the measurement; where the process group is up, every rank calls it."""
    return cache_folder() / "clusters" / f"{fingerprint(world_size)}.yaml"


def fingerprint(world_size: int) -> str:
    """Sixteen digits that change when a measurement should be made anew."""
    return digest({"hosts": _hosts(world_size), **machine_facts(), "ranks": world_size})


def kept_seconds(facts: dict[str, Any], measure: Callable[[], Seconds], count: int = 2) -> Seconds:
    """Seconds that were measured here before, of something with the same facts; or measures them.

    They are kept, so that a run that goes on plans what it has planned before.

    Args:
        facts: what they depend on, besides the machine.
        measure: measures them.
        count: number of them.
    """
    path = _seconds_folder() / f"{digest({**machine_facts(), **facts})}.json"
    try:
        kept: Any = tuple(float(seconds) for seconds in json.loads(path.read_text("utf-8")))
        if len(kept) == count:
            return kept
    except (OSError, ValueError, TypeError):
        pass
    found = measure()
    with suppress(OSError, GulliverError):  # a folder that cannot be written keeps nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(found))
    return found


def forget_seconds() -> None:
    """Lets `kept_seconds` measure anew."""
    shutil.rmtree(_seconds_folder(), ignore_errors=True)


def _seconds_folder() -> Path:
    return cache_folder() / "seconds"


def machine_facts() -> dict[str, Any]:
    """Facts that tell machines apart: processor, cores, threads, GPUs and torch."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": _gpus(),
        "torch": torch.__version__,
    }


def digest(facts: dict[str, Any]) -> str:
    """Sixteen digits of what a measurement depends on."""
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]


def _hosts(world_size: int) -> list[str]:
    name = socket.gethostname()
    if not _together(world_size):
        return [name]
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, name)
    return sorted(set(names))


def _together(world_size: int) -> bool:
    return dist.is_initialized() and dist.get_world_size() == world_size > 1


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
