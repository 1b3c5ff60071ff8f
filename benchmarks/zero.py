"""ZeRO stages 0 to 3 beside DDP, FSDP2 and DeepSpeed: time, bytes on the wire, bytes of state.

`python -m benchmarks.zero` trains the same model on the same batches with every contestant, in the
same processes, a rank pinned to each core, taking turns: on loopback, and on links so shaped that
communication takes as long as compute; shaped links need root. Each table ends with a line of JSON.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import tyro

from benchmarks._harness import finish, free_memory, is_ratio
from benchmarks._zero_ranks import OURS, PEERS, Options, measure
from benchmarks._zero_report import Network, joined, rate_for, report
from benchmarks.netlab import LoadMeter, Net, NetlabError, check_tools, run
from gulliver.errors import nearest

LOOPBACK = "loopback"
TIMEOUT_S = 3600.0
COPIES, TUNED_COPIES = 4, 5
"""Of the parameters that a contestant keeps in a rank, and more that tuning our chunks leaves."""


def on_network(options: Options, rate: str, names: Sequence[str]) -> Network:
    """Starts the ranks on links of a rate, or on loopback, and brings back what they found."""
    shaped = rate != LOOPBACK
    meter = LoadMeter()
    place = Net(options.ranks, rate) if shaped else nullcontext()
    with tempfile.TemporaryDirectory() as cache, place as net:
        arguments = (options, tuple(names), shaped, cache)
        found = run(measure, net, *arguments, ranks=options.ranks, timeout_s=TIMEOUT_S)
    return joined(rate, found, meter.cores())


def compare(options: Options) -> None:
    """All contestants on each network."""
    reference: Network | None = None
    # Loopback first: its compute says which rates are fast and slow.
    for name in sorted(options.networks, key=lambda n: n != LOOPBACK):
        rate, label = name, name
        if is_ratio(name):
            reference = reference or on_network(options, LOOPBACK, ())
            size = reference.parameter_bytes
            rate = rate_for(float(name), reference.compute_s, options.ranks, size)
            label = f"{name} times compute"
        network = on_network(options, rate, options.contestants)
        if name == LOOPBACK:
            reference = network
        show(options, network, label)


def show(options: Options, network: Network, label: str) -> None:
    """Prints, and perhaps keeps, what was found on a network."""
    claim = f"zero-{options.model}-{options.ranks}-{label.split()[0]}"
    notes = [
        f"Medians of {options.rounds} turns of {options.steps} steps; AdamW, fused, float32; "
        f"asked for: {label}."
    ]
    finish(report(network, claim, options.task().name, notes), options.keep)


def checked(options: Options) -> Options:
    """The options, where they can run."""
    known = (*PEERS, *OURS)
    for name in options.contestants:
        if name not in known and not name.removeprefix("DDP ").isdigit():
            raise NetlabError(f"unknown contestant {name!r}: {nearest(name, known)}")
    if options.ranks < 2 or options.rounds < 1 or options.steps < 1:
        raise NetlabError("ranks must be at least 2, rounds and steps at least 1")
    return options


def needed_bytes(options: Options) -> int:
    """Memory that all ranks need together, roughly."""
    with torch.device("meta"):  # nothing is computed here: ranks are forked from this process
        size = sum(p.nbytes for p in options.task().model().parameters())
    copies = COPIES * (1 + len(options.contestants))
    if options.chunk() == "auto":
        copies += TUNED_COPIES * sum(name in OURS for name in options.contestants)
    return options.ranks * copies * size


def check_memory(options: Options) -> None:
    """Refuses what would not fit, before the kernel ends some process or other."""
    free, needed = free_memory(), needed_bytes(options)
    if needed > free:
        raise NetlabError(
            f"{len(options.contestants)} contestants in {options.ranks} ranks need about "
            f"{needed / 2**30:.0f} GiB and {free / 2**30:.0f} are free: name fewer --contestants, "
            "or set --chunk-mb to a number"
        )


def main() -> None:
    try:
        options = checked(tyro.cli(Options, description=__doc__))
        if set(options.networks) != {LOOPBACK}:
            check_tools()
        check_memory(options)
        compare(options)
    except NetlabError as error:
        sys.exit(f"benchmarks.zero: {error}")


if __name__ == "__main__":
    main()
