"""Data-centric training of small models on this machine's processors and shaped links."""

from __future__ import annotations

import itertools
import statistics
import sys
from dataclasses import asdict, dataclass

import tyro

from benchmarks._data_centric_ranks import LONGEST, run_workloads, workload
from benchmarks._harness import Report, at_least, at_most, finish
from benchmarks.netlab import LoadMeter, Net, run


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: tuple[int, ...] = (2, 4)  # numbers of ranks
    models: tuple[str, ...] = ("llama", "stdit")  # models
    # what dominates the samples: short ones, or long ones
    dominated: tuple[str, ...] = ("short", "long")
    rounds: int = 2  # epochs of each planner
    keep: bool = False  # write the result file


def main(options: Options) -> None:
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
            short += [min(pairs.values()) / min(most, 1.4)] if dominated == "short" else []
            error = statistics.median(abs(ratio - 1) for ratio in one.ratios)
            errors.append(error)
            figures = {"measured over predicted": one.ratios, "ends": asdict(one.ends)}
            figures |= {"any plan over the fixed degree, predicted": most}
            report.figures[place] = {"ours over": pairs, "step error": error, **figures}
    report.bars = [
        *(
            [
                at_least(
                    "ours over the better other, of the most that any plan gains", min(short), 0.97
                )
            ]
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
    finish(report, options.keep)


RATES = {2: "600mbit", 4: "300mbit"}
"""By ranks: two cores are shared, so that four ranks compute half as fast each."""

if __name__ == "__main__":
    main(tyro.cli(Options))
