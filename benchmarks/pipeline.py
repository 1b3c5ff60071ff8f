"""Pipelines beside torch's own: where the cut matters, and what the bubbles cost.

`python -m benchmarks.pipeline` runs the same model, a row of residual MLPs, through torch's
pipelining cut by hand into equal numbers of blocks, and through ours with its schedules, in the
same processes, taking turns: blocks all alike, where nothing is to be won by the cut, and blocks
whose work grows fourfold from first to last; on loopback and on shaped links, which need root. The
step that is predicted from each block's own seconds stands beside the one that is measured.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from math import inf

import tyro

from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks._pipeline_ranks import (
    CONTESTANTS,
    EVEN,
    MODELS,
    OURS,
    TORCH,
    Found,
    Options,
    measure,
    stage_seconds,
)
from benchmarks.netlab import Net, NetlabError, run
from benchmarks.netlab._net import bits_per_second
from gulliver.errors import GulliverError, nearest
from gulliver.parallel.pipeline.schedules import predict
from gulliver.solve.timeline import Prediction

LOOPBACK, PEER = "loopback", "torch 1f1b"
TIMEOUT_S = 1200.0
NOT_SLOWER, FASTER = 0.97, 1.2
DISAGREE = 1e-4


def on_network(options: Options, rate: str, model: str) -> list[Found]:
    """Starts the ranks on links of a rate, or on loopback, and brings back what they found."""
    place = Net(options.ranks, rate) if rate != LOOPBACK else contextlib.nullcontext()
    with place as net:
        return run(measure, net, options, model, ranks=options.ranks, timeout_s=TIMEOUT_S)


def prediction(name: str, found: Sequence[Found], options: Options, rate: str) -> Prediction:
    """The step of a contestant, from the seconds of each block, measured alone on all ranks."""
    style = name.removeprefix("torch ") if name in TORCH else "1f1b" if name == EVEN else name
    sizes = found[0].cuts[name]
    blocks = range(options.blocks)
    forward = [sum(f.forward[b] for f in found) / len(found) for b in blocks]
    backward = [sum(f.backward[b] for f in found) / len(found) for b in blocks]
    rows = options.samples // options.micro_batches * options.length
    link = 32 * rows * options.hidden / (inf if rate == LOOPBACK else bits_per_second(rate))
    times = stage_seconds(forward, sizes), stage_seconds(backward, sizes)
    return predict(style, options.ranks, options.micro_batches, *times, link=link)


def report(results: dict[tuple[str, str], list[Found]], options: Options) -> Report:
    """The table, with a bar for each model and network."""
    made = Report(
        f"pipeline-{options.ranks}",
        f"Pipelines of {options.ranks} ranks, {options.micro_batches} micro-batches, "
        f"{options.blocks} blocks of width {options.hidden}",
        ("model", "links", "contestant", "cut", "step ms", "of torch 1f1b", "predicted ms",
         "bubble predicted", "bubble measured"),
    )  # fmt: skip
    for (model, rate), found in results.items():
        steps = found[0].steps
        base = steps.get(PEER)
        for name, step in steps.items():
            foretold = prediction(name, found, options, rate)
            speed = base.median / step.median if base else float("nan")
            bubble = 1 - sum(foretold.busy) / (step.median * options.ranks)
            key = f"{model} {rate} {name}"
            made.figures[key] = {
                "step_s": step.median,
                "speed": speed,
                "predicted_s": foretold.seconds,
                "bubble_predicted": foretold.bubble,
                "bubble": bubble,
            }
            made.rows.append(
                (
                    model,
                    rate,
                    name,
                    "+".join(map(str, found[0].cuts[name])),
                    step.shown(".1f", 1e-3),
                    f"{speed:.2f} x",
                    f"{1e3 * foretold.seconds:.1f}",
                    f"{foretold.bubble:.0%}",
                    f"{bubble:.0%}",
                )
            )
        losses = found[0].losses
        first = next(iter(losses.values()))
        apart = max(abs(loss / first - 1) for loss in losses.values())
        made.bars.append(at_most(f"{model}, {rate}: losses apart", apart, DISAGREE))
        if base and any(n in steps for n in OURS):
            best = max(base.median / s.median for n, s in steps.items() if n in OURS)
            limit = NOT_SLOWER if model == "uniform" else FASTER
            made.bars.append(at_least(f"{model}, {rate}: best over torch 1f1b", best, limit))
        if base and "1f1b" in steps:
            same = base.median / steps["1f1b"].median
            made.bars.append(at_least(f"{model}, {rate}: 1f1b over torch 1f1b", same, NOT_SLOWER))
    made.notes.append(
        f"Medians of {options.rounds} turns of a step, forward and backward without an optimizer; "
        "predictions are made from each block's seconds, measured on all ranks at once."
    )
    return made


def check(options: Options) -> None:
    """Refuses what cannot be measured."""
    for known, names in ((CONTESTANTS, options.contestants), (MODELS, options.models)):
        for name in names:
            if name not in known:
                raise NetlabError(f"unknown {name!r}: {nearest(name, known)}")
    if options.ranks < 2 or options.rounds < 1:
        raise NetlabError("ranks must be at least 2, rounds at least 1")
    if options.samples % options.micro_batches or options.blocks < 2 * options.ranks:
        raise NetlabError(
            "samples must divide by micro_batches, as the peer needs it, and blocks be at least "
            "two for each rank"
        )


def main() -> None:
    try:
        options = tyro.cli(Options, description=__doc__)
        check(options)
        with contextlib.suppress(PermissionError):
            # Others' work must not take the place of the ranks'; real time would starve gloo.
            os.nice(-15)
        results = {
            (model, rate): on_network(options, rate, model)
            for rate in options.networks
            for model in options.models
        }
        finish(report(results, options), options.keep)
    except (NetlabError, GulliverError) as error:
        sys.exit(f"benchmarks.pipeline: {error}")


if __name__ == "__main__":
    main()
