"""Measures what this machine can do: its processor or GPU, and a disk.

Everything is a median of several turns after a warm-up; curves also keep how far the quartiles lie
apart. Links between ranks are measured in `_links.py`. float32 products are measured as torch is
set: with or without TF32.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Device, Disk
from gulliver.hardware._curve import Curve
from gulliver.hardware._timing import curve_of, in_turns, once

Progress = Callable[[str], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Sides of square matrices; the row ends when a product takes longer than `LONGEST_S`."""
LONGEST_S = 0.02
TENSOR_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Sizes of tensors of an element-wise operation; it reads two and writes one."""
BLOCK_BYTES = 1 << 22


def probe_device(device: torch.device, progress: Progress = lambda _: None) -> Device:
    """Measures rates of a device; takes some seconds."""
    curves = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        progress(f"matrix product, {name}")
        curves[name] = _matmul_curve(device, dtype)
    progress("memory")
    memory = _memory_curve(device)
    small = torch.ones(1, device=device)
    launch_s = statistics.median(in_turns({0: lambda: small.add_(0.0)}, device)[0])
    rates = {name: curve.sizes[-1] / curve.seconds[-1] for name, curve in curves.items()}
    rate = memory.sizes[-1] / memory.seconds[-1]
    up = down = None
    if device.type == "cuda":
        progress("copies")
        up, down = _copy_rates(device)
        properties = torch.cuda.get_device_properties(device)
        kind, size = properties.name, properties.total_memory
    else:
        kind = f"{processor()}, {torch.get_num_threads()} threads"
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(kind, rates, rate, size, launch_s, up, down, curves, memory)


def probe_disk(folder: Path, count: int = 1 << 27, turns: int = 3) -> Disk:
    """Measures a folder's file system with a file of `count` bytes, which is removed again.

    Raises:
        GulliverError: nothing can be written there, or there is no room.
    """
    writes, reads, empty = [], [], []
    try:
        for _ in range(turns):
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                empty.append(_written(file, 1))
                writes.append(_written(file, count))
                reads.append(_read_back(file))
    except OSError as error:
        raise GulliverError(
            f"cannot measure the disk in {folder}: {error.strerror}; name a folder that can be "
            "written"
        ) from error
    latency = statistics.median(empty)
    # What is written after an empty file's time; a disk too fast to tell keeps half of it.
    took = statistics.median(writes)
    return Disk(
        count / max(took - latency, took / 2), count / statistics.median(reads), min(latency, took)
    )


def processor() -> str:
    """The model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":")[1].split())
    return platform.machine()


def _matmul_curve(device: torch.device, dtype: torch.dtype) -> Curve:
    """Seconds by operations."""
    products: dict[int, Callable[[], object]] = {}
    for side in SIDES:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        products[2 * side**3] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        if once(products[2 * side**3], device) > LONGEST_S and len(products) > 1:
            break
    return curve_of(in_turns(products, device, turns=15))


def _memory_curve(device: torch.device) -> Curve:
    """Seconds by bytes read and written."""
    sums: dict[int, Callable[[], object]] = {}
    for count in TENSOR_BYTES:
        x, y = (torch.ones(count // 4, device=device) for _ in range(2))
        sums[3 * count] = lambda x=x, y=y: torch.add(x, y, out=y)
    return curve_of(in_turns(sums, device))


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes/s to the device and to the host, between pinned memory and the device."""
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    times = in_turns(
        {
            "to device": lambda: there.copy_(host, non_blocking=True),
            "to host": lambda: host.copy_(there, non_blocking=True),
        },
        device,
    )
    up, down = (host.nbytes / statistics.median(times[way]) for way in ("to device", "to host"))
    return up, down


def _written(file: IO[bytes], count: int) -> float:
    """Seconds until `count` bytes are on the disk."""
    block = os.urandom(min(count, BLOCK_BYTES))
    begun = time.perf_counter()
    for _ in range(-(-count // len(block))):
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - begun


def _read_back(file: IO[bytes]) -> float:
    """Seconds to read a file that the system's cache was asked to forget."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    begun = time.perf_counter()
    while file.read(BLOCK_BYTES):
        pass
    return time.perf_counter() - begun
