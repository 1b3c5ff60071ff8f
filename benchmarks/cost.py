"""What the cost formulas predict beside what the clock says, at sizes that were not probed.

`python -m benchmarks.cost` probes this machine and its loopback links as ``gulliver probe`` does,
then predicts matrix products, element-wise operations, messages, collectives and the disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import tyro

from benchmarks._harness import Report, at_most, finish
from benchmarks.netlab import Net, run
from gulliver.comm import all_gather, all_reduce, init_world, reduce_scatter, shutdown
from gulliver.hardware import (
    all_gather_seconds,
    all_reduce_seconds,
    disk_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    probe_device,
    probe_disk,
    probe_links,
    reduce_scatter_seconds,
)

LIMIT = 0.25
Row = tuple[str, float, float]
"""What, predicted and measured seconds."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: int = 4
    rate: str = "400mbit"
    """Of the shaped links; the collectives are predicted from the links of pairs."""
    keep: bool = False
    """Write benchmarks/results."""


def alone() -> list[Row]:
    """Device and disk, in a process of their own."""
    init_world()
    cpu = torch.device("cpu")
    device = probe_device(cpu)
    rows: list[Row] = []
    for m, k, n in ((512, 512, 512), (256, 2048, 1024), (2048, 1024, 512)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        took = _median(lambda a=a, b=b: a @ b)
        rows.append((f"matmul {m}x{k}x{n}", matmul_seconds(device, m, k, n), took))
    for count in (1 << 22, 1 << 24):
        x = torch.ones(count)
        took = _median(lambda x=x: x.mul_(1.0))
        rows.append((f"scale {count} floats", memory_seconds(device, 2 * x.nbytes), took))
    with tempfile.TemporaryDirectory() as folder:
        disk = probe_disk(Path(folder))
        size = 100 * 2**20
        rows.append(("write 100 MiB", disk_seconds(disk, size, True), _write(Path(folder), size)))
    return rows


def together() -> list[Row]:
    """Links and collectives, one rank's part."""
    world = init_world()
    links = probe_links()
    # Everybody talks at once: the slowest pair says how fast.
    slowest = max(links.values(), key=lambda link: link.alpha_s + 2**20 / link.bandwidth)
    axes = [(world.size, slowest)]
    rows: list[Row] = []
    for count in (1 << 14, 3 << 17, 3 << 20):
        whole = torch.ones(count // 4)
        part = torch.ones(count // 4 // world.size)
        for name, predicted, operation in (
            ("all-reduce", all_reduce_seconds, lambda w=whole: all_reduce(w)),
            (
                "reduce-scatter",
                reduce_scatter_seconds,
                lambda w=whole, p=part: reduce_scatter(p, w),
            ),
            ("all-gather", all_gather_seconds, lambda w=whole, p=part: all_gather(w, p)),
        ):
            rows.append((f"{name} {count >> 10} KiB", predicted(axes, count), _median(operation)))
        rows.append((f"message {count >> 10} KiB", *_message(links[0, 1], count, world.rank)))
    shutdown()
    return rows


def _message(link, count: int, rank: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    data = torch.ones(count, dtype=torch.uint8)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        elif rank == 1:
            dist.recv(data, 0)
            dist.send(data, 0)

    return point_to_point_seconds(link, count), _median(there_and_back) / 2


def _median(operation: Callable[[], object], runs: int = 7) -> float:
    found = []
    for number in range(runs + 2):
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        operation()
        if number >= 2:
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def _write(folder: Path, size: int) -> float:
    block = os.urandom(size)
    begun = time.perf_counter()
    with (folder / "file").open("wb") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def main() -> None:
    """Measures and compares."""
    options = tyro.cli(Options, description=__doc__)
    rows = [("here", row) for row in run(alone, None, ranks=1)[0]]
    rows += [("loopback", row) for row in run(together, None, ranks=options.ranks)[0]]
    with Net(options.ranks, options.rate) as net:
        rows += [(options.rate, row) for row in run(together, net)[0]]
    report = Report(
        "cost", "predicted and measured", ("what", "where", "predicted ms", "ms", "error")
    )
    groups: dict[str, list[float]] = {}
    for where, (what, predicted, took) in rows:
        error = predicted / took - 1
        groups.setdefault(where, []).append(abs(error))
        figures = (f"{1e3 * predicted:.3f}", f"{1e3 * took:.3f}", f"{100 * error:+.0f} %")
        report.rows.append((what, where, *figures))
        report.figures[f"{where}: {what}"] = {"predicted_s": predicted, "measured_s": took}
    for where, errors in groups.items():
        report.bars.append(at_most(f"{where}: median error", statistics.median(errors), LIMIT))
    report.notes = [f"{options.ranks} ranks of one thread; medians of 7 runs."]
    finish(report, options.keep)


if __name__ == "__main__":
    main()
