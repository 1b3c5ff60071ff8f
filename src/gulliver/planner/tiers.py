"""Converts memory options of plugins to the plan's `tiers` section; chooses chunk sizes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.offload import host_rates, seconds_text
from gulliver.hardware.probe import current_cluster, memory_bytes
from gulliver.options import byte_size, size_text
from gulliver.plan.plan import Plan
from gulliver.plan.tree import Tiers
from gulliver.planner.activations import plan_activations
from gulliver.planner.ranks import largest_residency, rank_states, rank_work, state_bytes
from gulliver.planner.residency import chunk_sizes, tier_rates
from gulliver.planner.resolve import cut_model

_ANY = 2**60  # any memory size, to which a share applies while only its syntax is checked


@dataclass(frozen=True)
class MemoryTiers:
    """Memory options of a plugin; see `LimitOptions`, `PlacementOptions` and `StepOptions`."""

    memory_limit: int | float | str
    host_limit: int | float | str | None = None
    disk: Path | str | None = None
    placement_policy: str = "auto"
    shard_param_frac: float = 1.0
    offload_optim_frac: float | None = None
    offload_param_frac: float | None = None
    step_in_backward: bool = False
    activations: str = "keep"
    keep_freed: bool = True

    def __post_init__(self) -> None:
        byte_size("memory_limit", self.memory_limit, _ANY)
        if self.host_limit is not None:
            byte_size("host_limit", self.host_limit, _ANY)
        if self.disk is not None:
            split_disk(str(self.disk))
        if self.shard_param_frac != 1:
            raise GulliverError(
                f"shard_param_frac={self.shard_param_frac} is not supported: 1.0 shards all "
                "parameters; LowLevelZeroPlugin(stage=2) keeps full parameters on every rank"
            )
        for name in ("offload_optim_frac", "offload_param_frac"):
            if (share := getattr(self, name)) is not None and self.placement_policy != "static":
                raise GulliverError(
                    f"{name}={share} needs placement_policy='static': 'auto' chooses the shares"
                )

    def tiers(self, device: str) -> Tiers:
        if self.host_limit is not None and device == "cpu":
            raise GulliverError(
                f"host_limit={self.host_limit!r} does not apply to ranks on the CPU, where "
                "memory_limit covers host memory; use a disk instead"
            )
        whole = memory_bytes(device) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        host = 0
        if self.host_limit is not None:
            host = byte_size("host_limit", self.host_limit, memory_bytes("cpu"))
        folder, size = (None, None) if self.disk is None else split_disk(str(self.disk))
        optim, param = self.offload_optim_frac, self.offload_param_frac
        return Tiers(
            limit=byte_size("memory_limit", self.memory_limit, whole),
            host=host,
            disk=folder,
            disk_bytes=0 if folder is None or size is None else _disk_bytes(folder, size),
            policy=self.placement_policy,
            offload_optim=1.0 if optim is None else float(optim),
            offload_param=1.0 if param is None else float(param),
            step_in_backward=self.step_in_backward,
            activations=self.activations,
            keep_freed=self.keep_freed,
        )


def split_disk(text: str) -> tuple[str, str]:
    """Splits ``/scratch:100GiB`` into folder and size; the folder may contain colons."""
    folder, colon, size = text.rpartition(":")
    if not folder:
        lacks, example = ("folder", f"/scratch{text}") if colon else ("size", f"{text}:100GiB")
        raise GulliverError(f"disk={text!r} has no {lacks}: set both, such as disk={example!r}")
    try:
        byte_size("disk", size, _ANY)
    except GulliverError as error:
        why = str(error).removeprefix(f"disk={size!r} ")
        raise GulliverError(f"disk={text!r}: {size!r} {why}") from None
    return folder, size


def _disk_bytes(folder: str, size: str) -> int:
    whole = shutil.disk_usage(folder).free if size.endswith("%") and Path(folder).is_dir() else 0
    return byte_size("disk", size, whole or _ANY)


def plan_tiers(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cluster: Cluster | None,
    chosen: bool,
) -> Plan:
    """Chooses activation handling and chunk size by predicted step time."""
    given = cut_model(plan, model, optimizer)
    assert plan.tiers is not None, "the plan has a limit"
    rates = tier_rates(plan.tiers, cluster or current_cluster(plan.mesh.size))
    plan = plan_activations(plan, model, lambda: state_bytes(given.plan, given.sizes()), rates)
    tiers = plan.tiers
    assert tiers is not None, "the plan has a limit"
    if not chosen:
        return plan
    work = rank_work(given.with_plan(plan))
    tried, errors = list[tuple[float, int, str]](), dict[int, GulliverError]()
    for size in chunk_sizes(sum(t.numel * t.dtype.itemsize for t in given.sizes())):
        one = plan.with_zero(chunk_bytes=size, chunks=())
        try:
            states = rank_states(given.with_plan(one))
            found = largest_residency(states, tiers, work, "farthest")
        except GulliverError as error:
            errors[size] = error
            continue
        moves = found.moved.read + found.moved.written
        seconds = None if rates is None else found.seconds(work, rates).step
        told = f"{len(found.state.chunks)} chunks move {size_text(moves)} in a step"
        told += "" if seconds is None else f", {seconds_text(seconds)}"
        # Among equals, prefer the larger size, which yields fewer chunks.
        tried.append((moves if seconds is None else seconds, -size, told))
    if not tried:
        raise errors[min(errors)]
    _, size, told = min(tried)
    size, (_, _, worst) = -size, max(tried)
    why = f"{size_text(size)}: {told}" + (f"; at worst {worst}" if len(tried) > 1 else "")
    reasons = {**plan.reasons, "zero.chunk_bytes": why}
    return replace(plan.with_zero(chunk_bytes=size), reasons=reasons)


# Memory tiers that state is offloaded to.


@dataclass(frozen=True)
class OffloadTiers:
    """Host memory and disk available to a rank, for state that does not fit on its device."""

    # Bytes of page-locked host memory of a rank; 0 for none.
    host: int = 0
    # Folder on the disk of a rank; None without a disk.
    disk: str | None = None
    # Bytes that a rank may store on the disk.
    disk_bytes: int = 0

    def __bool__(self) -> bool:
        return self.host > 0 or self.disk is not None

    def __str__(self) -> str:
        names = ["host"] * (self.host > 0) + ["disk"] * (self.disk is not None)
        return " and ".join(names)

    @classmethod
    def of(cls, host: int | str | None, disk: str | None) -> Self:
        folder, size = (None, "0") if disk is None else split_disk(disk)
        return cls(
            0 if host is None else byte_size("host", host),
            folder,
            0 if folder is None else byte_size("disk", size),
        )

    @property
    def bytes(self) -> int:
        return self.host + self.disk_bytes

    def check(self, cluster: Cluster) -> None:
        """Rejects tiers that the machines lack, or whose speed is unknown."""
        if self.host and host_rates(cluster.device) is None:
            raise GulliverError(
                f"host={size_text(self.host)} does not apply: ranks of {cluster.name} run in host "
                "memory, which the memory limit covers; use a disk instead"
            )
        if self.disk is not None and cluster.disk is None:
            raise GulliverError(
                f"disk={self.disk!r}: {cluster.name} has no disk rates; measure them with gulliver "
                f"probe --folder {self.disk}, or add them to the cluster's file"
            )


NOTHING = OffloadTiers()  # no slower tiers
