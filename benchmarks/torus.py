"""All-reduce over two nodes: flat, by gloo and by Gulliver, and along a torus.

`python -m benchmarks.torus` builds a network with 1 Gbit/s for each rank, and between the nodes
100 Mbit/s and a millisecond of added delay at each end; it needs root. Contestants take turns in
the same ranks. Once the ranks are numbered node by node, once dealt over the nodes, which a torus
is told and a ring of gloo is not. A node has four ranks, or two where there are fewer than four
cores: messages are copied by processors, and more ranks would measure how they take turns.

"gloo flat" is `torch.distributed.all_reduce`, "flat" ours over the whole world. Which of "flat" and
"torus" is faster is predicted from each axis' latency and bandwidth, measured before by two calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from benchmarks._harness import Report, Spread, alternate, at_least, at_most, finish
from benchmarks.netlab import Net, foreign_load, run
from gulliver.comm import Torus, all_reduce, barrier, gather_objects, init_world, make_axes
from gulliver.comm.torus import Axes

NODES, LOCAL = 2, 4 if len(os.sched_getaffinity(0)) >= 4 else 2
RATE, UPLINK, DELAY_US = "1gbit", "100mbit", 1000
KIB, MIB = 1 << 10, 1 << 20
SMALL = 16 * KIB  # What counts as a small message
TINY = 2 * KIB
DIRECT = 32 * KIB  # Where the ways of sending change, as in `gulliver.comm`
NAMES = ("gloo flat", "flat", "torus")


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    sizes: tuple[int, ...] = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB)
    """Bytes of each all-reduce."""
    rounds: int = 7
    orders: tuple[str, ...] = ("node", "round-robin")
    realtime: bool = True
    """Run before all else on the machine, as `chrt -r 1` does: turns of 4 ms would hide delays."""
    keep: bool = False  # Write benchmarks/results


@dataclass(frozen=True)
class Link:
    """An axis while all its lines are in use."""

    alpha_s: float  # seconds of an exchange without payload
    bandwidth: float  # bytes per second that each rank sends


@dataclass(frozen=True)
class Choice:
    """What is predicted to be faster for so many bytes."""

    nbytes: int
    predicted_flat_s: float
    predicted_torus_s: float

    @property
    def kind(self) -> str:
        """Name of the faster one."""
        return "torus" if self.predicted_torus_s < self.predicted_flat_s else "flat"


@dataclass(frozen=True)
class Measured:
    """What one rank, or all of them, found."""

    links: dict[str, Link]  # by axis
    seconds: dict[int, dict[str, tuple[float, ...]]]  # of each call, by size and contestant
    choices: dict[int, Choice]  # by size


def predict_flat(links: Mapping[str, Link], nbytes: int) -> float:
    """Seconds of a flat all-reduce: what crosses between the nodes takes the time.

    A small message goes to all at once; of a large one each rank gets its part, and sends the sum.
    """
    link, ranks = links["node"], NODES * LOCAL
    away = (ranks - LOCAL) * nbytes / link.bandwidth
    if (ranks - 2) * nbytes <= DIRECT:
        return link.alpha_s + away
    return 2 * (link.alpha_s + away / ranks)


def predict_torus(links: Mapping[str, Link], nbytes: int) -> float:
    """Seconds along the axes: out and back in the nodes, and a shard between the two of them.

    A tiny message goes whole along every axis, and nothing comes back. Of a large one a segment
    crosses between nodes while others are on their way in them.
    """
    inner, outer = links["local"], links["node"]
    if nbytes <= TINY:
        return sum(link.alpha_s + nbytes / link.bandwidth for link in (inner, outer))
    alphas = 2 * inner.alpha_s + outer.alpha_s
    within = 2 * (LOCAL - 1) / LOCAL * nbytes / inner.bandwidth
    between = nbytes / LOCAL / outer.bandwidth
    segments = max(1, min(8, nbytes // (512 * KIB)))
    return alphas + max(within, between) + min(within, between) / segments


def rank_order(order: str) -> list[int]:
    """The ranks of the world, node by node."""
    ranks = list(range(NODES * LOCAL))
    return ranks if order == "node" else [r for node in range(NODES) for r in ranks[node::NODES]]


def measure(options: Options, order: str) -> Measured:
    """One rank's part."""
    init_world()
    axes = make_axes({"node": NODES, "local": LOCAL}, rank_order(order))
    torus, links = axes.torus(), probe(axes)
    seconds, choices = {}, {}
    for nbytes in options.sizes:
        tensor = torch.ones(nbytes // 4)
        choices[nbytes] = Choice(nbytes, predict_flat(links, nbytes), predict_torus(links, nbytes))
        calls: dict[str, Callable[[], Any]] = {
            "gloo flat": lambda t=tensor: dist.all_reduce(t),
            "flat": lambda t=tensor: all_reduce(t),
            "torus": lambda t=tensor: all_reduce(t, group=torus),
        }
        # Calls in a row meet by themselves; a barrier before each would add its own delays.
        times = 10 if nbytes <= 256 * KIB else 1
        turns = {n: lambda c=call, k=times: seconds_of(c, k) for n, call in calls.items()}
        spreads = alternate(turns, options.rounds)
        seconds[nbytes] = {name: spread.values for name, spread in spreads.items()}
        check(tensor, torus)
    barrier()
    return Measured(links, seconds, choices)


def probe(axes: Axes, repeats: int = 5) -> dict[str, Link]:
    """Measures each axis while all its lines are in use; the slowest rank counts."""
    links = {}
    for name, size in axes.sizes.items():
        torus = axes.torus(name)
        tiny = _median_s(torus, torch.ones(1), 20, repeats)
        large = _median_s(torus, torch.ones(MIB // 4), 1, repeats)
        rounds = 1 if size == 2 else 2
        moved = MIB * (1 if size == 2 else 2 * (size - 1) / size)
        links[name] = Link(tiny, moved / max(large - rounds * tiny, 1e-9))
    return links


def _median_s(torus: Torus, tensor: Tensor, times: int, repeats: int) -> float:
    """Seconds of an all-reduce, of the slowest rank in each of several repeats."""
    runs = [seconds_of(lambda: all_reduce(tensor, group=torus), times) for _ in range(repeats + 1)]
    # The first is to warm up.
    slow = [max(values) for values in zip(*gather_objects(runs[1:]), strict=True)]
    return Spread(tuple(slow)).median


def seconds_of(call: Callable[[], Any], times: int) -> float:
    """Seconds of each of several calls in a row."""
    barrier()
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def check(tensor: Tensor, torus: Torus) -> None:
    """Holds the torus against a sum that one can do in the head."""
    tensor.fill_(dist.get_rank())
    all_reduce(tensor, group=torus)
    assert bool((tensor == sum(range(torus.size))).all())


def slowest(ranks: list[Measured]) -> dict[int, dict[str, Spread]]:
    return {
        nbytes: {
            name: Spread(
                tuple(map(max, zip(*(r.seconds[nbytes][name] for r in ranks), strict=True)))
            )
            for name in NAMES
        }
        for nbytes in ranks[0].seconds
    }


def loss(times: Mapping[str, Spread], choice: Choice) -> float:
    """How much slower the chosen one was than the faster one, as a fraction."""
    return times[choice.kind].median / min(times["flat"].median, times["torus"].median) - 1


def label(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def row(order: str, nbytes: int, times: Mapping[str, Spread], choice: Choice) -> list[str]:
    """A line of the table."""
    torus = times["torus"].median
    return [
        f"{order}, {label(nbytes)}",
        *(times[name].shown(".3g", 1e-3) for name in NAMES),
        f"{times['gloo flat'].median / torus:.2f}",
        f"{times['flat'].median / torus:.2f}",
        f"{choice.predicted_flat_s * 1e3:.1f}",
        f"{choice.predicted_torus_s * 1e3:.1f}",
        choice.kind,
        f"{loss(times, choice):.1%}",
    ]


def report(found: Mapping[str, list[Measured]], load: float) -> Report:
    """The table and the bars."""
    result = Report(
        claim="torus",
        title=f"All-reduce over {NODES} nodes x {LOCAL} ranks, ms: flat and along a torus",
        columns=(
            *("ranks in order, bytes", *NAMES, "gloo / torus", "flat / torus"),
            *("flat predicted", "torus predicted", "chosen", "loss"),
        ),
        notes=[
            f"{RATE} for each rank, {UPLINK} between nodes, {DELAY_US} us added at each end of it",
            "median (lower to upper quartile) of the slowest rank, taking turns",
            f"other processes used {load:.1f} cores before the run",
        ],
    )
    losses, small = [], []
    for order, ranks in found.items():
        times, choices = slowest(ranks), ranks[0].choices
        for nbytes, spreads in times.items():
            result.rows.append(row(order, nbytes, spreads, choices[nbytes]))
            losses.append(loss(spreads, choices[nbytes]))
            gain = spreads["gloo flat"].median / spreads["torus"].median
            if nbytes <= SMALL:
                small.append(gain)
            if nbytes == 8 * MIB:
                bar = 1.3 if order == "node" else 4.0
                result.bars.append(at_least(f"8 MiB, {order}: gloo flat / torus", gain, bar))
        result.figures[order] = {
            "links": {name: asdict(link) for name, link in ranks[0].links.items()},
            "milliseconds": {
                nbytes: {name: s.median * 1e3 for name, s in spreads.items()}
                for nbytes, spreads in times.items()
            },
            "choices": [asdict(choice) for choice in choices.values()],
        }
    if small:
        name = f"up to {label(SMALL)}, smallest gain: gloo flat / torus"
        result.bars.insert(0, at_least(name, min(small), 3.0))
    result.bars.append(at_most("the chooser's largest loss", max(losses), 0.05))
    return result


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    load = foreign_load()
    if options.realtime:
        # All that is started from here, the ranks and the delays too, inherits it.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    found = {}
    for order in options.orders:
        shape: dict[str, Any] = {"nodes": NODES, "uplink": UPLINK, "delay_us": DELAY_US}
        with Net(NODES * LOCAL, RATE, order=order, **shape) as net:
            found[order] = run(measure, net, options, order)
    finish(report(found, load), options.keep)


if __name__ == "__main__":
    main()
