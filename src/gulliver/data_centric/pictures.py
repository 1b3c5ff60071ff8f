"""Draws data-centric steps as text charts of ranks over time.

Every group of ranks has a line with a bar per micro-batch, followed by the wait for the step's last
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gulliver.data_centric.steps import RankGroup, StepPlan

COLUMNS = 60  # width of a step's longest group, in characters
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Shares:
    """How ranks spend their time, over several steps."""

    # Predicted seconds of the steps.
    seconds: float
    # Fraction of the time in which ranks wait for the last group.
    wait: float
    # Fraction in which they wait for messages inside their group.
    communication: float
    # Fraction in which they recompute forwards.
    recompute: float
    # Predicted seconds relative to the bounds, minus 1.
    gap: float
    # Number of samples.
    samples: int

    def __str__(self) -> str:
        # Tables of seconds do not break them down.
        inside = ""
        if self.communication or self.recompute:
            inside = (
                f", communicate {100 * self.communication:.2f} %, "
                f"recompute {100 * self.recompute:.2f} %"
            )
        return (
            f"{self.seconds:.4g} s, {_counted(self.samples)}; ranks wait {100 * self.wait:.2f} %"
            f"{inside}; {100 * self.gap:.2f} % over the bound"
        )


def shares_of(plans: Iterable[StepPlan]) -> Shares:
    seconds = whole = busy = sent = again = bound = 0.0
    samples = 0
    for plan in plans:
        seconds += plan.seconds
        whole += plan.ranks * plan.seconds
        bound += plan.bound
        samples += plan.samples
        for group, batch in plan:
            busy += group.degree * batch.seconds
            sent += group.degree * batch.communication
            again += group.degree * batch.recomputing
    whole = whole or 1.0
    gap = seconds / bound - 1 if bound else 0.0
    parts = (sent / whole, again / whole, gap, samples)
    return Shares(seconds, max(0.0, 1 - busy / whole), *parts)


def step_lines(plan: StepPlan, measured: Sequence[float] | None = None) -> list[str]:
    """Draws a step as text, one line per group."""
    names = _names([plan])
    lines = [f"step {plan.step}: {shares_of([plan])}"]
    longest = plan.seconds or 1.0
    for number, (group, begun) in enumerate(zip(plan.all_groups, _begins(plan), strict=True)):
        bar = " " * round(COLUMNS * begun / longest)
        for batch in group.micro_batches:
            begun += batch.seconds
            letter = LETTERS[names[str(batch.shape)] % len(LETTERS)]
            bar += letter * (round(COLUMNS * begun / longest) - len(bar))
        label = f"{group.seconds:.4g} s"
        if measured is not None:
            label += f", measured {measured[number]:.4g} s"
        lines.append(f"  {_ranks(group):>9} |{bar.ljust(COLUMNS, '.')}| {label}")
    key = ", ".join(f"{LETTERS[n % len(LETTERS)]} {name}" for name, n in names.items())
    return [*lines, f"  {'':>9}  {key}; . waits"] if names else lines


def _counted(samples: int) -> str:
    return f"{samples:,} sample{'s' * (samples != 1)}"


def _names(plans: Iterable[StepPlan]) -> dict[str, int]:
    found = sorted({str(batch.shape) for plan in plans for _, batch in plan})
    return {name: number for number, name in enumerate(found)}


def _ranks(group: RankGroup) -> str:
    first, last = group.ranks[0], group.ranks[-1]
    return f"rank {first}" if first == last else f"{first} to {last}"


def _begins(plan: StepPlan) -> list[float]:
    """Start times of groups, assuming that each phase starts when the previous one ends."""
    found, begun = [], 0.0
    for phase in plan.phases:
        found += [begun] * len(phase)
        begun += max(group.seconds for group in phase)
    return found
