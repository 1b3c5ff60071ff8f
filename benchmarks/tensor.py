"""Tensor parallelism, the sequence cut or not, beside DTensor's, DDP and FSDP2.

`python -m benchmarks.tensor` trains the same Llama on the same batches with every contestant, in
the same processes, taking turns: with 2 and with 4 ranks, on loopback and on links so shaped that
what plain tensor parallelism sends takes a third of its compute, as long, and three times as long;
shaped links need root. One table, and one line of JSON, has it all.

Read `_tensor_models.py` for the contestants and `_tensor_report.py` for the formulas and the bars.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence

import tyro

from benchmarks._harness import finish, is_ratio
from benchmarks._tensor_models import OURS, PEERS
from benchmarks._tensor_ranks import Options, measure
from benchmarks._tensor_report import LOOPBACK, Network, joined, rate_for, report
from benchmarks.netlab import LoadMeter, Net, NetlabError, run
from gulliver.errors import nearest

TIMEOUT_S = 1800.0


def on_network(options: Options, ranks: int, rate: str, names: Sequence[str]) -> Network:
    """Starts the ranks on links of a rate, or on loopback, and brings back what they found."""
    shaped = rate != LOOPBACK
    meter = LoadMeter()
    place = Net(ranks, rate) if shaped else contextlib.nullcontext()
    with place as net:
        arguments = (options, tuple(names), shaped)
        found = run(measure, net, *arguments, ranks=ranks, timeout_s=TIMEOUT_S)
    return joined(rate, found, options.sizes(), meter.cores())


def compare(options: Options, ranks: int) -> list[Network]:
    found: list[Network] = []
    reference: Network | None = None
    # Loopback first: its compute says which rates are fast and slow.
    for name in sorted(options.networks, key=lambda n: n != LOOPBACK):
        rate = name
        if is_ratio(name):
            reference = reference or on_network(options, ranks, LOOPBACK, ())
            rate = rate_for(float(name), reference.compute_s, ranks, options.sizes())
        found.append(on_network(options, ranks, rate, options.contestants))
        if name == LOOPBACK:
            reference = found[-1]
    return found


def check(options: Options) -> None:
    """Refuses what cannot be measured."""
    known = (*PEERS, *OURS)
    for name in options.contestants:
        if name not in known:
            raise NetlabError(f"unknown contestant {name!r}: {nearest(name, known)}")
    if options.rounds < 1:
        raise NetlabError("rounds must be at least 1")
    pairs, parts = options.sizes().heads // 2, ("wide", "vocabulary", "batch", "length")
    for ranks in options.ranks:
        if ranks < 2:
            raise NetlabError("ranks must be at least 2")
        # The peers need it: ours deals out anything.
        sizes = {name: getattr(options, name) for name in parts} | {"hidden / 128": pairs}
        for name, size in sizes.items():
            if size % ranks:
                raise NetlabError(f"{name} is {size}: it must divide by {ranks} ranks")
    if importlib.util.find_spec("transformers") is None:
        raise NetlabError("what trains is a model of transformers: pip install transformers")


def main() -> None:
    try:
        options = tyro.cli(Options, description=__doc__)
        check(options)
        # Before the ranks are forked, so that it is read once.
        importlib.import_module("transformers.models.llama.modeling_llama")
        with contextlib.suppress(PermissionError):
            # Others' work must not take the place of the ranks'; real time would starve gloo.
            os.nice(-15)
        networks = [network for ranks in options.ranks for network in compare(options, ranks)]
        finish(report(networks, options.sizes()), options.keep)
    except NetlabError as error:
        sys.exit(f"benchmarks.tensor: {error}")


if __name__ == "__main__":
    main()
