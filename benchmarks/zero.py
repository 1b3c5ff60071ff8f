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

import tyro

from benchmarks._harness import finish, is_ratio
from benchmarks._zero_ranks import OURS, PEERS, Options, measure
from benchmarks._zero_report import Network, joined, rate_for, report
from benchmarks.netlab import LoadMeter, Net, NetlabError, check_tools, run
from gulliver.errors import nearest

LOOPBACK = "loopback"
TIMEOUT_S = 3600.0


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


def main() -> None:
    try:
        options = checked(tyro.cli(Options, description=__doc__))
        if set(options.networks) != {LOOPBACK}:
            check_tools()
        compare(options)
    except NetlabError as error:
        sys.exit(f"benchmarks.zero: {error}")


if __name__ == "__main__":
    main()
