"""Bytes that sequence parallelism sends, counted on the links, and rings over two levels.

On two levels there are two nodes of four ranks, and a slow link between them that the ranks of a
node share. The bytes of each rank's own traffic to the other node are those that TCP has counted
per connection; those of the shared link are its interface's.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from benchmarks._harness import Report, alternate, at_least, at_most
from benchmarks._sequence_shared import (
    MIB,
    Options,
    milli,
    seconds_of,
    settled,
    shape_of,
    slowest,
    tensors,
)
from benchmarks._two_ring import two_ring_attention, two_ring_bytes
from benchmarks.netlab import Net, run
from benchmarks.netlab._ranks import HEADERS, wire_bytes
from gulliver.comm import init_world
from gulliver.hardware.attention import AttentionShape as Shape
from gulliver.parallel.sequence import SequencePlan, attention, make_groups
from gulliver.parallel.sequence.choice import volume

RANKS, NODES, LOCAL = 4, 2, 4
PLANS = {
    "ring of 4": SequencePlan(inner=4),
    "ring of 2 x 2": SequencePlan(outer=2, inner=2),
    "Ulysses 4": SequencePlan(ulysses=4),
    "Ulysses 2 x ring of 2": SequencePlan(ulysses=2, inner=2),
}
TWIN = "two rings of the 2021 paper"
LEVELS = {"flat": SequencePlan(inner=NODES * LOCAL), "nested": SequencePlan(1, NODES, LOCAL)}


def count_bytes(options: Options) -> dict[str, tuple[float, float]]:
    """Bytes that this rank's link carried away in a forward and in a backward, by plan."""
    init_world()
    found = {}
    for name, call in _counted_calls(options).items():
        q, k, v, grad = tensors(shape_of(options, RANKS, options.local), RANKS)
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
    length = RANKS * options.local
    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    for name, plan in PLANS.items():
        groups = make_groups(plan)
        calls[name] = lambda q, k, v, g=groups: attention(q, k, v, g, length=length)
    twin = make_groups(SequencePlan(inner=RANKS))
    calls[TWIN] = lambda q, k, v: two_ring_attention(q, k, v, twin)
    return calls


def report_bytes(options: Options, report: Report) -> None:
    """Rows, in units of N - 1 blocks of one tensor, and the bar of the largest deviation."""
    shape = shape_of(options, RANKS, options.local)
    expected = {name: volume(plan, shape) for name, plan in PLANS.items()}
    expected[TWIN] = two_ring_bytes(RANKS, shape)
    unit = (RANKS - 1) * shape.heads * options.local * shape.head_dim * shape.item
    with Net(RANKS, "1gbit") as net:
        ranks = run(count_bytes, net, options)
    worst = 0.0
    for name, formula in expected.items():
        for number, way in enumerate(("forward", "backward")):
            sent = sum(rank[name][number] for rank in ranks) / len(ranks)
            wanted = getattr(formula, way)
            worst = max(worst, abs(sent / wanted - 1))
            shown = f"{sent / MIB:.3f} MiB, {sent / unit:.3f} units", f"{wanted / MIB:.3f} MiB"
            report.rows.append(("bytes", f"{name}, {way}", *shown, f"{sent / wanted:.4f}"))
    report.bars.append(at_most("bytes: largest deviation from a formula", worst, 0.03))


def sent_by_peer() -> dict[str, int]:
    """Payload that this rank's connections have delivered, by address.

    What is sent again after a loss counts once.
    """
    command = ["ss", "-tinHO", "state", "established"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return totals(shown)


def totals(shown: str) -> dict[str, int]:
    """Acknowledged bytes by the peer's address, of what ``ss -tinHO`` prints."""
    found: dict[str, int] = {}
    for line in shown.splitlines():
        acked = re.search(r" bytes_acked:(\d+)", line)
        if acked:
            # Queues of both ways, this end, the other end.
            address = line.split()[3].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
            found[address] = found.get(address, 0) + int(acked[1])
    return found


def count_slow(options: Options, addresses: Mapping[str, int]) -> dict[str, int]:
    """Bytes that this rank sent to the other node in a forward and a backward, by ring."""
    world = init_world()
    found = {}
    for name, call in _level_calls(options).items():
        call()  # connects
        settled()
        before = _to_others(addresses, world.rank)
        call()
        settled()
        found[name] = _to_others(addresses, world.rank) - before
    return found


def _to_others(addresses: Mapping[str, int], rank: int) -> int:
    mine = rank // LOCAL
    return sum(n for address, n in sent_by_peer().items() if addresses.get(address, mine) != mine)


def run_level(options: Options, name: str, times: int) -> None:
    """One of the rings, so many times, for the counters of the link between the nodes."""
    init_world()
    call = _level_calls(options)[name]
    for _ in range(times):
        call()
    settled()


def time_levels(options: Options) -> dict[str, tuple[float, ...]]:
    """Seconds of a forward and backward along one level and two."""
    init_world()
    calls = _level_calls(options)
    turns = {name: lambda c=call: seconds_of(c) for name, call in calls.items()}
    return {name: s.values for name, s in alternate(turns, options.rounds).items()}


def of_levels(options: Options) -> Shape:
    """The attention over two levels."""
    return shape_of(options, NODES * LOCAL, options.level_local, options.level_heads)


def _level_calls(options: Options) -> dict[str, Callable[[], None]]:
    shape = of_levels(options)
    q, k, v, grad = tensors(shape, NODES * LOCAL)
    calls: dict[str, Callable[[], None]] = {}
    for name, plan in LEVELS.items():
        groups = make_groups(plan)
        calls[name] = lambda g=groups: attention(q, k, v, g, length=shape.length).backward(grad)
    return calls


def uplink_bytes(net: Net, node: int = 0) -> int:
    """Bytes that a node has sent to the others, without headers."""
    command = ["ip", "-n", net._core, "-s", "-j", "link", "show", f"up{node}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sent = json.loads(shown)[0]["stats64"]["tx"]
    return sent["bytes"] - HEADERS * sent["packets"]


def _uplink_of(net: Net, options: Options, name: str) -> float:
    """Bytes of one call on a node's uplink."""
    counted = []
    for times in (1, 3):
        before = uplink_bytes(net)
        run(run_level, net, options, name, times)
        counted.append(uplink_bytes(net) - before)
    # What it takes to meet is in both.
    return (counted[1] - counted[0]) / 2


def report_levels(options: Options, report: Report) -> None:
    """Bytes to the other node, of a rank and of a node, and times."""
    shaped: dict[str, Any] = {"nodes": NODES, "uplink": options.uplink}
    with Net(NODES * LOCAL, "1gbit", **shaped) as net:
        addresses = {address: net.node_of(rank) for rank, address in enumerate(net.addresses)}
        of_ranks = run(count_slow, net, options, addresses)
        of_nodes = {name: _uplink_of(net, options, name) for name in LEVELS}
        times = slowest(run(time_levels, net, options))
    busiest = {name: max(rank[name] for rank in of_ranks) for name in LEVELS}
    _rows_of_levels(options, report, busiest, of_nodes)
    gain = times["flat"].median / times["nested"].median
    for name, spread in times.items():
        shown = f"{gain:.2f}" if name == "nested" else "1"
        report.rows.append(("levels", f"{name}, time", milli(spread), "", shown))
    less = busiest["flat"] / busiest["nested"]
    report.bars += [
        at_least("levels: bytes of the busiest rank to the other node, flat / nested", less, LOCAL),
        at_least("levels: time, flat / nested", gain, 1.5),
    ]
    report.figures["levels"] = {
        **{name: list(spread.values) for name, spread in times.items()},
        "busiest": busiest,
        "uplink": of_nodes,
    }


def _rows_of_levels(
    options: Options, report: Report, busiest: Mapping[str, float], of_nodes: Mapping[str, float]
) -> None:
    """Rows of measured and predicted bytes, per rank and per node."""
    shape = of_levels(options)
    flat, nested = (volume(plan, shape) for plan in LEVELS.values())
    # One rank of a node sends to the other along the flat ring, each of them along the nested one.
    each = {
        "flat": flat.inner_forward + flat.inner_backward,
        "nested": nested.outer_forward + nested.outer_backward,
    }
    worst = 0.0
    for name, formula in each.items():
        node = formula * (LOCAL if name == "nested" else 1)
        for who, found, wanted in (
            ("busiest rank to the other node", busiest[name], formula),
            ("a node's uplink", of_nodes[name], node),
        ):
            worst = max(worst, abs(found / wanted - 1))
            row = f"{found / MIB:.2f} MiB", f"{wanted / MIB:.2f} MiB", f"{found / wanted:.4f}"
            report.rows.append(("levels", f"{name}, {who}", *row))
    report.bars.append(at_most("levels: largest deviation from a formula", worst, 0.03))
