"""Policies of sharing a cluster, simulated on drawn traces: completion times and a lower bound.

All policies on four kinds of traces. Nothing is timed, and the same seeds give the same figures.
`--real ray` runs eight jobs instead, and compares them with their simulation (about 7 minutes).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import tyro

from benchmarks import _schedule_real
from benchmarks._harness import Report, at_least, at_most, finish
from gulliver.schedule import Policy, Rollout, Summary, generate, simulate
from gulliver.schedule.policies import make_policy

OURS = "rollout"
KINDS = ("steady", "heavy-tail", "bursts", "fixed-batch")
GAIN = 0.8  # What ours should be at most of the best other one
POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: partial(make_policy, name) for name in ("fifo", "srpt", "tiresias", "pollux")},
    OURS: Rollout,
}
COLUMNS = (
    "trace", "policy", "mean s", "median s", "p95 s", "waits s", "makespan s", "slot hours",
    "resizes", "x bound", "of ours",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    seeds: int = 10  # Traces of each kind
    processes: int = 2  # Processes that simulate
    real: Literal["ray", "here"] | None = None  # Where to run real jobs
    rounds: int = 3  # Rounds of real jobs
    keep: bool = False  # Write the result files


Found = dict[str, list[Summary]]


def one(trace: str, seed: int, policy: str) -> tuple[Summary, float]:
    """Simulates a policy on a trace; with it the mean gap of its plans to their bound."""
    jobs, cluster = generate(trace, seed)
    result = simulate(jobs, cluster, POLICIES[policy]())
    return result.summary(), statistics.fmean(result.gaps or [0.0])


def gather(options: Options) -> dict[str, tuple[Found, float]]:
    """Simulates traces of all seeds; with them the mean gap of ours."""
    seeds = range(options.seeds)
    keys = [(trace, seed, name) for trace in KINDS for seed in seeds for name in POLICIES]
    with ProcessPoolExecutor(options.processes) as pool:
        found = pool.map(one, *zip(*keys, strict=True))
        done = dict(zip(keys, found, strict=True))
    return {
        trace: (
            {name: [done[trace, seed, name][0] for seed in seeds] for name in POLICIES},
            statistics.fmean(done[trace, seed, OURS][1] for seed in seeds),
        )
        for trace in KINDS
    }


def mean_of(found: list[Summary]) -> float:
    """Mean completion time over all seeds."""
    return statistics.fmean(summary.mean for summary in found)


def rows_of(trace: str, found: Found) -> list[tuple[str, ...]]:
    """Lines of the table: means over the seeds, and the median of the ratio to ours."""
    rows = []
    for name, every in found.items():
        means = [statistics.fmean(values) for values in zip(*every, strict=True)]
        part = dict(zip(Summary._fields, means, strict=True))
        ratio = statistics.median(a.mean / b.mean for a, b in zip(every, found[OURS], strict=True))
        columns = ("mean", "median", "p95", "wait", "makespan")
        rows.append(
            (
                trace,
                name,
                *(f"{part[key]:.0f}" for key in columns),
                f"{part['gpu_hours']:.1f}",
                f"{part['resizes']:.0f}",
                f"{part['to_bound']:.2f}",
                f"{ratio:.2f}",
            )
        )
    return rows


def main(options: Options) -> None:
    if options.real is not None:
        finish(_schedule_real.report_of(options.real, ("fifo", OURS), options.rounds), options.keep)
        return
    report = Report(
        "schedule_kinds",
        f"60 jobs on 16 slots, means of {options.seeds} traces of each kind, simulated",
        COLUMNS,
    )
    lowest = []
    for trace, (found, gap) in gather(options).items():
        report.rows += rows_of(trace, found)
        others = {name: mean_of(every) for name, every in found.items() if name != OURS}
        best, ours = min(others, key=others.__getitem__), mean_of(found[OURS])
        report.figures[trace] = {**others, OURS: ours, "gap": gap}
        report.bars.append(
            at_most(f"{trace}: mean of ours, of the best other", ours / others[best], GAIN)
        )
        lowest += [summary.to_bound for every in found.values() for summary in every]
        room = statistics.fmean(
            b.mean / b.to_bound / a.mean for a, b in zip(found[best], found[OURS], strict=True)
        )
        report.notes.append(
            f"{trace}: the best other is {best}; the bound, which no schedule is below, is "
            f"{room:.0%} of its mean in the mean of the traces. Plans of ours were {gap:.0%} above "
            "the closed-form bound of their round in the mean."
        )
    report.bars.append(at_least("mean completion over the bound, least of all", min(lowest), 1.0))
    report.notes.append(
        "All lengths are announced. srpt knows them too; fifo, srpt and tiresias keep the slots "
        "that jobs ask for; pollux is asked at every arrival and end, besides its rounds."
    )
    finish(report, options.keep)


if __name__ == "__main__":
    main(tyro.cli(Options))
