"""Cached tables: hit rates compared with other policies, step time behind a link, exactness.

`python -m benchmarks.embedding` runs all parts in a few minutes on two cores. On a GPU
`python -m benchmarks.embedding --parts tiers --device cuda --rows 4000000 --dim 128
--samples 16384 --ids 26 --cache 0.015 --rate 0` takes the real host link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import tyro

from benchmarks._embedding_rates import Trace, TraceConfig, hit_rate, make_trace
from benchmarks._embedding_tiers import TierConfig, make_jobs, weight_of
from benchmarks._harness import Report, alternate, at_least, at_most, finish

Part = Literal["rates", "tiers"]
PARTS: tuple[Part, ...] = ("rates", "tiers")
SHARES = (0.005, 0.01, 0.015, 0.05)
LAWS = ("the law stays or shifts slowly", "it shifts fast")


@dataclass(frozen=True)
class Options(TierConfig):
    """Options of the benchmark, those of `tiers` among them."""

    parts: tuple[Part, ...] = PARTS  # Parts to run
    rounds: int = 16  # Measured steps of each contestant of `tiers`
    keep: bool = False  # Write the result files


def rates(options: Options) -> None:
    """Hit rates over the size of the cache, of laws that stay and that shift."""
    names = ("LRU", "LFU", "earlier ranks", "hindsight ranks", "all counts, 8")
    names += ("ours, 0", "ours, 8", "ours, 16")
    report = Report(
        "embedding_rates",
        "hit rates of 1600 uses a batch on 400,000 rows; ours with 0, 8, 16 batches of look-ahead",
        ("law", "cache", *names, "floor"),
    )
    margins: dict[str, list[float]] = {
        "LRU and LFU": [],
        f"all counts, {LAWS[0]}": [],
        f"earlier ranks, {LAWS[1]}": [],
    }
    gaps = []
    for shift in (0.0, 2e-5, 2e-4):
        for exponent in (1.05, 1.2):
            config = TraceConfig(exponent=exponent, shift=shift)
            trace, rows = make_trace(config), config.rows
            # Ranks that one can have are those of data from before: the law where it began.
            history = make_trace(replace(config, shift=0.0), draws=1)
            for share in SHARES:
                found = _rates_of(trace, history, rows, int(share * rows), config.batches)
                law = f"{exponent}" + (f", shifts {shift:.0e} a batch" if shift else ", stays")
                report.rows.append((law, f"{share:.1%}", *(f"{r:.1%}" for r in found)))
                ours, floor = found[6], found[-1]
                margins["LRU and LFU"].append(ours - max(found[:2]))
                other = f"earlier ranks, {LAWS[1]}", found[2]
                other = other if shift > 1e-4 else (f"all counts, {LAWS[0]}", found[4])
                margins[other[0]].append(ours - other[1])
                gaps.append(floor - ours)
                report.figures[f"{law}; {share}"] = [round(rate, 4) for rate in found]
    report.bars += [
        at_least(
            f"hit rate with look-ahead 8 minus that of {name}",
            *(min(found), -0.005 if name.startswith("all") else 0.0),
        )
        for name, found in margins.items()
    ]
    report.notes += [
        "floor: Belady's rule with the whole trace announced. earlier ranks: counted on a trace of "
        "the same law, before it shifts. hindsight ranks: counted on the trace itself, which "
        "nobody has beforehand. all counts: exact counts of every row so far, in or out of the "
        "cache, and 8 batches of look-ahead. Ours with 8 batches is "
        f"{max(gaps):.1%} below the floor at most, {sum(gaps) / len(gaps):.1%} in the mean."
    ]
    finish(report, options.keep)


def _rates_of(trace: Trace, history: Trace, rows: int, slots: int, batches: int) -> list[float]:
    return [
        hit_rate(trace, rows, slots, "lru", 0),
        hit_rate(trace, rows, slots, "lfu", 0),
        hit_rate(trace, rows, slots, "dataset", 0, ranked=history),
        hit_rate(trace, rows, slots, "dataset", 0),
        hit_rate(trace, rows, slots, "counts", 8),
        hit_rate(trace, rows, slots, "lookahead", 0),
        hit_rate(trace, rows, slots, "lookahead", 8),
        hit_rate(trace, rows, slots, "lookahead", 16),
        hit_rate(trace, rows, slots, "lookahead", batches),
    ]


def tiers(options: Options) -> None:
    """Step time and the share of fetching that is hidden, behind a link."""
    config, warm = options, 8
    jobs = make_jobs(config, options.rounds + warm + config.ahead)
    times = alternate({name: job.step for name, job in jobs.items()}, options.rounds, warm)
    weights = {name: weight_of(job) for name, job in jobs.items()}
    first = next(iter(weights))
    equal = all(torch.equal(weights[first], weight) for weight in weights.values())
    report = Report(
        "embedding_tiers",
        f"steps of {config.samples} x {config.ids} ids on {config.rows:,} rows of {config.dim}, "
        f"Adagrad; {config.cache:.1%} cached behind "
        + (f"{config.rate / 1e6:.0f} MB/s (slept)" if config.rate else "the host link"),
        ("", "ms a step", "x torch", "hits", "fetching, ms", "waited, ms", "hidden"),
    )
    base = times[first].median
    for name, job in jobs.items():
        ms = 1e3 * times[name].median
        row = [name, f"{ms:.1f}", f"{times[name].median / base:.2f}"]
        store = getattr(job.table, "_store", None)
        if store is None:
            row += ["", "", "", ""]
        else:
            moved, count = store.moved, job.place
            row += [
                f"{job.table.counts.hit_rate:.1%}",  # type: ignore[union-attr]
                f"{1e3 * moved.fetching / count:.1f}",
                f"{1e3 * moved.waiting / count:.1f}",
                f"{moved.hidden:.0%}",
            ]
        report.rows.append(row)
        report.figures[name] = {"ms": ms, "hidden": None if store is None else store.moved.hidden}
    ours, demand = times["cache, look-ahead"].median, times["cache, on demand"].median
    bare = times["no cache, gathered on demand"].median
    report.figures["equal"] = equal
    hidden = float(report.figures["cache, look-ahead"]["hidden"])
    report.bars += [
        at_least("tables after all steps equal torch's bit for bit", float(equal), 1),
        at_least("share of fetch time hidden", hidden, 0.9),
        at_most("look-ahead, of on-demand time", ours / demand, 1.0),
        at_most("look-ahead, of the time without a cache", ours / bare, 0.7),
    ]
    finish(report, options.keep)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    run = {"rates": rates, "tiers": tiers}
    for part in options.parts:
        run[part](options)


if __name__ == "__main__":
    main(tyro.cli(Options))
