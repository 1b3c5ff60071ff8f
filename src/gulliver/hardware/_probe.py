"""Measures what this machine can do: its processor or GPU, and a disk.

Everything is a median of several turns after a warm-up; curves also keep how far the quartiles lie
apart. Links between ranks are measured in `_links.py`. float32 products are measured as torch is
set: with or without TF32.
"""

from __future__ import annotations

import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gulliver._compat import scaled_matmul
from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Device, Disk
from gulliver.hardware._curve import Curve
from gulliver.hardware._timing import curve_of, in_turns, once
from gulliver.io import BLOCK, PARTIAL, IoError, default_engine, require_space

Progress = Callable[[str], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8_CAPABILITY = (8, 9)
"""Least compute capability of a GPU with units for FP8: Ada, Hopper and later."""
SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Sides of square matrices; the row ends when a product takes longer than `LONGEST_S`."""
LONGEST_S = 0.02
TENSOR_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Sizes of tensors of an element-wise operation; it reads two and writes one."""
BLOCK_BYTES = 1 << 24
"""Bytes of a request to a disk."""
DISK_BYTES = 1 << 28
"""Bytes of the file that a disk is measured with."""
TURN_S = 0.5
"""Seconds of a turn on a disk that is not slower than a block in this time."""
WAYS = {"reading": (True, False), "writing": (False, True), "both at once": (True, True)}


def probe_device(device: torch.device, progress: Progress = lambda _: None) -> Device:
    """Measures rates of a device; takes some seconds."""
    curves = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        progress(f"matrix product, {name}")
        curves[name] = _matmul_curve(device, dtype)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        progress("matrix product, float8_e4m3fn")
        curves["float8_e4m3fn"] = _fp8_curve(device)
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


def probe_disk(
    folder: Path,
    count: int = DISK_BYTES,
    turns: int = 3,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Disk:
    """Measures a folder's disk by a file without a name, past the page cache where there is a way.

    Args:
        folder: folder on the disk.
        count: most bytes of the file; less where writing them takes long.
        turns: number of turns that rates are the medians of.
        progress: told what is measured, and which share of all is done.

    Raises:
        GulliverError: nothing can be written there, or there is no room.
    """
    try:
        require_space(folder, count)
        empty = statistics.median(_empty_file_seconds(folder) for _ in range(turns))
        with _DiskFile(folder, count) as file:
            rates = file.rates(turns, progress)
    except (OSError, IoError) as error:
        why = os.strerror(error.errno or 0)
        raise GulliverError(
            f"cannot measure the disk in {folder}: {why}; name a folder that can be written"
        ) from error
    read, write, both = (rates[way] for way in WAYS)
    return Disk(write, read, empty, both, str(folder.absolute()))


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

    def product(a: Tensor, b: Tensor) -> Callable[[], object]:
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return _square_curve(device, dtype, product)


def _fp8_curve(device: torch.device) -> Curve:
    """Seconds by operations of scaled products with results of 16 bits."""
    one = torch.ones((), device=device)

    def product(a: Tensor, b: Tensor) -> Callable[[], object]:
        return lambda: scaled_matmul(a, b.t(), one, one, torch.bfloat16, True)

    return _square_curve(device, torch.float8_e4m3fn, product)


def _square_curve(
    device: torch.device,
    dtype: torch.dtype,
    product: Callable[[Tensor, Tensor], Callable[[], object]],
) -> Curve:
    products: dict[int, Callable[[], object]] = {}
    for side in SIDES:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        products[2 * side**3] = product(a, b)
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


def _empty_file_seconds(folder: Path) -> float:
    """Seconds until a file of a byte is on the disk."""
    begun = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"0")
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begun


class _DiskFile:
    """A file without a name that is read and written as those of a memory manager are."""

    # Each direction has an engine of its own. Blocks are written once before anything is timed: the
    # file system gives them their places then.

    def __init__(self, folder: Path, count: int) -> None:
        # What is read is of no interest: all blocks come to the same place, beside what is written.
        self._block = min(BLOCK_BYTES, max(count // BLOCK, 1) * BLOCK)
        self._memory = torch.empty(2 * self._block + BLOCK, dtype=torch.uint8).random_()
        self._address = -(-self._memory.data_ptr() // BLOCK) * BLOCK
        options = {"page_bytes": BLOCK, "pages": 1, "copiers": 1}
        self._reader, self._writer = (default_engine(**options) for _ in range(2))
        self.count = self._whole(count)
        path = folder / f".gulliver-probe-{os.getpid()}-{secrets.token_hex(6)}{PARTIAL}"
        try:
            self._target = self._writer.create(path, self.count)
            self._source = self._reader.open(path)
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self._close_engines()
            raise
        finally:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        self._close_engines()

    def rates(self, turns: int, progress: Callable[[str, float], None]) -> dict[str, float]:
        """Bytes/s by way, of a file that a turn takes about `TURN_S` for."""
        progress("first writes", 0.0)
        took = self._moved((False, True))
        self.count = self._whole(int(self.count * min(TURN_S / took, 1.0)))
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number, (way, kinds) in enumerate(list(WAYS.items()) * turns, 1):
            progress(way, number / (len(WAYS) * turns + 1))
            found[way].append(sum(kinds) * self.count / self._moved(kinds))
        return {way: statistics.median(rates) for way, rates in found.items()}

    def _moved(self, kinds: tuple[bool, bool]) -> float:
        """Seconds of reading, of writing, or of both, block after block."""
        os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        reads, writes = kinds
        begun, tickets = time.perf_counter(), []
        for offset in range(0, self.count, self._block):
            if writes:
                place = offset, self._address, self._block
                tickets.append(self._writer.write(self._target, *place))
            if reads:
                place = offset, self._address + self._block, self._block
                tickets.append(self._reader.read(self._source, *place))
        if writes:
            tickets.append(self._writer.sync(self._target))
        for ticket in tickets:
            ticket.wait()
        return time.perf_counter() - begun

    def _whole(self, count: int) -> int:
        return max(count // self._block, 1) * self._block

    def _close_engines(self) -> None:
        self._reader.close()
        self._writer.close()
