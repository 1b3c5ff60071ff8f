"""``gulliver doctor``: what runs here, and how fast the disk is."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gulliver import __version__
from gulliver.errors import GulliverError
from gulliver.hardware.probe import probe_disk
from gulliver.io.engine import Engine
from gulliver.io.files import named_errors, require_space
from gulliver.io.native import NativeEngine, default_engine, native_problem

MIB = 2**20
GIB = 2**30


def doctor(folder: Path, mib: int) -> int:
    """Runs the command."""
    check_folder(folder)
    with named_errors(folder):
        require_space(folder, mib * MIB)
    table = Table(title=f"Gulliver {__version__} on {platform.node()}", title_justify="left")
    table.add_column("what")
    table.add_column("found")
    for what, found in machine():
        table.add_row(what, found)
    with default_engine() as engine:
        for what, found in engine_rows(engine):
            table.add_row(what, found)
        table.add_row("free space", f"{shutil.disk_usage(folder).free / GIB:,.1f} GiB in {folder}")
    disk = probe_disk(folder, mib * MIB)
    for what, rate in (("writing", disk.write_rate), ("reading", disk.read_rate)):
        table.add_row(
            f"disk, {what}", f"{rate / 1e9:,.2f} GB/s, past the page cache where possible"
        )
    Console(markup=False, emoji=False).print(table)
    return 0


def check_folder(folder: Path) -> None:
    """Refuses what is no folder, before anything is measured."""
    if not folder.exists():
        raise GulliverError(f"{folder} does not exist: --folder names a folder on the disk to test")
    if not folder.is_dir():
        raise GulliverError(f"{folder} is not a folder: --folder names one on the disk to test")


def machine() -> Iterator[tuple[str, str]]:
    """Yields versions, devices, cores and memory, each as a row of the table."""
    devices = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    yield "torch", f"{torch.__version__}, Python {platform.python_version()}"
    yield "GPUs", ", ".join(devices) or "none"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield (
        "cores",
        f"{usable} usable of {os.cpu_count()}, {torch.get_num_threads()} threads in torch",
    )
    yield "memory", _memory()


def engine_rows(engine: Engine) -> Iterator[tuple[str, str]]:
    """Yields the engine that runs, and why not a better one."""
    forced = os.environ.get("GULLIVER_IO")
    if forced:
        why = f"GULLIVER_IO={forced}"
    elif isinstance(engine, NativeEngine):
        why = "as built" if not engine.ring_problem else f"no io_uring: {engine.ring_problem}"
    else:
        why = native_problem() or "as asked for"
    yield "I/O engine", f"{engine.kind} ({why})"
    yield "io_uring", _ring()


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
