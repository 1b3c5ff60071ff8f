"""What the cost formulas predict beside what the clock says, at sizes that were not probed.

`python -m benchmarks.cost` measures this machine, and worlds of 2 and 4 ranks over loopback and
over shaped links (root), as ``gulliver probe`` does; then it predicts matrix products, element-wise
operations, messages, collectives and the disk, and times them. ``by links`` is what the formulas
say from alpha and bandwidth of pairs alone; ``predicted`` is from all that the probe kept.
Operations on the device are timed several in a row, as the probe does: their caches are warm. With
``--keep`` the table of docs/hardware.md is written too.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import tyro

from benchmarks._harness import Report, at_most, finish
from benchmarks.netlab import Net, run
from gulliver.cli.probe import measured_cluster, measured_disk
from gulliver.comm import (
    all_gather,
    all_reduce,
    barrier,
    gather_objects,
    init_world,
    reduce_scatter,
    shutdown,
)
from gulliver.hardware import Cluster, all_reduce_seconds
from gulliver.hardware.costs import (
    all_gather_seconds,
    disk_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)

LIMIT = 0.25
TURNS = 15
PAGE = Path(__file__).parent.parent / "docs" / "hardware.md"
MARKS = re.compile(r"(<!-- cost -->\n).*?(<!-- /cost -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One prediction.

    Attributes:
        what: was done.
        predicted_s: from the measured cluster.
        took_s: median by the clock.
        by_links_s: from alpha and bandwidth alone, of what travels.
    """

    what: str
    predicted_s: float
    took_s: float
    by_links_s: float | None = None


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: tuple[int, ...] = (2, 4)
    rate: str = "400mbit"
    """Of the shaped links; needs root. "none" leaves them out."""
    keep: bool = False
    """Write benchmarks/results and the table of docs/hardware.md."""


def alone() -> list[Row]:
    """Device and disk, in a process of their own."""
    world = init_world()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = measured_cluster(world, measured_disk(world, folder))
        device, disk = cluster.device, cluster.disk
        assert disk is not None
        size = 48 * 2**20
        path = folder / "file"
        operations: dict[str, tuple[float, Callable[[], object]]] = {
            "write 48 MiB": (disk_seconds(disk, size, True), lambda: _write(path, size)),
            "read 48 MiB": (disk_seconds(disk, size, False), lambda: _read(path)),
        }
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            for m, k, n in ((96, 96, 96), (256, 768, 3072), (700, 700, 700), (2048, 1024, 512)):
                a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
                what = f"matmul {m}x{k}x{n} {name}"
                predicted = matmul_seconds(device, m, k, n, name)
                operations[what] = (predicted, _in_a_row(lambda a=a, b=b: a @ b))
        for count in (3 << 14, 3 << 18, 3 << 21):
            x, y = torch.ones(count), torch.ones(count)
            scaled = memory_seconds(device, 2 * x.nbytes)
            # What is written without having been read is fetched into the cache first.
            copied = memory_seconds(device, 3 * x.nbytes)
            scale, copy = _in_a_row(lambda x=x: x.mul_(1.0)), _in_a_row(lambda x=x, y=y: y.copy_(x))
            operations[f"scale {4 * count >> 10} KiB"] = (scaled, scale)
            operations[f"copy {4 * count >> 10} KiB"] = (copied, copy)
        return _timed(operations)


def together() -> list[Row]:
    """Links and collectives, one rank's part."""
    world = init_world()
    with tempfile.TemporaryDirectory() as name:
        cluster = measured_cluster(world, measured_disk(world, Path(name)))
    links, bare = cluster.links(), _without_curves(cluster).links()
    operations: dict[str, tuple[float, Callable[[], object]]] = {}
    by_links: dict[str, float] = {}
    for count in (3 << 12, 3 << 16, 3 << 19, 6 << 20):
        whole, part = torch.zeros(count // 4), torch.ones(count // 4 // world.size)
        for name, seconds, operation in (
            ("all-reduce", all_reduce_seconds, lambda w=whole: all_reduce(w)),
            ("reduce-scatter", reduce_scatter_seconds, lambda w=whole, p=part: _scatter(p, w)),
            ("all-gather", all_gather_seconds, lambda w=whole, p=part: all_gather(w, p)),
        ):
            what = f"{name} {count >> 10} KiB"
            operations[what] = (seconds(links, count), operation)
            by_links[what] = seconds(bare, count)
        data, into = torch.ones(count // 4), torch.empty(count // 4)
        predicted = point_to_point_seconds(links[-1][1], count)
        what = f"message {count >> 10} KiB"
        operations[what] = (predicted, lambda data=data, into=into: _swap(data, into))
        by_links[what] = point_to_point_seconds(bare[-1][1], count)
    rows = [replace(row, by_links_s=by_links.get(row.what)) for row in _timed(operations)]
    shutdown()
    return rows


def _timed(operations: dict[str, tuple[float, Callable[[], object]]]) -> list[Row]:
    """Runs all in turns; a turn counts what the middle rank took."""
    times: dict[str, list[float]] = {what: [] for what in operations}
    for turn in range(-2, TURNS):
        for what, (_, operation) in operations.items():
            barrier()
            begun = time.perf_counter()
            # Some return what they took, without the work that is not to be counted.
            found = operation()
            took = found if isinstance(found, float) else time.perf_counter() - begun
            if turn >= 0:
                times[what].append(took)
    ranks: list[dict[str, list[float]]] = gather_objects(times)
    rows = []
    for what, (predicted, _) in operations.items():
        turns = zip(*(rank[what] for rank in ranks), strict=True)
        rows.append(Row(what, predicted, statistics.median(map(statistics.median, turns))))
    return rows


def _in_a_row(operation: Callable[[], object]) -> Callable[[], float]:
    """Times calls for about a millisecond, and returns the seconds of one."""
    calls = 0

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            operation()
        return (time.perf_counter() - begun) / count

    def timed() -> float:
        nonlocal calls
        if not calls:
            seconds(1)  # cold: it would say that one call fills the millisecond
            calls = max(1, min(100, int(1e-3 / min(seconds(1), seconds(1)))))
        return seconds(calls)

    return timed


def _scatter(part: torch.Tensor, whole: torch.Tensor) -> None:
    reduce_scatter(part, whole)


def _swap(data: torch.Tensor, into: torch.Tensor) -> None:
    """Messages both ways at once between ranks 0 and 1, 2 and 3 ..."""
    peer = dist.get_rank() ^ 1
    for work in [dist.irecv(into, peer), dist.isend(data, peer)]:
        assert work is not None
        work.wait()


def _without_curves(cluster: Cluster) -> Cluster:
    axes = [replace(a, link=replace(a.link, messages=None, along=())) for a in cluster.axes]
    return replace(cluster, axes=tuple(axes))


def _write(path: Path, size: int) -> float:
    block = os.urandom(1 << 22)
    path.unlink(missing_ok=True)
    begun = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def _read(path: Path) -> float:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        while file.read(1 << 22):
            pass
        return time.perf_counter() - begun


def main() -> None:
    """Measures and compares."""
    options = tyro.cli(Options, description=__doc__)
    load = os.getloadavg()[0]
    rows = {"here": run(alone, None, ranks=1)[0]}
    for ranks in options.ranks:
        rows[f"loopback, {ranks} ranks"] = run(together, None, ranks=ranks)[0]
        if options.rate != "none":
            with Net(ranks, options.rate) as net:
                rows[f"{options.rate}, {ranks} ranks"] = run(together, net)[0]
    report = report_of(rows, load)
    finish(report, options.keep)
    if options.keep:
        write_table(report)


def report_of(rows: dict[str, list[Row]], load: float) -> Report:
    """The table and its bars, by place; `load` is what else the machine did."""
    columns = ("what", "where", "by links ms", "predicted ms", "ms", "error")
    report = Report("cost", "predicted and measured", columns)
    for where, found in rows.items():
        for row in found:
            error = row.predicted_s / row.took_s - 1
            by_links = "" if row.by_links_s is None else f"{1e3 * row.by_links_s:.3f}"
            figures = (f"{1e3 * row.predicted_s:.3f}", f"{1e3 * row.took_s:.3f}")
            report.rows.append((row.what, where, by_links, *figures, f"{100 * error:+.0f} %"))
            report.figures[f"{where}: {row.what}"] = {
                "by_links_s": row.by_links_s,
                "predicted_s": row.predicted_s,
                "measured_s": row.took_s,
            }
        errors = [abs(row.predicted_s / row.took_s - 1) for row in found]
        report.bars.append(at_most(f"{where}: median error", statistics.median(errors), LIMIT))
    report.notes = [
        f"Ranks of one thread; medians of {TURNS} turns. When the run began, {load:.1f} other "
        f"processes wanted a processor (the load of the last minute) on {os.cpu_count()} cores."
    ]
    return report


def write_table(report: Report) -> None:
    """Puts the table between the marks of docs/hardware.md."""
    lines = [report.columns, ["---"] * len(report.columns), *report.rows]
    bars = [f"- {bar.name} {100 * bar.value:.0f} %" for bar in report.bars]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    text = table + "\n\n" + "\n".join(bars) + "\n"
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKS.sub(lambda m: m[1] + text + m[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()
