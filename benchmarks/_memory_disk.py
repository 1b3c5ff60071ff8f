"""Seconds of a step on a shaped disk, predicted before it runs, beside those measured.

The disk is shaped to two rates for what goes past the page cache. Settings are limits, tokens of a
step, rates and whether the optimizer steps in backward. The prediction comes from the plan, with a
batch measured by the same process and a disk measured in the same group. Of the settings that are
left open, the one with the shortest predicted step would be chosen: it is held against the one that
is the fastest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks._harness import Report, at_least, at_most
from benchmarks._memory_headline import STATE_BYTES, Scale, rates_of
from benchmarks._memory_jobs import GB, MB, MIB, PREDICT, Job, Ledger, Outcome, run

ERROR_BAR, CHOICE_BAR, LEAST_SETTINGS = 0.15, 1.05, 12
RATES = (500 * MB, 2 * GB)
LIMITS = (0.4, 0.7)
"""Limits as shares of the model's states."""
OPEN = (True, False)
"""Whether the optimizer steps in backward, which a user leaves to the plan."""


@dataclass(frozen=True)
class Grid:
    """Sizes of a run.

    Attributes:
        scale: the model; its limit is not used.
        constant: bytes beside the limit, for the interpreter and torch.
        tokens: tokens of a step.
        steps: timed steps.
    """

    scale: Scale
    constant: int
    tokens: tuple[int, ...]
    steps: int

    def jobs(self, folder: Path) -> list[Job]:
        """All settings."""
        found, states = [], STATE_BYTES * self.scale.parameters
        for share, tokens, rate, early in product(LIMITS, self.tokens, RATES, OPEN):
            limit = int(share * states) // MIB * MIB + self.constant
            options = {"constant": self.constant, "step_in_backward": early}
            job = replace(self.scale.job(tokens, folder), limit=limit, rate=rate, options=options)
            found.append(replace(job, steps=self.steps, warm_up=WARM_UP, recompute=False))
        return found


CONSTANT = 384 * MIB
WARM_UP = 5
"""Steps before those that are timed: budgets, and so what moves, are alike from then on."""
SMALL = Grid(Scale(512, 12, 0, (), 0, 2, 120.0), CONSTANT, (64, 256), 4)
FULL = Grid(Scale(1024, 12, 0, (), 0, 3, 600.0), CONSTANT, (64, 256, 1024), 3)


def report(grid: Grid, folder: Path, ledger: Ledger, say: Callable[[str], None]) -> Report:
    """Predicted and measured seconds of every setting."""
    jobs = grid.jobs(folder)
    predicted_s = predictions(grid, jobs, ledger, say)
    found = [(job, run(job, ledger, say)) for job in jobs]
    made = Report(
        "memory-disk",
        f"A step of a GPT of {grid.scale.parameters / 1e6:,.0f} M parameters on a shaped disk",
        ("limit MiB", "tokens", "disk MB/s", "in backward", "measured s", "predicted s", "error"),
    )
    errors = []
    for job, outcome in found:
        predicted = predicted_s.get(job.key)
        cells = [
            f"{(job.limit - grid.constant) / MIB:.0f}",
            str(job.tokens),
            f"{job.rate / MB:.0f}",
            "yes" if job.options["step_in_backward"] else "no",
        ]
        if not outcome.ran or predicted is None:
            made.rows.append([*cells, f"{outcome.end}: {outcome.told}", "", ""])
            continue
        errors.append(abs(predicted / outcome.seconds - 1))
        times = [f"{outcome.seconds:.3f}", f"{predicted:.3f}"]
        made.rows.append([*cells, *times, f"{predicted / outcome.seconds - 1:+.0%}"])
        made.figures[" ".join(cells)] = {"measured_s": outcome.seconds, "predicted_s": predicted}
    made.bars.append(at_least("settings predicted and measured", len(errors), LEAST_SETTINGS))
    if errors:
        median = statistics.median(errors)
        made.bars.append(at_most("median error of the prediction", median, ERROR_BAR))
    chosen = chosen_over_best(found, predicted_s)
    if chosen:
        made.bars.append(at_most("chosen setting / fastest, worst", max(chosen), CHOICE_BAR))
    made.notes = [
        "Rates are those of the kernel's throttle, for reads and writes each, so that below the "
        "disk's own both go on at once. This machine's disk does about 1.5 to 2 GB/s in all, which "
        "reads and writes share: the throttle of 2 GB/s hardly binds. So reading, writing and both "
        "at once are measured before each prediction.",
        "Chosen: of the settings with and without the optimizer's step in backward, at the same "
        "limit, tokens and rate, the one that is predicted to be faster.",
    ]
    return made


def predictions(
    grid: Grid, jobs: Sequence[Job], ledger: Ledger, say: Callable[[str], None]
) -> dict[str, float]:
    """Predicted seconds by a job's key; settings of the same tokens and rate share a process."""
    found: dict[str, float] = {}
    for tokens, rate in dict.fromkeys((job.tokens, job.rate) for job in jobs):
        alike = [job for job in jobs if (job.tokens, job.rate) == (tokens, rate)]
        rates = rates_of(alike[0], ledger, say)
        settings = {
            job.key: [job.limit - grid.constant, job.options["step_in_backward"]] for job in alike
        }
        options = {
            "settings": list(settings.values()),
            **vars(rates),
        }
        asked = replace(alike[0], contestant=PREDICT, limit=0, steps=0, warm_up=0, options=options)
        facts = run(asked, ledger, say).facts
        for key, (limit, early) in settings.items():
            if (seconds := facts.get(f"{limit} {early}")) is not None:
                found[key] = seconds
    return found


def chosen_over_best(
    found: Sequence[tuple[Job, Outcome]], predicted_s: dict[str, float]
) -> list[float]:
    """Measured seconds of the setting that is predicted fastest, over those of the fastest."""
    groups: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for job, outcome in found:
        predicted = predicted_s.get(job.key)
        if outcome.ran and predicted is not None:
            key = (job.limit, job.tokens, job.rate)
            groups.setdefault(key, []).append((predicted, outcome.seconds))
    return [min(g)[1] / min(s for _, s in g) for g in groups.values() if len(g) > 1]
