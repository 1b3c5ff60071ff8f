"""ZeRO stages 0 to 3 beside DDP, FSDP2 and DeepSpeed: time, bytes on the wire, bytes of state.

`python -m benchmarks.zero` trains the same model on the same batches with every contestant, in the
same processes, taking turns: on loopback, and on links so shaped that communication takes a third
of the compute, as long, and three times as long; shaped links need root. Each network has a table,
a line of JSON and, with `--keep`, a result file and a picture.

`--weak` compares 1, 2 and 4 ranks with as many processes that do not talk, with links fast enough
to hide behind compute and with links that are not.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import tyro

from benchmarks._harness import RESULTS, finish
from benchmarks._zero_ranks import OURS, PEERS, Options, measure
from benchmarks._zero_report import (
    Network,
    Scaling,
    joined,
    picture,
    rate_for,
    report,
    weak_picture,
    weak_report,
)
from benchmarks.netlab import LoadMeter, Net, NetlabError, run
from gulliver.errors import nearest

LOOPBACK = "loopback"
WEAK_RANKS = (1, 2, 4)
HIDDEN = "links that can hide it"
REGIMES = {HIDDEN: 0.5, "slow links": 2.0}
"""Communication over compute, with four ranks."""
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
        if is_ratio(name) and reference is None:
            reference = on_network(options, LOOPBACK, ())
        rate = name
        if is_ratio(name):
            assert reference is not None
            rate = rate_of(float(name), reference, options.ranks)
        network = on_network(options, rate, options.contestants)
        if name == LOOPBACK:
            reference = network
        show(options, network, f"{name} times compute" if is_ratio(name) else rate)


def is_ratio(network: str) -> bool:
    """Whether a network is named by communication over compute."""
    return network.replace(".", "", 1).isdigit()


def rate_of(ratio: float, reference: Network, ranks: int) -> str:
    """The rate at which communication takes `ratio` times the compute that was measured."""
    return rate_for(ratio, reference.compute_s, ranks, reference.parameter_bytes)


def show(options: Options, network: Network, label: str) -> None:
    """Prints, and perhaps keeps, what was found on a network."""
    task = options.task()
    claim = f"zero-{options.model}-{options.ranks}-{label.split()[0]}"
    notes = [
        f"Medians of {options.rounds} turns of {options.steps} steps; AdamW, fused, float32; "
        f"asked for: {label}."
    ]
    if options.keep:
        path = RESULTS / f"{claim}_{date.today()}.png"
        title = f"{task.name}, {network.ranks} ranks, {network.name}"
        picture(network, path, title)
        notes.append(f"![steps]({path.name})")
    finish(report(network, claim, task.name, notes), options.keep)


def scale(options: Options) -> None:
    """Weak scaling."""
    most = max(WEAK_RANKS)
    reference = on_network(replace(options, ranks=most), LOOPBACK, ())
    found = []
    for name, ratio in REGIMES.items():
        rate = rate_of(ratio, reference, most)
        networks = {
            n: on_network(replace(options, ranks=n), rate, options.contestants) for n in WEAK_RANKS
        }
        found.append(Scaling(name, rate, networks))
    task, claim = options.task().name, f"zero-{options.model}-weak"
    made = weak_report(found, claim, task, HIDDEN)
    if options.keep:
        path = RESULTS / f"{claim}_{date.today()}.png"
        weak_picture(found, path, f"Weak scaling, {task}")
        made.notes.append(f"![efficiency]({path.name})")
    finish(made, options.keep)


def checked(options: Options) -> Options:
    """The options; for weak scaling with what all its numbers of ranks can have.

    Raises:
        NetlabError: a contestant or a network that is not known.
    """
    known = (*PEERS, *OURS)
    for name in options.contestants:
        if name not in known and not name.removeprefix("DDP ").isdigit():
            raise NetlabError(f"unknown contestant {name!r}: {nearest(name, known)}")
    if options.ranks < 2 or options.rounds < 1 or options.steps < 1:
        raise NetlabError("ranks must be at least 2, rounds and steps at least 1")
    if options.weak:
        # A rank alone has no group for the others.
        kept = tuple(n for n in options.contestants if n in ("DDP", "ZeRO 1", "ZeRO 2"))
        sequences = max(WEAK_RANKS) if options.model == "gpt" else 0
        return replace(options, contestants=kept, batch=options.batch or sequences)
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
    """Refuses what would not fit, before the kernel ends some process or other.

    Raises:
        NetlabError: it needs more memory than there is.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    needed = needed_bytes(options)
    if needed > free:
        raise NetlabError(
            f"{len(options.contestants)} contestants in {options.ranks} ranks need about "
            f"{needed / 2**30:.0f} GiB and {free / 2**30:.0f} are free: name fewer --contestants, "
            "or set --chunk-mb to a number"
        )


def main() -> None:
    """Measures what the options say."""
    try:
        options = checked(tyro.cli(Options, description=__doc__))
        check_memory(replace(options, ranks=max(WEAK_RANKS)) if options.weak else options)
        scale(options) if options.weak else compare(options)
    except NetlabError as error:
        sys.exit(f"benchmarks.zero: {error}")


if __name__ == "__main__":
    main()
