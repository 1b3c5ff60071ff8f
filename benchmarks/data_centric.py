"""Data-centric training: planners replayed over tables of costs, ours beside those published.

`replay` reads the table of costs of a video transformer and three distributions of shapes, on 8, 16
and 32 devices: bucketing, DCP-intra, DCP-inter, DCP-inter + PAC as published, and ours, every one
on the same table. Ours runs with as many samples a step as DCP-inter takes, and again with as few
as bucketing. Nothing is run on devices there: all seconds are the table's. `measured` (asked for
with ``--parts measured``) trains small models on processors of this machine and shaped links.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import tyro

from benchmarks._data_centric_costs import video_costs
from benchmarks._data_centric_ranks import LONGEST, run_workloads, workload
from benchmarks._data_published import (
    METHODS,
    PUBLISHED,
    PUBLISHED_IMBALANCE,
    Replayed,
    replay_ours,
    replay_published,
)
from benchmarks._harness import Report, at_least, at_most, finish
from gulliver.data import Tokens
from gulliver.data_centric.costs import DISTRIBUTIONS, draw_shapes, least_time

DEVICES = (8, 16, 32)
MOST_IMBALANCE = {8: 0.01, 16: 0.015, 32: 0.015}
COLUMNS = (
    "distribution, devices",
    "planner",
    "x bucketing",
    "published (32)",
    "imbalance",
    "published",
    "dropped",
    "effective weight",
    "samples/step",
    "gap",
    "100k planned, processor",
    "by the clock",
)


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    parts: tuple[str, ...] = ("replay",)  # parts to run
    samples: int = 100_000  # samples of an epoch
    seed: int = 0  # seed of all draws
    ranks: tuple[int, ...] = (2, 4)  # numbers of ranks of the measured part
    models: tuple[str, ...] = ("llama", "stdit")  # models of the measured part
    # what dominates the samples there: short ones, or long ones
    dominated: tuple[str, ...] = ("short", "long")
    rounds: int = 2  # epochs of each planner there
    keep: bool = False  # write the result file


def main(options: Options) -> None:
    for part in options.parts:
        report = PARTS[part](options)
        finish(report, options.keep)


def replay(options: Options) -> Report:
    """All planners over the video table."""
    report = Report("data-centric-replay", "Planners over the same table of costs", COLUMNS)
    costs = video_costs()
    speeds: dict[str, list[float]] = {name: [] for name in METHODS}
    waits: dict[int, list[float]] = {devices: [] for devices in DEVICES}
    planned, unused = 0.0, 0
    for distribution in DISTRIBUTIONS:
        shapes = draw_shapes(costs, distribution, options.samples, options.seed)
        tokens = sum(map(costs.tokens, shapes))
        for devices in DEVICES:
            place = f"{distribution}, {devices}"
            theirs = [replay_published(m, costs, shapes, devices, options.seed) for m in METHODS]
            theirs = [one for one in theirs if one.steps]
            ours = [
                replay_ours(costs, shapes, devices, _budget(one, tokens, shapes), f"as {one.name}")
                for one in theirs
            ]
            for one in [*theirs, *ours]:
                report.rows.append(_row(place, one, theirs[0], options, devices))
            limit = tokens / least_time(costs, shapes, devices) / theirs[0].speed
            report.rows.append((place, "no plan above", f"{limit:.2f}", *("",) * 9))
            found = {one.name: _figures(one, theirs[0]) for one in [*theirs, *ours]}
            report.figures[place] = {**found, "limit": limit}
            for peer, one in zip(theirs, ours, strict=True):
                speeds[peer.name].append(one.speed / peer.speed)
                unused += one.dropped
                planned = max(planned, one.planning * 1e5 / options.samples)
                if one.name.startswith("as inter"):
                    waits[devices].append(one.imbalance)
    report.bars = [
        *(
            at_least(f"ours, as {name}, over {name}, worst row", min(speeds[name]), 1.0)
            for name in METHODS
        ),
        *(
            at_most(f"imbalance, {n} devices, worst row", max(waits[n]), MOST_IMBALANCE[n])
            for n in DEVICES
        ),
        at_most("samples never used", unused, 0),
        at_most("processor seconds to plan 100,000 samples, worst row", planned, 1.0),
    ]
    report.notes = list(NOTES)
    return report


NOTES = (
    "'as X' is ours with as many steps, and so as many samples in the mean one, as X takes: of "
    "samples as they arrive, each shape in lots. Bars of imbalance are of 'as inter' and 'as "
    "inter+pac'. A planner without a row has dropped all samples: no bucket held what one step "
    "accumulates.",
    "Samples a step: the mean, and in brackets those of small and of large steps, one in twenty of "
    "which has fewer or more. Steps of all are of about equal work, not of equal samples.",
    "Published speed-ups are over bucketing on 32 H100s, from another table: in this one large "
    "batches lose little at degree 4, so no plan can reach them here (rows 'no plan above').",
    "Effective weight: share of a step's samples whose plain mean had the variance of the weighted "
    "one, and the largest weight over the smallest. Imbalance: ranks' time in which they wait, of "
    "all steps. Gap: over the bound of each step.",
)


def _budget(one: Replayed, tokens: int, shapes: Sequence[str]) -> Tokens:
    """A step's tokens with which ours has as many steps of this epoch, and samples in each."""
    return Tokens(round(tokens * one.step_samples / len(shapes)))


def _row(
    place: str, one: Replayed, base: Replayed, options: Options, devices: int
) -> tuple[str, ...]:
    told = PUBLISHED[place.split(",")[0]].get(one.name)  # type: ignore[index, call-overload]
    waits = PUBLISHED_IMBALANCE.get(one.name)  # type: ignore[call-overload]
    return (
        place,
        one.name,
        f"{one.speed / base.speed:.2f}" if one.seconds else "-",
        f"{told:.2f}" if told else "",
        f"{100 * one.imbalance:.2f} %",
        f"{100 * waits[DEVICES.index(devices)]:.1f} %" if waits else "",
        f"{one.dropped:,} ({100 * one.dropped / options.samples:.0f} %)",
        f"{one.effective:.2f}, {one.spread:,.0f} x",
        f"{one.step_samples:,.0f} ({one.few:,.0f} to {one.many:,.0f})",
        "" if one.gap is None else f"{100 * one.gap:.1f} %",
        f"{one.planning * 1e5 / options.samples:.2f} s",
        f"{one.wall * 1e5 / options.samples:.2f} s",
    )


def _figures(one: Replayed, base: Replayed) -> dict[str, float | None]:
    return {
        "speed": one.speed / base.speed,
        "imbalance": one.imbalance,
        "dropped": one.dropped,
        "step_samples": one.step_samples,
        "small_step": one.few,
        "large_step": one.many,
        "gap": one.gap,
        "planning_s": one.planning,
        "planning_wall_s": one.wall,
    }


def measured(options: Options) -> Report:
    """Small models trained on shaped links, under each planner in turn."""
    from benchmarks.netlab import LoadMeter, Net, run

    columns = (
        "model, samples, ranks",
        "planner",
        "samples/s",
        "over ours",
        "predicted",
        "imbalance",
        "samples/step",
    )
    report = Report("data-centric-measured", "Uneven samples on shaped links", columns)
    errors, slowest, short = [], [], []
    meter = LoadMeter()
    for ranks, model in itertools.product(options.ranks, options.models):
        works = [workload(model, kind == "short", ranks) for kind in options.dominated]
        with Net(ranks, RATES[ranks]) as net:
            found = run(run_workloads, net, works, options.rounds)[0]
        for dominated, one in zip(options.dominated, found, strict=True):
            place = f"{model}, {dominated} dominated, {ranks}"
            ours = statistics.median(one.speeds["ours"])
            for name, speeds in one.speeds.items():
                middle = statistics.median(speeds)
                row = (f"{middle:.1f}", f"{middle / ours:.2f}", f"{one.predicted[name]:.1f}")
                row += (f"{one.imbalance[name]:.1%}", f"{one.step[name]:.1f}")
                report.rows.append((place, name, *row))
                print(*report.rows[-1], sep=", ", file=sys.stderr, flush=True)
            share = one.limit / one.predicted["ours"]
            told = ("", f"{share:.2f}", f"{one.limit:.1f}", "", "")
            report.rows.append((place, "no plan above", *told))
            most = one.limit / one.predicted["fixed degree, packed"]
            # Rounds are compared with themselves; what ran in the first only, with that.
            pairs = {
                name: statistics.median(a / b for a, b in zip(one.speeds["ours"], speeds))  # noqa: B905
                for name, speeds in one.speeds.items()
                if name != "ours"
            }
            slowest.append(min(pairs.values()))
            short += [min(pairs.values())] if dominated == "short" else []
            error = statistics.median(abs(ratio - 1) for ratio in one.ratios)
            errors.append(error)
            figures = {"measured over predicted": one.ratios, "ends": asdict(one.ends)}
            figures |= {"any plan over the fixed degree, predicted": most}
            report.figures[place] = {"ours over": pairs, "step error": error, **figures}
    report.bars = [
        *(
            [at_least("ours over the better other, short dominated, least row", min(short), 1.4)]
            if short
            else []
        ),
        at_least("ours over the better other, least row", min(slowest), 1.0),
        at_most("step time predicted, median error, worst row", max(errors), 0.15),
    ]
    rates = ", ".join(f"{RATES[ranks]} for {ranks} ranks" for ranks in options.ranks)
    report.notes = [
        f"Links of {rates}, a namespace for each rank: with them a message takes as much of the "
        "time of what is computed as in Open-Sora's 1.1B (1,152 dims, 2 bytes each) on four "
        "RTX 4090 at half of their rate, for 192 dims of 4 bytes and some 45 GFLOP/s of a core. "
        f"Other programs took {meter.cores():.1f} cores meanwhile. More ranks than cores share "
        "them.",
        f"The longest sample has {LONGEST:,} tokens, and a rank room for a quarter more than its "
        "share of it over all ranks: the fixed degree is all ranks, as the longest sample needs. "
        "'bucketing' runs one micro-batch of one shape a step, and so updates more often, and runs "
        "in the first round only; 'fixed degree, packed' has equal samples a step as ours. "
        "'No plan above': the bounds of our steps, by the costs that were measured; next to the "
        "fixed degree's predicted samples/s it says what can be gained at all. "
        "Predicted: with what gradients, update and arriving parameters take at the ends of a "
        "step, measured once. Short dominated: 56, 30, 13 and 1 % of the samples have 64, 128, 256 "
        "and 2,048 tokens; long dominated: 10, 20, 40 and 30 %.",
    ]
    return report


RATES = {2: "600mbit", 4: "300mbit"}
"""By ranks: two cores are shared, so that four ranks compute half as fast each."""
PARTS = {"replay": replay, "measured": measured}

if __name__ == "__main__":
    main(tyro.cli(Options))
