"""Measures what this machine can do: its processor or GPU, its disk, and the links between ranks.

Rates are medians of several runs after a warm-up. Links are measured pair by pair, in rounds of
pairs that do not share a rank, so that n ranks take n - 1 rounds; alpha and bandwidth are fitted to
messages of several sizes. Ranks whose links are as fast as the fastest make a node.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Device, Disk, Link

MESSAGE_BYTES = (1 << 10, 1 << 16, 1 << 20, 4 << 20)
NEAR = 2.0
"""Links within this factor of a rank's best belong to its node."""
Progress = Callable[[str], None]


def probe_device(device: torch.device, progress: Progress = lambda _: None) -> Device:
    """Measures rates of a device; takes a few seconds."""
    matmul = {}
    for dtype in (torch.float32, torch.bfloat16):
        progress(f"matrix product, {dtype}")
        size = 4096 if device.type == "cuda" else 1024
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        took = _median_seconds(lambda a=a, b=b: a @ b, device)
        matmul[str(dtype).removeprefix("torch.")] = 2 * size**3 / took
    progress("memory")
    x, y = (torch.ones(1 << 25, device=device) for _ in range(2))
    rate = 3 * x.nbytes / _median_seconds(lambda: torch.add(x, y, out=y), device)
    small = torch.ones(1, device=device)
    launch_s = _median_seconds(lambda: small.add_(0.0), device)
    if device.type != "cuda":
        name = f"{_processor()}, {torch.get_num_threads()} threads"
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device(name, matmul, rate, pages, launch_s)
    progress("copies")
    host = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    up = host.nbytes / _median_seconds(lambda: there.copy_(host, non_blocking=True), device)
    down = host.nbytes / _median_seconds(lambda: host.copy_(there, non_blocking=True), device)
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.name, matmul, rate, properties.total_memory, launch_s, up, down)


def probe_disk(folder: Path, count: int = 1 << 28) -> Disk:
    """Measures a folder's file system with a file of `count` bytes, which is removed again.

    Raises:
        GulliverError: nothing can be written there.
    """
    block = os.urandom(1 << 22)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            for _ in range(count // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - begun
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begun = time.perf_counter()
            while file.read(len(block)):
                pass
            read = time.perf_counter() - begun
    except OSError as error:
        raise GulliverError(
            f"cannot measure the disk in {folder}: {error.strerror}; name a folder that can be "
            "written"
        ) from error
    return Disk(count / written, count / read)


def probe_links(progress: Progress = lambda _: None) -> dict[tuple[int, int], Link]:
    """Measures the link of every pair of ranks; every rank calls it and gets all of them.

    Raises:
        GulliverError: there is one rank only.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise GulliverError(
            "links need several ranks: torchrun --nproc-per-node 2 -m gulliver.cli probe"
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if _nccl() else torch.device("cpu")
    mine: dict[tuple[int, int], Link] = {}
    rounds = pair_rounds(size)
    for number, pairs in enumerate(rounds):
        progress(f"links, round {number + 1} of {len(rounds)}")
        dist.barrier()
        for low, high in pairs:
            if rank in (low, high):
                mine[low, high] = _probe_pair(high if rank == low else low, device)
    found: list[dict[tuple[int, int], Link]] = [{} for _ in range(size)]
    dist.all_gather_object(found, mine)
    # Both ends have measured: the slower one counts.
    links: dict[tuple[int, int], Link] = {}
    for part in found:
        for pair, link in part.items():
            known = links.get(pair)
            links[pair] = link if known is None or link.bandwidth < known.bandwidth else known
    return links


def pair_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds of pairs that share no rank: a round-robin tournament."""
    ranks: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def fit_line(counts: Sequence[int], seconds: Sequence[float]) -> Link:
    """Alpha and bandwidth by least squares of relative errors, and the largest that is left."""
    # Weights 1 / seconds: a small message's microseconds count as much as a large one's.
    weights = [1 / s for s in seconds]
    a = sum(w * w for w in weights)
    b = sum(w * w * c for w, c in zip(weights, counts, strict=True))
    d = sum(w * w * c * c for w, c in zip(weights, counts, strict=True))
    e, f = sum(weights), sum(w * c for w, c in zip(weights, counts, strict=True))
    determinant = a * d - b * b
    alpha = max(0.0, (e * d - b * f) / determinant)
    slope = max((a * f - b * e) / determinant, 1e-15) if alpha else f / d
    errors = [abs((alpha + slope * c) / s - 1) for c, s in zip(counts, seconds, strict=True)]
    return Link(alpha, 1 / slope, max(errors))


def group_into_nodes(size: int, links: dict[tuple[int, int], Link]) -> list[list[int]]:
    """Ranks that are near each other, as nodes of one size, or all in one where none differ.

    Near are ranks whose message of 1 MiB takes at most `NEAR` times as long as the fastest pair's.
    """

    def seconds(pair: tuple[int, int]) -> float:
        return links[pair].alpha_s + (1 << 20) / links[pair].bandwidth

    limit = NEAR * min(seconds(pair) for pair in links)
    nodes: list[list[int]] = []
    for rank in range(size):
        for node in nodes:
            if all(seconds((min(rank, peer), max(rank, peer))) <= limit for peer in node):
                node.append(rank)
                break
        else:
            nodes.append([rank])
    regular = len({len(node) for node in nodes}) == 1
    return nodes if regular else [list(range(size))]


def _probe_pair(peer: int, device: torch.device) -> Link:
    seconds = []
    for count in MESSAGE_BYTES:
        out = torch.ones(count, dtype=torch.uint8, device=device)
        into = torch.empty_like(out)

        def exchange(out: torch.Tensor = out, into: torch.Tensor = into) -> None:
            operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        seconds.append(_median_seconds(exchange, device, runs=7))
    return fit_line(MESSAGE_BYTES, seconds)


def _median_seconds(run: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    found = []
    for number in range(runs + 2):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if number >= 2:
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _nccl() -> bool:
    return torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":")[1].split())
    return platform.machine()
