"""ZeRO stages 0 to 3 beside DDP, FSDP2 and DeepSpeed: time, bytes on the wire, bytes of state.

`python -m benchmarks.zero` trains the same model on the same batches with every contestant, in the
same processes, a rank pinned to each core, taking turns: on loopback, and on links so shaped that
communication takes as long as compute; shaped links need root. Each network is taken twice, side by
side: layers compute on the core that also communicates, or sleep as long, as they would beside an
accelerator, where overlap itself is measured. Then come 1, 2 and 4 ranks whose layers sleep, on
links fast enough to hide behind them and on links that are not, beside as many processes that do
not talk (`--weak only` does that alone). Each table ends with a line of JSON; `--keep` writes
result files and pictures.
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
    COMPUTED,
    SLEPT,
    Network,
    Scaling,
    joined,
    picture,
    rate_for,
    report,
    side_by_side,
    weak_picture,
    weak_report,
)
from benchmarks.netlab import LoadMeter, Net, NetlabError, check_tools, run
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
    network = joined(rate, found, meter.cores())
    return replace(network, regime=SLEPT if options.slept_s else COMPUTED)


def compare(options: Options) -> None:
    """All contestants on each network, computing and sleeping."""
    reference: Network | None = None
    networks: list[Network] = []
    # Loopback first: its compute says which rates are fast and slow, and how long layers sleep.
    for name in sorted(options.networks, key=lambda n: n != LOOPBACK):
        computes = name == LOOPBACK and COMPUTED in options.regimes
        if reference is None and not computes:
            reference = on_network(options, LOOPBACK, ())
        rate, label = name, name
        if is_ratio(name):
            assert reference is not None
            rate = rate_of(float(name), reference, options.ranks)
            label = f"{name} times compute"
        for regime in options.regimes:
            chosen = options
            if regime == SLEPT:
                assert reference is not None
                chosen = replace(options, slept_s=options.slept_s or reference.compute_s)
            network = on_network(chosen, rate, options.contestants)
            reference = reference or network
            networks.append(network)
            show(options, network, label)
    if len(options.regimes) > 1:
        task, claim = options.task().name, f"zero-{options.model}-{options.ranks}-regimes"
        finish(side_by_side(networks, claim, task), options.keep)


def is_ratio(network: str) -> bool:
    """Whether a network is named by communication over compute."""
    return network.replace(".", "", 1).isdigit()


def rate_of(ratio: float, reference: Network, ranks: int) -> str:
    """The rate at which communication takes `ratio` times the compute that was measured."""
    return rate_for(ratio, reference.compute_s, ranks, reference.parameter_bytes)


def show(options: Options, network: Network, label: str) -> None:
    """Prints, and perhaps keeps, what was found on a network."""
    task = options.task()
    slept = "-slept" if network.regime == SLEPT else ""
    claim = f"zero-{options.model}-{options.ranks}-{label.split()[0]}{slept}"
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
    """Weak scaling of ranks that sleep."""
    most = max(WEAK_RANKS)
    if not options.slept_s:
        alone = on_network(replace(options, ranks=1), LOOPBACK, ())
        options = replace(options, slept_s=alone.compute_s)
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
    """The options, where they can run.

    Raises:
        NetlabError: a contestant or a network that is not known.
    """
    known = (*PEERS, *OURS)
    for name in options.contestants:
        if name not in known and not name.removeprefix("DDP ").isdigit():
            raise NetlabError(f"unknown contestant {name!r}: {nearest(name, known)}")
    if options.ranks < 2 or options.rounds < 1 or options.steps < 1:
        raise NetlabError("ranks must be at least 2, rounds and steps at least 1")
    return options


def for_weak(options: Options) -> Options:
    """What all numbers of ranks of weak scaling can have."""
    # A rank alone has no group for the others.
    kept = tuple(n for n in options.contestants if n in ("DDP", "ZeRO 1", "ZeRO 2"))
    sequences = max(WEAK_RANKS) if options.model == "gpt" else 0
    return replace(options, contestants=kept, batch=options.batch or sequences, chunk_mb="4")


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
        if options.weak != "no" or set(options.networks) != {LOOPBACK}:
            check_tools()
        weak = for_weak(options)
        for wanted in [options] if options.weak == "no" else [options, weak]:
            check_memory(replace(wanted, ranks=max(WEAK_RANKS)) if wanted is weak else wanted)
        if options.weak != "only":
            compare(options)
        if options.weak != "no":
            scale(weak)
    except NetlabError as error:
        sys.exit(f"benchmarks.zero: {error}")


if __name__ == "__main__":
    main()
