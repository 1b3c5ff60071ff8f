"""``gulliver probe``: measures a machine and stores the result; ``gulliver doctor``."""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as ProgressBars
from rich.table import Table

from gulliver import __version__
from gulliver.cli.options import DoctorConfig, ProbeConfig
from gulliver.comm.collectives import (
    Group,
    all_gather,
    all_reduce,
    backend_all_reduce,
    broadcast_object,
    gather_objects,
    reduce_scatter,
)
from gulliver.comm.host import open_host_team
from gulliver.comm.torus import Torus, make_axes
from gulliver.comm.world import World, init_world
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Along, Axis, Cluster, Curve, Device, Disk
from gulliver.hardware.links import (
    probe_collectives,
    probe_links,
    probe_overlap,
    proposed_axes,
    with_collectives,
)
from gulliver.hardware.probe import forget_seconds, kept_path, probe_device, probe_disk
from gulliver.io.engine import Engine
from gulliver.io.files import named_errors, require_space
from gulliver.io.native import NativeEngine, default_engine, native_problem
from gulliver.jobs.display import print_json, report_console, working
from gulliver.precision.wire.formats import NAMES, wire_format
from gulliver.precision.wire.packing import PackRates, pack_rates

BUSY = 0.5
"""Relative spread of measurements above which the machine counts as busy."""
HOST_BYTES = 1 << 22
"""Bytes of a collective that times reading other ranks' memory: about a chunk of ZeRO."""
ONE_RANK = "link probing needs several ranks; run torchrun --nproc-per-node 4 -m gulliver probe"


class Progress(Protocol):
    """Callback with the current measurement, and the finished fraction if known."""

    def __call__(self, what: str, share: float | None = None) -> None: ...


def probe_command(config: ProbeConfig) -> int:
    return probe(config.out, config.folder, config.again, config.mib, config.json)


def probe(
    out: Path | None, folder: Path | None, again: bool, mib: int = 256, as_json: bool = False
) -> int:
    """Runs the command (collective)."""
    world = init_world()
    path = out or kept_path(world.size)
    console = Console(stderr=True, quiet=not world.is_main, markup=False, emoji=False)
    # Rank 0 looks for all ranks, which may see different file systems.
    kept, refusal = broadcast_object(_cached_probe(path, again, folder) if world.is_main else None)
    if refusal is not None:
        raise GulliverError(refusal)
    cluster, anew = kept or (None, True)
    if anew:
        with _bars(console) as progress:
            disk = measured_disk(world, folder or Path(), mib, progress)
            cluster = measured_cluster(world, disk, progress) if cluster is None else cluster
        cluster = replace(cluster, disk=disk)
        if world.is_main:
            cluster.save(path)
            forget_seconds()
    broadcast_object(None)  # all ranks measure again only after the cached values are deleted
    packing = measured_packing(world)
    assert cluster is not None
    if world.is_main:
        if as_json:
            rates = {name: vars(rate) for name, rate in packing.items()}
            print_json({"cluster": asdict(cluster), "packing": rates, "file": path})
        else:
            show(cluster, packing)
        done = f"measured {cluster.date}, kept in {path}; --again measures again"
        console.print(done if anew else f"kept in {path}")
        if world.size == 1:
            console.print(ONE_RANK)
    return 0


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    text = TextColumn("probing {task.description}")
    with ProgressBars(text, BarColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def progress(what: str, share: float | None = None) -> None:
            bars.update(task, description=what, total=share and 1.0, completed=share or 0.0)

        yield progress


def measured_disk(
    world: World, folder: Path, mib: int = 256, progress: Progress = lambda what, share=None: None
) -> Disk:
    """Measures a folder's disk on rank 0; all ranks get the result (collective)."""
    disk, refusal = broadcast_object(_disk(folder, mib, progress) if world.is_main else None)
    if refusal is not None:
        raise GulliverError(refusal)
    return disk


def measured_cluster(
    world: World, disk: Disk | None = None, progress: Progress = lambda what, share=None: None
) -> Cluster:
    """Measures device and links; all ranks get the same result (collective)."""
    # All ranks at once, because they also share the machine in a step.
    devices: list[Device] = gather_objects(probe_device(world.device, progress))
    axes, order, overlap = (), None, None
    if world.size > 1:
        axes, order = proposed_axes(world.size, probe_links(progress))
        axes = _with_collectives(axes, order, world.device, progress)
        axes = _with_host_rate(axes, order, world.device, progress)
        overlap = _overlap(world, progress)
    # The slowest rank's device counts for all, because a step waits for it.
    device = min(devices, key=lambda d: d.matmul["float32"])
    return Cluster(
        name=f"{world.size} x {device.name}",
        device=replace(device, overlap=overlap),
        axes=axes,
        disk=disk,
        measured=True,
        source="gulliver probe",
        date=date.today().isoformat(),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        rank_order=order,
    )


def measured_packing(world: World) -> dict[str, PackRates]:
    """Returns the measured or stored packing speed of wire formats (collective)."""
    names = [name for name in NAMES if name != "identity"]
    return {name: pack_rates(wire_format(name), world.device.type) for name in names}


def show(cluster: Cluster, packing: Mapping[str, PackRates] | None = None) -> None:
    """Prints a cluster as a table; spreads are interquartile ranges or maximum fit errors."""
    table = Table(title=cluster.name, title_justify="left")
    table.add_column("what")
    table.add_column("rate", justify="right")
    table.add_column("spread", justify="right")
    device, disk = cluster.device, cluster.disk
    for dtype, rate in device.matmul.items():
        curve = device.matmul_curves.get(dtype)
        spread = _percent(curve and curve.spread)
        table.add_row(f"matrix product, {dtype}", f"{rate / 1e9:,.1f} GFLOP/s", spread)
    spread = _percent(device.memory_curve and device.memory_curve.spread)
    table.add_row("memory", f"{device.memory_rate / 1e9:,.1f} GB/s", spread)
    table.add_row("start of an operation", f"{1e6 * device.launch_s:,.1f} us")
    if device.overlap is not None:
        table.add_row("communication hidden by compute", _percent(device.overlap))
    for name, rate in (
        ("copy to the device", device.to_device_rate),
        ("copy to the host", device.to_host_rate),
        ("disk, writing", disk and disk.write_rate),
        ("disk, reading", disk and disk.read_rate),
        ("disk, both at once", disk and disk.both_rate),
    ):
        if rate:
            table.add_row(name, f"{rate / 1e9:,.2f} GB/s")
    for name, rates in (packing or {}).items():
        pack, unpack = (4e-9 / seconds for seconds in (rates.pack_s, rates.unpack_s))
        table.add_row(f"packing float32 as {name}, unpacking", f"{pack:,.1f}, {unpack:,.1f} GB/s")
    for axis in cluster.axes:
        link = axis.link
        table.add_row(
            f"{axis.name} x {axis.size}, messages",
            f"{1e6 * link.alpha_s:,.0f} us, {link.bandwidth / 1e9:,.3f} GB/s",
            _percent(link.error),
        )
        if link.host_rate:
            read = f"{link.host_rate / 1e9:,.3f} GB/s"
            table.add_row(f"{axis.name} x {axis.size}, memory of other ranks", read)
        for measured in link.along:
            for name, curve in measured.collectives.items():
                rate = curve.sizes[-1] / curve.seconds[-1] / 1e9
                which = axis.name if measured.ranks == axis.size else "all"
                table.add_row(
                    f"{which} x {measured.ranks}, {name.replace('_', '-')}",
                    f"{1e6 * curve.seconds[0]:,.0f} us, {rate:,.3f} GB/s",
                    _percent(curve.spread),
                )
    report_console().print(table)
    if max((curve.spread or 0.0 for curve in _curves(cluster)), default=0.0) > BUSY:
        report_console().print(
            f"quartiles lie more than {100 * BUSY:.0f} % apart: the machine was busy; use --again "
            "when it is idle"
        )
    if cluster.rank_order is not None:
        report_console().print(f"order of ranks along the axes: {list(cluster.rank_order)}")


def _curves(cluster: Cluster) -> list[Curve]:
    memory = cluster.device.memory_curve
    along = [measured for axis in cluster.axes for measured in axis.link.along]
    return [
        *cluster.device.matmul_curves.values(),
        *([memory] if memory else []),
        *(curve for measured in along for curve in measured.collectives.values()),
    ]


def _with_collectives(
    axes: tuple[Axis, ...], order: tuple[int, ...] | None, device: torch.device, progress: Progress
) -> tuple[Axis, ...]:
    """Measures the collectives along each axis, and along all axes together."""
    named = make_axes({axis.name: axis.size for axis in axes}, order)

    def measured(torus: Torus) -> Along:
        made = _operations(torus, torus.size, device)
        if device.type == "cpu" and torus.size > 2:
            # Over gloo tensor parallelism takes the faster of the two; elsewhere they are one.
            made["ring_all_reduce"] = partial(_backend_reduce, torus.flat.process_group)
        alone = probe_collectives(made, torus.size, progress)
        # On a GPU, copy engines and NCCL's own blocks communicate while kernels run.
        busy = device.type == "cpu" and probe_collectives(made, torus.size, progress, busy=True)
        return Along(torus.size, alone, busy or {})

    found = [[measured(named.torus(axis.name))] for axis in axes]
    if len(axes) > 1:
        found[0].append(measured(named.torus(flat=True)))
    return tuple(
        replace(axis, link=with_collectives(axis.link, along))
        for axis, along in zip(axes, found, strict=True)
    )


def _with_host_rate(
    axes: tuple[Axis, ...], order: tuple[int, ...] | None, device: torch.device, progress: Progress
) -> tuple[Axis, ...]:
    """Measures how fast ranks (all, or else those of the last axis) read each other's memory."""
    inner = make_axes({axis.name: axis.size for axis in axes}, order).rank_group(axes[-1].name)
    for found, group in ((axes, None), (axes[-1:], inner.process_group)):
        if device.type != "cpu" or any(gather_objects(open_host_team(group))):
            continue
        size = math.prod(axis.size for axis in found)
        made = _operations(group, size, device)
        del made["all_reduce"]
        curves = probe_collectives(made, size, progress, sizes=(HOST_BYTES,))
        count = sum(curve.sizes[-1] for curve in curves.values()) * (1 - 1 / size)
        rate = count / sum(curve.seconds[-1] for curve in curves.values())
        fast = [replace(axis, link=replace(axis.link, host_rate=rate)) for axis in found]
        return *axes[: len(axes) - len(found)], *fast
    return axes


def _overlap(world: World, progress: Progress) -> float | None:
    """Measures how much of a gather the ranks' own compute hides, on CPUs."""
    if world.device.type != "cpu":
        return None  # copy engines and NCCL's own blocks communicate
    part = torch.ones(HOST_BYTES // 4 // world.size)

    def begin() -> Callable[[], object]:
        return all_gather(torch.ones(part.numel() * world.size), part, async_op=True).wait

    return probe_overlap(begin, progress)


def _backend_reduce(group: Any, count: int) -> Callable[[], object]:
    whole = torch.zeros(count // 4)
    return lambda: backend_all_reduce(whole, group=group)


def _operations(
    group: Group, size: int, device: torch.device
) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Returns, for each collective, a function that prepares a run with a number of bytes."""

    def tensors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.ones(count // 4, device=device)
        return whole, torch.ones(whole.numel() // size, device=device)

    def reduce(count: int) -> Callable[[], object]:
        # Zeros do not change, however often they are summed.
        whole = tensors(count)[0].zero_()
        return lambda: all_reduce(whole, group=group)

    def scatter(count: int) -> Callable[[], object]:
        whole, part = tensors(count)
        return lambda: reduce_scatter(part, whole, group=group)

    def gather(count: int) -> Callable[[], object]:
        whole, part = tensors(count)
        return lambda: all_gather(whole, part, group=group)

    return {"all_reduce": reduce, "reduce_scatter": scatter, "all_gather": gather}


def _cached_probe(
    path: Path, again: bool, folder: Path | None
) -> tuple[tuple[Cluster, bool] | None, str | None]:
    """Returns the stored cluster and whether its disk differs, or why there is none."""
    try:
        if path.exists() and not again:
            kept = Cluster.load(path)
            known = folder is None or (kept.disk is not None and kept.disk.has(folder))
            return (kept, not known), None
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent):
            pass
    except GulliverError as error:
        return None, f"{error}; --again measures again"
    except OSError as error:
        return None, (
            f"cannot write {path}: {error.strerror}; choose another file with --out, or another "
            "folder with GULLIVER_CACHE"
        )
    return None, None


def _disk(folder: Path, mib: int, progress: Progress) -> tuple[Disk | None, str | None]:
    def said(what: str, share: float) -> None:
        progress(f"disk of {folder}, {what}", share)

    try:
        return probe_disk(folder, mib << 20, progress=said), None
    except GulliverError as error:
        return None, str(error)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


# ``gulliver doctor``: what this machine supports, and how fast its disk is.


MIB, GIB = 2**20, 2**30
PACKAGES = ("transformers", "diffusers", "peft", "accelerate", "lightning", "fastapi", "av", "ray")
"""Packages of extras whose versions are shown."""
BACKENDS = {
    "gloo": torch.distributed.is_gloo_available,
    "NCCL": torch.distributed.is_nccl_available,
    "MPI": torch.distributed.is_mpi_available,
}


def doctor_command(config: DoctorConfig) -> int:
    folder, nbytes = config.folder, config.mib * MIB
    check_folder(folder)
    with named_errors(folder):
        require_space(folder, nbytes)
    rows = [("gulliver", f"{__version__} on {platform.node()}"), *machine()]
    with default_engine() as engine:
        rows += engine_rows(engine)
        free = shutil.disk_usage(folder).free
        rows.append(("free space", f"{free / GIB:,.1f} GiB in {folder}"))
    with working(f"measuring the disk of {folder}"):
        disk = probe_disk(folder, nbytes)
    if config.json:
        rates = {"write": disk.write_rate, "read": disk.read_rate}
        print_json({**dict(rows), "disk_bytes_per_second": rates})
        return 0
    for what, rate in (("writing", disk.write_rate), ("reading", disk.read_rate)):
        rows.append(
            (f"disk, {what}", f"{rate / 1e9:,.2f} GB/s, past the page cache where possible")
        )
    table = Table("what", "found")
    for row in rows:
        table.add_row(*row)
    report_console().print(table)
    return 0


def check_folder(folder: Path) -> None:
    """Rejects a path that is not a folder, before anything is measured."""
    if not folder.exists():
        raise GulliverError(
            f"{folder} does not exist: --folder must be a folder on the disk to test"
        )
    if not folder.is_dir():
        raise GulliverError(
            f"{folder} is not a folder: --folder must be a folder on the disk to test"
        )


def machine() -> Iterator[tuple[str, str]]:
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    yield "torch", f"{torch.__version__}, Python {platform.python_version()}"
    yield "GPUs", ", ".join(devices) or "none"
    yield "CUDA of torch", torch.version.cuda or "none"
    yield "backends", ", ".join(name for name, there in BACKENDS.items() if there()) or "none"
    yield "packages", ", ".join(_versions())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield (
        "cores",
        f"{usable} usable of {os.cpu_count()}, {torch.get_num_threads()} threads in torch",
    )
    yield "memory", _memory()


def engine_rows(engine: Engine) -> Iterator[tuple[str, str]]:
    """Yields the active I/O engine, and why no better one is used."""
    forced = os.environ.get("GULLIVER_IO")
    if forced:
        why = f"GULLIVER_IO={forced}"
    elif isinstance(engine, NativeEngine):
        why = "as built" if not engine.ring_problem else f"no io_uring: {engine.ring_problem}"
    else:
        why = native_problem() or "as requested"
    yield "I/O engine", f"{engine.kind} ({why})"
    yield "io_uring", _ring()


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _ring() -> str:
    problem = native_problem()
    if problem:
        return f"not known: {problem}"
    try:
        NativeEngine(pages=1, page_bytes=4096, io_uring=True).close()
    except GulliverError as error:
        return str(error)
    return "allowed"


def _memory() -> str:
    info = Path("/proc/meminfo")
    if not info.exists():
        return "not known"
    lines = (line.split() for line in info.read_text().splitlines())
    sizes = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) > 1}
    free = sizes.get("MemAvailable", sizes["MemFree"])
    return f"{free / GIB:,.1f} GiB available of {sizes['MemTotal'] / GIB:,.1f}"
