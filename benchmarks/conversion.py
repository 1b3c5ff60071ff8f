"""Conversions between layouts: the least-cost way beside the ways that torch's DTensor takes.

`python -m benchmarks.conversion` prices every ordered pair of layouts of a tensor of three dims, on
meshes of two and of three axes, by one set of formulas (`gulliver.hardware`): ours, torch's
default (greedy), and torch's search for the least cost (graph). Torch's messages are those that a
redistribution over fake ranks really posts. Then some pairs are run on four ranks over shaped
links, fast inside pairs and slow between them (it needs root): ours and torch's take turns.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from benchmarks.netlab import Net, run
from gulliver._compat import (
    DispatchMode,
    clear_redistributions,
    fake_store,
    graph_redistribution,
    meta_devices,
)
from gulliver.comm import barrier, gather_objects, init_world
from gulliver.hardware import Cluster, described
from gulliver.hardware.cluster import Axis, Link
from gulliver.hardware.costs import collective_seconds, point_to_point_seconds
from gulliver.layout import plan_conversion
from gulliver.layout.conversion import convert, sharding_of
from gulliver.solve.conversion import ConversionStep, convert_least

SHAPE = (64, 32, 64)
ITEM = 4
MESHES = {"8xh100-infiniband": ((2, 8), (2, 2, 4)), "cpu-loopback": ((2, 2), (2, 2, 2))}
RATE, UPLINK, DELAY_US = "1gbit", "100mbit", 500
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
"""Operations that torch posts, by their names in the formulas."""
Layout = tuple[Placement, ...]


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    pairs: int = 1500
    """Pairs of layouts on three axes; 0 for all 15,625."""
    measured: int = 10
    """Pairs that are run on shaped links; 0 for none."""
    rounds: int = 5
    full: bool = False
    """All pairs on three axes."""
    keep: bool = False
    """Write benchmarks/results."""


def layouts(axes: int) -> list[Layout]:
    """All layouts of a tensor of three dims."""
    kinds: list[Placement] = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
    return list(itertools.product(kinds, repeat=axes))


class Posted(DispatchMode):
    """Collects the messages that torch posts: operation, group, bytes in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if name in COLLECTIVES:
            group = next(a for a in reversed(args) if isinstance(a, str))
            self.messages.append((COLLECTIVES[name], group, args[0].nbytes, out.nbytes))
        return out


def torch_seconds(
    mesh: DeviceMesh, links: Sequence[Any], before: Layout, after: Layout
) -> tuple[float, float]:
    """Seconds of the messages that torch posts for a conversion, by our formulas, and bytes."""
    sizes = list(SHAPE)
    for axis, placement in enumerate(before):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // mesh.shape[axis])
    stride = torch.empty(SHAPE, device="meta").stride()
    tensor = DTensor.from_local(
        torch.zeros(sizes, device="meta"),
        mesh,
        before,
        run_check=False,
        shape=torch.Size(SHAPE),
        stride=stride,
    )
    with Posted() as posted:
        tensor.redistribute(mesh, after)
    axes = {str(mesh.get_group(axis).group_name): axis for axis in range(mesh.ndim)}
    seconds = moved = 0.0
    for name, group, given, made in posted.messages:
        count = made if name == "all_gather" else given
        seconds += collective_seconds(links[axes[group]], name, count)
        moved += given
    return seconds, moved


def our_seconds(mesh: tuple[int, ...], cluster: Cluster, before: Layout, after: Layout) -> float:
    """Seconds of the messages of the least-cost way, what is copied in a rank left out as above."""
    free = Messages(mesh, cluster)
    ends = sharding_of(before, len(SHAPE)), sharding_of(after, len(SHAPE))
    found = convert_least(SHAPE, mesh, *ends, free)
    assert found is not None
    return found.seconds


class Messages:
    """Prices moves by their messages alone."""

    def __init__(self, mesh: tuple[int, ...], cluster: Cluster) -> None:
        self.links = links_of(mesh, cluster)

    def __call__(self, move: ConversionStep) -> float:
        """Seconds of the message of a move; the same formulas as for torch's."""
        if move.kind in ("slice", "split"):
            return 0.0
        before, after = (ITEM * count for count in move.elements)
        axes = [link for axis in move.axes for link in self.links[axis]]
        if move.kind == "swap":
            return max(point_to_point_seconds(link, before) for _, link in axes)
        name = {"gather": "all_gather", "exchange": "all_to_all", "reduce": "all_reduce"}
        count = after if move.kind == "gather" else before
        return collective_seconds(axes, name.get(move.kind, "reduce_scatter"), count)


def links_of(mesh: Sequence[int], cluster: Cluster) -> list[Any]:
    """Sizes and links along each axis of a mesh."""
    return [cluster.crossed(math.prod(mesh[axis + 1 :]), size) for axis, size in enumerate(mesh)]


@dataclass(frozen=True)
class Compared:
    """Prices of all pairs on one mesh.

    Attributes:
        pairs: how many.
        dearer: pairs on which ours is dearer than torch's.
        cheaper: share on which it is cheaper.
        gain: torch's seconds over ours, of all pairs together.
        most: the largest ratio of one pair.
        free: pairs that cost torch a message and us none.
    """

    pairs: int
    dearer: int
    cheaper: float
    gain: float
    most: float
    free: int


def compare(mesh: tuple[int, ...], cluster: Cluster, count: int) -> dict[str, Compared]:
    """Prices pairs of layouts, ours and torch's two ways."""
    cluster = cluster.resized(math.prod(mesh))
    chosen = list(itertools.product(layouts(len(mesh)), repeat=2))
    if 0 < count < len(chosen):
        chosen = random.Random(0).sample(chosen, count)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=math.prod(mesh))
    try:
        device_mesh = init_device_mesh("meta", mesh, mesh_dim_names=tuple("abc"[: len(mesh)]))
        links = links_of(mesh, cluster)
        ours = [our_seconds(mesh, cluster, *pair) for pair in chosen]
        found = {}
        for name, way in ways().items():
            clear_redistributions()
            with way(), meta_devices(mesh[-1]):
                theirs = [_tried(device_mesh, links, *pair) for pair in chosen]
            found[name] = _compared(ours, theirs)
        return found
    finally:
        dist.destroy_process_group()


def ways() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Torch's ways to choose messages."""
    return {"default": nullcontext, "least cost": graph_redistribution}


def _tried(mesh: DeviceMesh, links: Sequence[Any], before: Layout, after: Layout) -> float | None:
    try:
        return torch_seconds(mesh, links, before, after)[0]
    except (RuntimeError, AssertionError, NotImplementedError, ValueError):
        return None  # torch does not convert this pair


def _compared(ours: Sequence[float], theirs: Sequence[float | None]) -> Compared:
    pairs = [(own, other) for own, other in zip(ours, theirs, strict=True) if other is not None]
    cheaper = [(own, other) for own, other in pairs if own < other * (1 - 1e-9)]
    return Compared(
        len(pairs),
        sum(own > other * (1 + 1e-9) for own, other in pairs),
        len(cheaper) / len(pairs),
        sum(other for _, other in pairs) / sum(own for own, _ in pairs),
        max((other / own for own, other in cheaper if own), default=1.0),
        sum(own == 0 for own, _ in cheaper),
    )


def measured_pairs(count: int, cluster: Cluster) -> list[tuple[Layout, Layout]]:
    """Pairs on two axes that want messages, one for each sequence of moves."""
    two = list(itertools.product(layouts(2), repeat=2))
    random.Random(1).shuffle(two)
    kinds: dict[str, list[tuple[Layout, Layout]]] = {}
    for before, after in two:
        plan = plan_conversion(SHAPE, ITEM, (2, 2), before, after, cluster)
        partial = any(isinstance(p, Partial) for p in after)  # torch refuses those
        if not partial and any(m.kind not in ("slice", "split") for m in plan.moves):
            kinds.setdefault(" ".join(m.kind for m in plan.moves), []).append((before, after))
    return [kinds[kind][0] for kind in sorted(kinds)][:count]


def measure(pairs: list[tuple[Layout, Layout]], cluster: Cluster, rounds: int) -> list[Any]:
    """One rank's part: seconds of each pair by each way."""
    init_world()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = []
    for before, after in pairs:
        plain = [Replicate() if isinstance(p, Partial) else p for p in before]
        whole = torch.randn(4 * SHAPE[0], *SHAPE[1:])
        dist.broadcast(whole, 0)
        local = distribute_tensor(whole, mesh, plain).to_local()
        tensor = DTensor.from_local(local, mesh, before, run_check=False)
        calls: dict[str, Callable[[], DTensor]] = {
            "ours": lambda t=tensor, p=after: convert(t, p, cluster)
        }
        for name, way in ways().items():
            calls[name] = lambda t=tensor, p=after, w=way: _redistributed(t, p, w)
        results = {name: call().to_local() for name, call in calls.items()}
        same = all(
            torch.allclose(results["ours"], other, atol=1e-5)
            for name, other in results.items()
            if not any(isinstance(p, Partial) for p in after)
        )
        spreads = alternate({n: lambda c=c: _seconds(c) for n, c in calls.items()}, rounds)
        slowest = gather_objects({n: s.values for n, s in spreads.items()})
        found.append(
            (
                {
                    n: Spread(tuple(map(max, zip(*(s[n] for s in slowest), strict=True))))
                    for n in calls
                },
                same,
            )
        )
    barrier()
    return found


def _redistributed(tensor: DTensor, placements: Layout, way: Any) -> DTensor:
    with way():
        out = tensor.redistribute(tensor.device_mesh, placements)
    local: Any = out.to_local()
    if hasattr(local, "wait"):
        local.wait()
    return out


def _seconds(call: Callable[[], Any]) -> float:
    barrier()
    started = time.perf_counter()
    for _ in range(3):
        call()
    return (time.perf_counter() - started) / 3


def _text(layout: Layout) -> str:
    return "".join(
        f"S{p.dim}" if isinstance(p, Shard) else ("P" if isinstance(p, Partial) else "R")
        for p in layout
    )


def rows_of(options: Options) -> Iterator[tuple[str, str, Compared]]:
    """Prices by machine and mesh, and torch's way."""
    for name, meshes in MESHES.items():
        for mesh in meshes:
            count = options.pairs if len(mesh) == 3 and not options.full else 0
            for way, found in compare(mesh, described(name), count).items():
                yield f"{name}, {' x '.join(map(str, mesh))}", way, found


def main(options: Options) -> None:
    """Prices, measures, reports."""
    report = Report(
        "conversion",
        "Conversions between layouts: least-cost way beside DTensor's redistribute",
        ("mesh", "beside", "pairs", "dearer", "cheaper", "gain in all", "most", "free of messages"),
    )
    dearer = 0
    for place, way, found in rows_of(options):
        dearer += found.dearer
        report.rows.append(
            (
                place,
                f"torch, {way}",
                str(found.pairs),
                str(found.dearer),
                f"{found.cheaper:.1%}",
                f"{found.gain:.2f} x",
                f"{found.most:.1f} x",
                str(found.free),
            )
        )
        report.figures[f"{place}, {way}"] = found.__dict__
    report.bars.append(
        at_most("pairs on which the least-cost way is dearer than torch's", dearer, 0)
    )
    if options.measured and os.geteuid() == 0:
        _add_measured(report, options)
    report.notes += [
        f"A tensor of {SHAPE} float32; messages priced alike for all, what a rank copies left out.",
        "Torch's pairs are those that redistribute converts; the rest it refuses.",
    ]
    finish(report, options.keep)


def _add_measured(report: Report, options: Options) -> None:
    cluster = shaped(described("cpu-loopback"))
    pairs = measured_pairs(options.measured, cluster)
    with Net(4, rate=RATE, nodes=2, uplink=UPLINK, delay_us=DELAY_US) as net:
        found = run(measure, net, pairs, cluster, options.rounds)[0]
    ratios = []
    for (before, after), (spreads, same) in zip(pairs, found, strict=True):
        assert same, f"{before} to {after} differ"
        best = min(spreads[name].median for name in ways())
        ratios.append(best / spreads["ours"].median)
        report.rows.append(
            (
                f"measured: {_text(before)} to {_text(after)}",
                f"ours {1e3 * spreads['ours'].median:.1f} ms",
                *(f"{name} {1e3 * spreads[name].median:.1f} ms" for name in ways()),
                f"{ratios[-1]:.2f} x",
                "",
                "",
                "",
            )
        )
    report.bars.append(
        at_least(
            "measured: torch's faster way over ours, median", Spread(tuple(ratios)).median, 1.0
        )
    )
    report.bars.append(at_least("measured: torch's faster way over ours, least", min(ratios), 0.9))


def shaped(cluster: Cluster) -> Cluster:
    """The network that is built: two nodes of two ranks."""
    # The two ranks of a node share its link to the other.
    fast, slow = Link(60e-6, 1.25e8), Link(1.1e-3, 1.25e7 / 2)
    return replace(cluster, axes=(Axis("node", 2, slow), Axis("rank", 2, fast)))


if __name__ == "__main__":
    main(tyro.cli(Options))
