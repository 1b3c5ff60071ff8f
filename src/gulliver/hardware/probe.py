"""Measures devices and disks, and finds the cluster of the current machines.

Operations are timed round-robin, so that load spikes affect all of them equally. A run is a batch
of calls followed by a device synchronization, so that launches overlap on a GPU as in a real step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import platform
import re
import secrets
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import scaled_matmul
from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Cluster, Curve, Device, Disk, described, described_names
from gulliver.io.engine import BLOCK, IoError
from gulliver.io.files import PARTIAL, cache_folder, require_space, write_text
from gulliver.io.native import default_engine

Key = TypeVar("Key")
BATCH_S = 1e-3
MOST_CALLS = 100


def in_turns(
    operations: Mapping[Key, Callable[[], object]], device: torch.device, turns: int = 9
) -> dict[Key, list[float]]:
    """Seconds per call of each operation in each round, after a warm-up."""
    calls = {}
    for key, operation in operations.items():
        once(operation, device)
        took = min(once(operation, device) for _ in range(2))
        calls[key] = max(1, min(MOST_CALLS, int(BATCH_S / max(took, 1e-9))))
    found: dict[Key, list[float]] = {key: [] for key in operations}
    for _ in range(turns):
        for key, operation in operations.items():
            found[key].append(once(operation, device, calls[key]))
    return found


def once(operation: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / calls


def curve_of(times: Mapping[int, Sequence[float]]) -> Curve:
    # A size that took longer than a larger one was disturbed: it gets the larger one's seconds.
    sizes = tuple(sorted(times))
    medians = [statistics.median(times[size]) for size in sizes]
    rising = list(itertools.accumulate(reversed(medians), min))[::-1]
    return Curve(sizes, tuple(rising), statistics.median(spread_of(times[size]) for size in sizes))


def spread_of(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


# Memory available to a process: the device's, or the limit of its control group.


_ROOT = Path("/sys/fs/cgroup")
_LIMITS = {"": "memory.max", "memory": "memory.limit_in_bytes"}
"""Files with the memory limit, for cgroup versions 2 and 1."""
PLANNED = {"cuda": (0.9, "from its GPU"), "cpu": (0.1, "from the machine, divided among its ranks")}
"""Fraction of the memory to plan with, and a description of its origin."""


def memory_bytes(device: str) -> int:
    """Maximum bytes that a process may use on a kind of device.

    Args:
        device: ``cuda`` for the current GPU, or ``cpu``: the smaller of the machine's memory and
            the limit of the process's cgroup (version 1 or 2).
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *group_limits()])


def planned_memory(kind: str, size: int | None = None) -> tuple[float, str]:
    """Default bytes per rank for planning data-centric steps, and a description of their origin."""
    share, whose = PLANNED[kind]
    return float(math.floor(share * (size or memory_bytes(kind)))), f"{share:.0%} of {whose}"


def group_limits(root: Path = _ROOT, member: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits in bytes of this process's cgroups, innermost first."""
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


# Stores measurements, and determines the current cluster.
#
# A measurement is valid for the machines it was made on: its file is named by a fingerprint of
# hosts, CPU, cores, threads, GPUs, torch and the number of ranks, so that it is not found if any of
# them changes.


LIKE = {
    "H100": "8xh100-infiniband",
    "H200": "8xh200-infiniband",
    "B200": "8xb200-infiniband",
    "A100": "8xa100-infiniband",
    "": "4x4090-pcie",
}
"""Descriptions for GPUs by a word in their name; the first match wins."""
CPU = "cpu-loopback"
Seconds = TypeVar("Seconds", bound=tuple[float, ...])


def current_cluster(world_size: int) -> Cluster:
    """Returns the cluster of the current machines.

    Uses the measurement of ``gulliver probe`` for the current fingerprint if there is one,
    otherwise a description of machines with the same kind of device (`measured` is False). If a
    process group of `world_size` ranks is initialized, this is a collective call that returns rank
    0's result.

    Args:
        world_size: number of ranks.

    Raises:
        GulliverError: the stored file is invalid.
    """
    path = kept_path(world_size)
    together = _together(world_size)
    found: list[Any] = [None]
    if not together or dist.get_rank() == 0:
        try:
            found[0] = Cluster.load(path) if path.exists() else likely_cluster(world_size)
        except Exception as error:
            # The other ranks are waiting for it.
            found[0] = error
    if together:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def likely_cluster(world_size: int) -> Cluster:
    if not torch.cuda.is_available():
        return described(CPU).resized(world_size)
    gpu = torch.cuda.get_device_properties(0)
    cluster = described(next(name for word, name in LIKE.items() if word in gpu.name))
    device = replace(cluster.device, name=gpu.name, memory_bytes=gpu.total_memory)
    return replace(cluster, device=device).resized(world_size)


def kept_path(world_size: int) -> Path:
    """Path of the stored measurement; a collective call if the process group is initialized."""
    return cache_folder() / "clusters" / f"{fingerprint(world_size)}.yaml"


def fingerprint(world_size: int) -> str:
    return digest({"hosts": _hosts(world_size), **machine_facts(), "ranks": world_size})


def kept_seconds(facts: dict[str, Any], measure: Callable[[], Seconds], count: int = 2) -> Seconds:
    """Returns stored seconds for these facts, to make plans reproducible, or measures them."""
    path = _seconds_folder() / f"{digest({**machine_facts(), **facts})}.json"
    try:
        kept: Any = tuple(float(seconds) for seconds in json.loads(path.read_text("utf-8")))
        if len(kept) == count:
            return kept
    except (OSError, ValueError, TypeError):
        pass
    found = measure()
    with suppress(OSError, GulliverError):  # nothing is stored if the folder is not writable
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(found))
    return found


def forget_seconds() -> None:
    shutil.rmtree(_seconds_folder(), ignore_errors=True)


def _seconds_folder() -> Path:
    return cache_folder() / "seconds"


def machine_facts() -> dict[str, Any]:
    """Facts that identify a kind of machine: CPU, cores, threads, GPUs and torch."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": _gpus(),
        "torch": torch.__version__,
    }


def digest(facts: dict[str, Any]) -> str:
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


# Clusters by name: ``h100x64``, a file, or the current machines.


SHORT = {
    "a100": "8xa100-infiniband",
    "h100": "8xh100-infiniband",
    "h200": "8xh200-infiniband",
    "b200": "8xb200-infiniband",
    "4090": "4x4090-pcie",
    "cpu": "cpu-loopback",
    "laptop": "laptop-cpu",
}
MOST = 1 << 14  # maximum number of ranks of a named cluster


def named_cluster(text: str, ranks: int | None = None) -> Cluster:
    if text == "here":
        return current_cluster(ranks or 1)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        cluster = Cluster.load(Path(text))
        return cluster if ranks is None else cluster.resized(ranks)
    if text in described_names():
        cluster = described(text)
        return cluster if ranks is None else cluster.resized(ranks)
    found = re.fullmatch(r"(.+)x(\d+)", text.lower())
    name, count = found.groups() if found else (text.lower(), "")
    if name not in SHORT:
        known = ["here", *SHORT, *described_names()]
        raise GulliverError(
            f"unknown cluster {text!r} (use NAMExCOUNT, such as h100x64, or a .yaml file): "
            f"{nearest(name, known)}"
        )
    size = int(count) if count else ranks or 1
    if not 1 <= size <= MOST:
        raise GulliverError(f"the cluster {text!r} has {size} ranks; use 1 to {MOST}")
    if ranks is not None and ranks != size:
        raise GulliverError(f"the cluster {text!r} has {size} ranks, but {ranks} were requested")
    return described(SHORT[name]).resized(size)


# Measures this machine: CPU or GPU, and a disk.
#
# All values are medians of several rounds after a warm-up; curves also store their spread. Links
# between ranks are measured in `links.py`. float32 products use torch's current settings, with or
# without TF32.


Progress = Callable[[str], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8_CAPABILITY = (8, 9)  # minimum compute capability for FP8: Ada, Hopper and later
SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Sides of the square matrices to time, until a product takes longer than `LONGEST_S`."""
LONGEST_S = 0.02
TENSOR_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27)
"""Tensor sizes for an element-wise operation that reads two tensors and writes one."""
BLOCK_BYTES = 1 << 24  # bytes of a disk request
DISK_BYTES = 1 << 28  # bytes of the file for measuring a disk
TURN_S = 0.5  # target seconds of a round on a disk
WAYS = {"reading": (True, False), "writing": (False, True), "both at once": (True, True)}


def probe_device(device: torch.device, progress: Progress = lambda _: None) -> Device:
    """Measures the rates of a device; takes a few seconds."""
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
    """Measures a folder's disk with an unlinked file of at most `count` bytes."""
    try:
        require_space(folder, count)
        empty = statistics.median(_empty_file_seconds(folder) for _ in range(turns))
        with _DiskFile(folder, count) as file:
            rates = file.rates(turns, progress)
    except (OSError, IoError) as error:
        why = os.strerror(error.errno or 0)
        raise GulliverError(
            f"cannot measure the disk in {folder}: {why}; pass a writable folder"
        ) from error
    read, write, both = (rates[way] for way in WAYS)
    return Disk(write, read, empty, both, str(folder.absolute()))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":")[1].split())
    return platform.machine()


def _matmul_curve(device: torch.device, dtype: torch.dtype) -> Curve:
    def product(a: Tensor, b: Tensor) -> Callable[[], object]:
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return _square_curve(device, dtype, product)


def _fp8_curve(device: torch.device) -> Curve:
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
    sums: dict[int, Callable[[], object]] = {}
    for count in TENSOR_BYTES:
        x, y = (torch.ones(count // 4, device=device) for _ in range(2))
        sums[3 * count] = lambda x=x, y=y: torch.add(x, y, out=y)
    return curve_of(in_turns(sums, device))


def _copy_rates(device: torch.device) -> tuple[float, float]:
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
    begun = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"0")
        file.flush()
        os.fsync(file.fileno())
        return time.perf_counter() - begun


class _DiskFile:
    """An unlinked file that is accessed like the memory manager's files."""

    # Each direction has its own engine. Blocks are written once before timing, so that the file
    # system has allocated them.

    def __init__(self, folder: Path, count: int) -> None:
        # The data is not used: all blocks are read into the same memory, next to the written data.
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
        """Bytes/s by direction, with a file size such that a round takes about `TURN_S`."""
        progress("first writes", 0.0)
        took = self._moved((False, True))
        self.count = self._whole(int(self.count * min(TURN_S / took, 1.0)))
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for number, (way, kinds) in enumerate(list(WAYS.items()) * turns, 1):
            progress(way, number / (len(WAYS) * turns + 1))
            found[way].append(sum(kinds) * self.count / self._moved(kinds))
        return {way: statistics.median(rates) for way, rates in found.items()}

    def _moved(self, kinds: tuple[bool, bool]) -> float:
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
