"""Sequence parallelism on a shaped network: what is sent, what overlaps, and what is balanced.

`python -m benchmarks.sequence` needs root. Five tables in one:

- *bytes*: what each rank's link carried in a forward and in a backward, over the formulas;
- *overlap*: a ring's time over the larger of computing alone and sending alone, on three links;
- *levels*: a ring of one level and of two, over two nodes of four ranks with a slow link between;
- *balance*: how long the slowest rank of each step computes over the mean, under a causal mask;
- *memory*: the peak of a rank while the sequence grows with the ranks, beside the naive twin.

Computing alone is the same calls of the same kernels, sending alone the same messages, in the same
ranks and taking turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from benchmarks.netlab import Net, foreign_load, run
from benchmarks.netlab._net import bits_per_second
from benchmarks.netlab._ranks import HEADERS, wire_bytes
from gulliver.comm import barrier, gather_objects, init_world
from gulliver.hardware import Axis, Cluster, Device, Link
from gulliver.parallel.sequence import (
    Layout,
    Mask,
    SequenceGroups,
    SequencePlan,
    Shape,
    attention,
    imbalance,
    make_groups,
    predict,
    two_ring_attention,
    two_ring_volume,
    volume,
)
from gulliver.parallel.sequence._core import Call, _Pack
from gulliver.parallel.sequence._heads import deal_heads
from gulliver.parallel.sequence._mask import Rules
from gulliver.parallel.sequence._partial import How, Partial, attend
from gulliver.parallel.sequence._ring import round_trip, turn
from gulliver.parallel.sequence._tiles import tiles

MIB = 1 << 20
_M_MMAP_THRESHOLD = -3
NODES, LOCAL = 2, 4
PLANS = (
    SequencePlan(inner=4),
    SequencePlan(outer=2, inner=2),
    SequencePlan(ulysses=4),
    SequencePlan(ulysses=2, inner=2),
)
FLAT, NESTED = SequencePlan(inner=NODES * LOCAL), SequencePlan(outer=NODES, inner=LOCAL)


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    heads: int = 4
    head_dim: int = 64
    local: int = 2048
    """Tokens of each rank."""
    level_local: int = 512
    """Tokens of each rank on two levels."""
    links: tuple[str, ...] = ("100mbit", "400mbit", "1gbit")
    uplink: str = "100mbit"
    rounds: int = 5
    parts: tuple[str, ...] = ("bytes", "overlap", "levels", "balance", "memory")
    keep: bool = False
    """Write benchmarks/results."""


def shape_of(options: Options, ranks: int, local: int) -> Shape:
    """A sequence of so many tokens on each of the ranks."""
    return Shape(1, options.heads, options.heads, ranks * local, options.head_dim)


def tensors(shape: Shape, ranks: int) -> list[Tensor]:
    """This rank's q, k, v and the gradient of the output."""
    size = shape.batch, shape.heads, shape.length // ranks, shape.head_dim
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v, grad = (torch.randn(size, generator=generator) for _ in range(4))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def settled() -> None:
    """All ranks are here, and nothing is left in their sockets."""
    barrier()
    time.sleep(0.1)
    barrier()


# --- bytes ---


def count_bytes(options: Options) -> dict[str, tuple[float, float]]:
    """Bytes that this rank sent in a forward and in a backward, by plan."""
    init_world()
    found = {}
    for name, call in _counted_calls(options).items():
        q, k, v, grad = tensors(shape_of(options, 4, options.local), 4)
        call(q, k, v).backward(grad)  # connects
        settled()
        before = wire_bytes()[0]
        out = call(q, k, v)
        settled()
        middle = wire_bytes()[0]
        out.backward(grad)
        settled()
        found[name] = (float(middle - before), float(wire_bytes()[0] - middle))
    return found


def _counted_calls(options: Options) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    length = 4 * options.local
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    for plan in PLANS:
        groups = make_groups(plan)
        calls[str(plan)] = lambda q, k, v, g=groups: attention(q, k, v, g, length=length)
    twin = make_groups(PLANS[0])
    calls["two rings"] = lambda q, k, v: two_ring_attention(q, k, v, twin)
    return calls


def report_bytes(options: Options, report: Report) -> None:
    """Rows and the bar of the largest deviation."""
    shape = shape_of(options, 4, options.local)
    expected = {str(plan): volume(plan, shape) for plan in PLANS}
    expected["two rings"] = two_ring_volume(4, shape)
    with Net(4, "1gbit") as net:
        ranks = run(count_bytes, net, options)
    worst = 0.0
    for name, formula in expected.items():
        for number, way in enumerate(("forward", "backward")):
            sent = sum(rank[name][number] for rank in ranks) / len(ranks)
            ratio = sent / getattr(formula, way)
            worst = max(worst, abs(ratio - 1))
            row = f"{sent / MIB:.3f} MiB", f"{getattr(formula, way) / MIB:.3f} MiB", f"{ratio:.4f}"
            report.rows.append(("bytes", f"{name}, {way}", *row))
    report.bars.append(at_most("bytes: largest deviation from a formula", worst, 0.03))


# --- overlap ---


def time_overlap(options: Options) -> dict[str, tuple[float, ...]]:
    """Seconds of a forward and backward: as it is, computing alone, sending alone."""
    init_world()
    groups = make_groups(PLANS[0])
    shape = shape_of(options, 4, options.local)
    q, k, v, grad = tensors(shape, 4)

    def whole() -> None:
        attention(q, k, v, groups, length=shape.length).backward(grad)

    alone = SequenceGroups(SequencePlan())
    wide_k, wide_v = (t.detach().repeat(1, 1, 4, 1).requires_grad_() for t in (k, v))

    def computing() -> None:
        lengths: Any = {"length": options.local, "key_length": shape.length}
        attention(q, wide_k, wide_v, alone, **lengths).backward(grad)

    sending = _sending(q, k, v, groups, shape)
    calls = {"ring": whole, "computing": computing, "sending": sending}
    turns = {name: lambda c=call: seconds_of(c) for name, call in calls.items()}
    return {name: s.values for name, s in alternate(turns, options.rounds).items()}


def _sending(
    q: Tensor, k: Tensor, v: Tensor, groups: SequenceGroups, shape: Shape
) -> Callable[[], None]:
    """The messages of a forward and a backward, without what is computed in between."""
    layout = groups.plan.lay(shape.length)
    how = How(1.0, Rules(), ())
    call = Call(groups, layout, layout, how)
    pack = _Pack([k.detach(), v.detach()], call.cuts())
    own = pack.own(call)
    part = torch.zeros(pack.numel(0, 0))

    def messages() -> None:
        for _ in turn(own, pack.bytes, groups):
            pass
        round_trip(
            *(own, pack.bytes, pack.numel, groups),
            lambda visit: part,
            lambda into, arrived, visit: into,
        )

    return messages


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def slowest(ranks: list[Mapping[str, tuple[float, ...]]]) -> dict[str, Spread]:
    """The slowest rank of each turn."""
    return {
        name: Spread(tuple(map(max, zip(*(rank[name] for rank in ranks), strict=True))))
        for name in ranks[0]
    }


def report_overlap(options: Options, report: Report) -> None:
    """Rows and a bar for each link."""
    for rate in options.links:
        with Net(4, rate) as net:
            times = slowest(run(time_overlap, net, options))
        bound = max(times["computing"].median, times["sending"].median)
        ratio = times["ring"].median / bound
        alone = f"{milli(times['computing'])} / {milli(times['sending'])}"
        report.rows.append(("overlap", rate, milli(times["ring"]), alone, f"{ratio:.3f}"))
        report.bars.append(at_most(f"overlap: {rate}, ring / max(alone)", ratio, 1.15))
        expected = predicted(options, rate, times["computing"].median)
        shown = f"{expected * 1e3:.3g} ms", f"{times['ring'].median / expected:.3f}"
        report.rows.append(("overlap", f"{rate}, predicted", milli(times["ring"]), *shown))
        report.figures[f"overlap {rate}"] = {n: list(s.values) for n, s in times.items()}


def predicted(options: Options, rate: str, computing: float) -> float:
    """Seconds of the ring by the library's formula, from the time that computing takes alone."""
    shape = shape_of(options, 4, options.local)
    operations = 4 * options.heads * options.local * shape.length * options.head_dim
    device = Device(
        "a core", {"float32": 3.5 * operations / computing}, memory_rate=1e10, memory_bytes=1 << 30
    )
    link = Link(1e-3, bits_per_second(rate) / 8)
    cluster = Cluster("shaped", device, (Axis("local", 4, link),))
    return predict(cluster, shape, PLANS[0]).seconds


# --- levels ---


def time_levels(options: Options) -> dict[str, tuple[float, ...]]:
    """Seconds of a forward and backward along one level and two."""
    init_world()
    calls = _level_calls(options)
    turns = {name: lambda c=call: seconds_of(c) for name, call in calls.items()}
    return {name: s.values for name, s in alternate(turns, options.rounds).items()}


def run_level(options: Options, name: str, times: int) -> None:
    """One of the two, so many times, for the counters of the link between the nodes."""
    init_world()
    call = _level_calls(options)[name]
    for _ in range(times):
        call()
    settled()


def _level_calls(options: Options) -> dict[str, Callable[[], None]]:
    shape = shape_of(options, 8, options.level_local)
    q, k, v, grad = tensors(shape, 8)
    calls: dict[str, Callable[[], None]] = {}
    for name, plan in (("flat", FLAT), ("nested", NESTED)):
        groups = make_groups(plan)
        calls[name] = lambda g=groups: attention(q, k, v, g, length=shape.length).backward(grad)
    return calls


def uplink_bytes(net: Net, node: int = 0) -> int:
    """Bytes that a node has sent to the others, without headers."""
    command = ["ip", "-n", net._core, "-s", "-j", "link", "show", f"up{node}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sent = json.loads(shown)[0]["stats64"]["tx"]
    return sent["bytes"] - HEADERS * sent["packets"]


def report_levels(options: Options, report: Report) -> None:
    """Bytes on the links between nodes, of a node and of its busiest rank, and times."""
    shape = shape_of(options, 8, options.level_local)
    shaped: dict[str, Any] = {"nodes": NODES, "uplink": options.uplink}
    sent = {}
    with Net(NODES * LOCAL, "1gbit", **shaped) as net:
        for name in ("flat", "nested"):
            totals = []
            for times in (1, 3):
                before = uplink_bytes(net)
                run(run_level, net, options, name, times)
                totals.append(uplink_bytes(net) - before)
            # What it takes to meet is in both.
            sent[name] = (totals[1] - totals[0]) / 2
        times = slowest(run(time_levels, net, options))
    of_flat, of_nested = volume(FLAT, shape), volume(NESTED, shape)
    # One rank of a node sends to the other along the flat ring, each of them along the nested one.
    formulas = {
        "flat": of_flat.inner_forward + of_flat.inner_backward,
        "nested": LOCAL * (of_nested.outer_forward + of_nested.outer_backward),
    }
    worst = 0.0
    for name, formula in formulas.items():
        ratio = sent[name] / formula
        worst = max(worst, abs(ratio - 1))
        row = f"{sent[name] / MIB:.2f} MiB", f"{formula / MIB:.2f} MiB", f"{ratio:.4f}"
        report.rows.append(("levels", f"{name}, a node's uplink", *row))
    each = formulas["flat"] / (formulas["nested"] / LOCAL)
    gain = times["flat"].median / times["nested"].median
    for name, spread in times.items():
        shown = f"{gain:.2f}" if name == "nested" else "1"
        report.rows.append(("levels", f"{name}, time", milli(spread), "", shown))
    report.bars += [
        at_most("levels: uplink bytes, largest deviation from a formula", worst, 0.03),
        at_least("levels: bytes of a rank's slow link, flat / nested", each, LOCAL),
        at_least("levels: time, flat / nested", gain, 1.5),
    ]
    report.figures["levels"] = {name: list(spread.values) for name, spread in times.items()}


# --- balance ---


def time_balance(options: Options) -> dict[str, float]:
    """Seconds of the slowest rank of each step over the mean, less 1, by layout."""
    init_world()
    found = {}
    for name in ("contiguous", "zigzag"):
        groups = make_groups(SequencePlan(inner=4, layout=name))
        shape = shape_of(options, 4, options.local)
        q, k, v, _ = (t.detach() for t in tensors(shape, 4))
        layout = groups.plan.lay(shape.length)
        rules = Mask(causal=True).rules(1, shape.length, shape.length)
        how = How(0.125, rules, deal_heads(shape.heads, shape.heads, 1).runs(0))
        call = Call(groups, layout, layout, how)
        steps = [_step_seconds(q, k, v, call, step, options.rounds) for step in range(4)]
        ranks = gather_objects(steps)
        worst = sum(max(step) for step in zip(*ranks, strict=True))
        found[name] = worst * 4 / sum(map(sum, ranks)) - 1
    return found


def _step_seconds(q: Tensor, k: Tensor, v: Tensor, call: Call, step: int, rounds: int) -> float:
    """Processor seconds of one step's block: neither messages nor other processes count."""
    place = call.groups.place
    held = call.queries.of_place(place), call.keys.of_place((place - step) % 4)
    found = tiles(*held, call.how.rules)
    seconds = []
    for _ in range(rounds + 1):
        partial = Partial.empty(q, v.shape[3])
        started = time.thread_time()
        attend(partial, q, k, v, found, call.how)
        seconds.append(time.thread_time() - started)
    return Spread(tuple(seconds[1:])).median


def report_balance(options: Options, report: Report) -> None:
    """Measured and by pairs."""
    found = run(time_balance, None, options, ranks=4)[0]
    length = 4 * options.local
    causal: Rules = Mask(causal=True).rules(1, length, length)
    for name, value in found.items():
        pairs = imbalance(Layout(length, 4, 1, name), causal)  # type: ignore[arg-type]
        report.rows.append(("balance", name, f"{value:.1%}", f"{pairs:.1%}", ""))
    report.bars += [
        at_most("balance: zigzag, slowest over mean less 1", found["zigzag"], 0.03),
        at_least("balance: contiguous, the same", found["contiguous"], 0.5),
    ]


# --- memory ---


def peak_memory(options: Options, name: str) -> float:
    """Bytes that a forward and a backward add to this rank at most."""
    world = init_world()
    if world.size == 1:
        # A world of one has no process group; the tensors want to know their rank.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = make_groups(SequencePlan(inner=world.size))
    shape = shape_of(options, world.size, options.local)
    q, k, v, grad = tensors(shape, world.size)
    call = attention if name == "ring" else two_ring_attention
    if world.size > 1:
        barrier()
    # Tensors in memory maps of their own: what is freed is returned, and holes do not count.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call(q, k, v, groups).backward(grad)
    return _status("VmHWM") - before


def _status(entry: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(entry))


def report_memory(options: Options, report: Report) -> None:
    """The peak over 1 to 8 ranks."""
    peaks = {
        name: [max(run(peak_memory, None, options, name, ranks=n)) for n in (1, 2, 4, 8)]
        for name in ("ring", "two rings")
    }
    for name, values in peaks.items():
        shown = " / ".join(f"{value / MIB:.0f}" for value in values)
        growth = f"{values[3] / values[2]:.2f}"
        report.rows.append(("memory", f"{name}, 1 / 2 / 4 / 8 ranks", f"{shown} MiB", "", growth))
    report.figures["memory"] = peaks
    growth = peaks["ring"][3] / peaks["ring"][2]
    report.bars.append(at_most("memory: ring, 8 ranks / 4 ranks", growth, 1.05))


def milli(spread: Spread) -> str:
    """For people."""
    low, middle, high = (f"{v * 1e3:.3g}" for v in (spread.low, spread.median, spread.high))
    return f"{middle} ({low} to {high}) ms"


PARTS = {
    "bytes": report_bytes,
    "overlap": report_overlap,
    "levels": report_levels,
    "balance": report_balance,
    "memory": report_memory,
}


def main() -> None:
    """Builds the networks and measures in each."""
    options = tyro.cli(Options, description=__doc__)
    load = foreign_load()
    report = Report(
        claim="sequence",
        title="Attention over 4 ranks, and over 2 nodes of 4",
        columns=("part", "of", "found", "formula, or computing / sending alone", "ratio"),
        notes=[
            f"batch 1, {options.heads} heads of {options.head_dim}, float32, {options.local} "
            f"tokens a rank ({options.level_local} on two levels, uplink {options.uplink})",
            "times: median (lower to upper quartile) of the slowest rank, taking turns",
            f"other processes used {load:.1f} cores before the run",
        ],
    )
    with contextlib.suppress(PermissionError):
        # Others' work must not take the place of the ranks'; real time would starve gloo.
        os.nice(-15)
    for part in options.parts:
        PARTS[part](options, report)
    finish(report, options.keep)


if __name__ == "__main__":
    main()
