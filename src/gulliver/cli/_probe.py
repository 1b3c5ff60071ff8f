"""``gulliver probe``: measures, shows, and keeps what it found until something changes."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gulliver.comm import gather_objects, init_world
from gulliver.errors import GulliverError
from gulliver.hardware import (
    Axis,
    Cluster,
    Device,
    Link,
    group_into_nodes,
    probe_device,
    probe_disk,
    probe_links,
)
from gulliver.io import cache_folder


def probe(out: Path | None, folder: Path, again: bool) -> int:
    """Runs the command; every rank calls it."""
    world = init_world()
    path = out or kept_path(world.size)
    console = Console(stderr=True, quiet=not world.is_main)
    if path.exists() and not again:
        if world.is_main:
            cluster = Cluster.load(path)
            show(cluster)
            console.print(f"measured {cluster.date}, kept in {path}; --again measures anew")
        return 0
    if world.is_main:
        _check_writable(path)
    with console.status("probing") as status:

        def progress(what: str) -> None:
            status.update(f"probing: {what}")

        device = probe_device(world.device, progress)
        progress(f"disk of {folder}")
        disk = probe_disk(folder) if world.is_main else None
        # The slowest rank's device stands for all: a step waits for it.
        devices: list[Device] = gather_objects(device)
        device = min(devices, key=lambda d: d.matmul["float32"])
        axes, order = (), None
        if world.size > 1:
            axes, order = proposed_axes(world.size, probe_links(progress))
    if not world.is_main:
        return 0
    cluster = Cluster(
        name=f"{world.size} x {device.name}",
        device=device,
        axes=axes,
        disk=disk,
        measured=True,
        source="gulliver probe",
        date=date.today().isoformat(),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        rank_order=order,
    )
    cluster.save(path)
    show(cluster)
    console.print(f"kept in {path}")
    if world.size == 1:
        console.print("links: run it under torchrun, a rank per device, to measure them too")
    return 0


def proposed_axes(
    size: int, links: dict[tuple[int, int], Link]
) -> tuple[tuple[Axis, ...], tuple[int, ...] | None]:
    """Axes for ranks with these links, and the order in which the ranks fill them."""
    nodes = group_into_nodes(size, links)
    inside = {(a, b) for node in nodes for a in node for b in node if a < b}
    axes = []
    if len(nodes) > 1:
        axes.append(Axis("node", len(nodes), _slowest(links, set(links) - inside)))
    if len(nodes[0]) > 1:
        axes.append(Axis("local", len(nodes[0]), _slowest(links, inside)))
    order = tuple(rank for node in nodes for rank in node)
    return tuple(axes), None if order == tuple(range(size)) else order


def kept_path(size: int) -> Path:
    """Where the measurement of this machine with so many ranks is kept."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    hosts = sorted(set(gather_objects(socket.gethostname())))
    what = [hosts, gpu, os.cpu_count(), torch.__version__, torch.get_num_threads(), size]
    key = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return cache_folder() / "clusters" / f"{key}.yaml"


def show(cluster: Cluster) -> None:
    """Prints a cluster as a table."""
    table = Table(title=cluster.name, title_justify="left")
    table.add_column("what")
    table.add_column("rate", justify="right")
    for dtype, rate in cluster.device.matmul.items():
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e9:,.1f} GFLOP/s")
    table.add_row("memory", f"{cluster.device.memory_rate / 1e9:,.1f} GB/s")
    table.add_row("start of an operation", f"{1e6 * cluster.device.launch_s:,.1f} us")
    for name, rate in (
        ("copy to the device", cluster.device.to_device_rate),
        ("copy to the host", cluster.device.to_host_rate),
        ("disk, writing", cluster.disk and cluster.disk.write_rate),
        ("disk, reading", cluster.disk and cluster.disk.read_rate),
    ):
        if rate:
            table.add_row(name, f"{rate / 1e9:,.2f} GB/s")
    for axis in cluster.axes:
        fit = "" if axis.link.error is None else f", fit {100 * axis.link.error:.0f} %"
        table.add_row(
            f"axis {axis.name} of {axis.size}",
            f"{1e6 * axis.link.alpha_s:,.0f} us, {axis.link.bandwidth / 1e9:,.3f} GB/s{fit}",
        )
    Console().print(table)


def _slowest(links: dict[tuple[int, int], Link], pairs: set[tuple[int, int]]) -> Link:
    return max((links[p] for p in pairs), key=lambda link: link.alpha_s + 2**20 / link.bandwidth)


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".write").open("w"):
            pass
        (path.parent / ".write").unlink()
    except OSError as error:
        raise GulliverError(
            f"cannot write {path}: {error.strerror}; choose another file with --out, or another "
            "folder with GULLIVER_CACHE"
        ) from error
