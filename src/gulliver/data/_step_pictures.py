"""Steps of data-centric training to look at: a chart of ranks over time, as text and as HTML.

Every group of ranks has a row, and every micro-batch a bar: compute, then what is recomputed of it
and the messages in it, then the wait for the step's last group. `Shares` sums the same over steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from gulliver.data._steps import RankGroup, StepPlan

COLUMNS = 60
"""Characters of a step's longest group."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WIDTH, ROW, LEFT = 760, 22, 90
COLORS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#ee8866", "#999933", "#882255")
SENT, AGAIN, WAIT = "#ee6677", "#bbccee", "#eeeeee"
STYLE = """body{font:15px sans-serif;max-width:1000px;margin:2em auto;color:#222}
table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
svg{display:block;margin:.5em 0}"""


@dataclass(frozen=True)
class Shares:
    """Shares of the ranks' time in steps.

    Attributes:
        seconds: predicted seconds of the steps.
        wait: share in which ranks wait for the last group.
        communication: share in which they wait for messages inside their group.
        recompute: share in which they repeat forwards.
        gap: predicted seconds over the bounds, less 1.
        samples: samples of the steps.
    """

    seconds: float
    wait: float
    communication: float
    recompute: float
    gap: float
    samples: int

    def __str__(self) -> str:
        inside = (
            f"communicate {100 * self.communication:.2f} %, recompute {100 * self.recompute:.2f} %"
        )
        if not self.communication and not self.recompute:
            inside = "messages and recompute are inside compute, the costs do not tell them apart"
        return (
            f"{self.seconds:.4g} s, {_counted(self.samples)}; ranks wait {100 * self.wait:.2f} %, "
            f"{inside}; {100 * self.gap:.2f} % over the bound"
        )


def shares_of(plans: Iterable[StepPlan]) -> Shares:
    """Sums steps."""
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
    return Shares(seconds, 1 - busy / whole, sent / whole, again / whole, gap, samples)


def step_lines(plan: StepPlan, measured: Sequence[float] | None = None) -> list[str]:
    """Draws a step as text, a line for each group.

    Args:
        plan: step.
        measured: seconds that each group took, to lay beside.
    """
    names = _names([plan])
    lines = [f"step {plan.step}: {shares_of([plan])}"]
    longest = plan.seconds or 1.0
    for number, (group, begun) in enumerate(zip(plan.all_groups, _begins(plan), strict=True)):
        bar = " " * round(COLUMNS * begun / longest)
        for batch in group.micro_batches:
            begun += batch.seconds
            letter = LETTERS[names[str(batch.shape)] % len(LETTERS)]
            bar += letter * (round(COLUMNS * begun / longest) - len(bar))
        told = f"{group.seconds:.4g} s"
        if measured is not None:
            told += f", measured {measured[number]:.4g} s"
        lines.append(f"  {_ranks(group):>9} |{bar.ljust(COLUMNS, '.')}| {told}")
    key = ", ".join(f"{LETTERS[n % len(LETTERS)]} {name}" for name, n in names.items())
    return [*lines, f"  {'':>9}  {key}; . waits"] if names else lines


def steps_page(title: str, lines: Sequence[str], plans: Sequence[StepPlan], drawn: int = 8) -> str:
    """Draws steps as one HTML file that needs no other.

    Args:
        title: heading.
        lines: paragraphs to begin with.
        plans: steps; all count in the table of shares.
        drawn: number of first steps that are drawn.
    """
    shown = plans[:drawn]
    names = _names(shown)
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    parts.append(f"<p>All {len(plans):,} steps: {escape(str(shares_of(plans)))}</p>")
    parts += [_legend(names)]
    for plan in shown:
        parts.append(f"<h2>Step {plan.step}</h2><p>{escape(str(shares_of([plan])))}</p>")
        parts.append(_chart(plan, names))
    parts += ["<h2>Steps</h2>", _table(plans)]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )


def _counted(samples: int) -> str:
    return f"{samples:,} sample{'s' * (samples != 1)}"


def _names(plans: Iterable[StepPlan]) -> dict[str, int]:
    found = sorted({str(batch.shape) for plan in plans for _, batch in plan})
    return {name: number for number, name in enumerate(found)}


def _ranks(group: RankGroup) -> str:
    first, last = group.ranks[0], group.ranks[-1]
    return f"rank {first}" if first == last else f"{first} to {last}"


def _chart(plan: StepPlan, names: dict[str, int]) -> str:
    scale = (WIDTH - LEFT) / (plan.seconds or 1.0)
    drawn, begins = [], _begins(plan)
    ends = [next((b for b in begins if b > begun), plan.seconds) for begun in begins]
    for number, (group, begun) in enumerate(zip(plan.all_groups, begins, strict=True)):
        y, at = ROW * number, begun
        drawn.append(f'<text x="0" y="{y + 14}" font-size="12">{_ranks(group)}</text>')
        for batch in group.micro_batches:
            name = str(batch.shape)
            told = f"{name}: {_counted(len(batch.samples))}, {batch.seconds:.4g} s"
            if batch.communication or batch.recomputing:
                told += (
                    f", of that messages {batch.communication:.3g} s and recompute "
                    f"{batch.recomputing:.3g} s ({batch.recompute} blocks)"
                )
            if batch.bytes >= 2**20:  # less are those of a table that counts in tokens
                told += f", {batch.bytes / 2**30:.3g} GiB"
            color = COLORS[names[name] % len(COLORS)]
            plain = batch.seconds - batch.communication - batch.recomputing
            for seconds, fill in (
                (plain, color),
                (batch.recomputing, AGAIN),
                (batch.communication, SENT),
            ):
                drawn.append(_bar(LEFT + scale * at, y, scale * seconds, fill, told))
                at += seconds
        wait = ends[number] - at
        told = f"waits {max(0.0, wait):.4g} s"
        drawn.append(_bar(LEFT + scale * at, y, max(0.0, scale * wait), WAIT, told))
    return _svg(ROW * len(plan.all_groups), drawn)


def _begins(plan: StepPlan) -> list[float]:
    """Seconds at which each group begins, as if each phase began when the last one had ended."""
    found, begun = [], 0.0
    for phase in plan.phases:
        found += [begun] * len(phase)
        begun += max(group.seconds for group in phase)
    return found


def _bar(x: float, y: float, width: float, fill: str, told: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 5}" fill="{fill}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _legend(names: dict[str, int]) -> str:
    kinds = [("messages", SENT), ("recompute", AGAIN), ("wait", WAIT)]
    kinds += [(name, COLORS[number % len(COLORS)]) for name, number in names.items()]
    drawn = []
    for number, (name, fill) in enumerate(kinds):
        x, y = 150 * (number % 5), ROW * (number // 5)
        drawn.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/>')
        drawn.append(f'<text x="{x + 16}" y="{y + 11}" font-size="12">{escape(name)}</text>')
    return _svg(ROW * (1 + (len(kinds) - 1) // 5), drawn)


def _table(plans: Sequence[StepPlan]) -> str:
    heads = ("step", "groups", "samples", "seconds", "bound", "wait", "messages", "recompute")
    rows = []
    for plan in plans:
        told = shares_of([plan])
        degrees = " + ".join(str(group.degree) for group in plan.all_groups if group.micro_batches)
        shares = (told.wait, told.communication, told.recompute)
        row = (plan.step, degrees, plan.samples, f"{plan.seconds:.4g}", f"{plan.bound:.4g}")
        rows.append([*map(str, row), *(f"{100 * share:.2f} %" for share in shares)])
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _svg(height: int, drawn: Sequence[str]) -> str:
    return f'<svg width="{WIDTH}" height="{height}" role="img">' + "".join(drawn) + "</svg>"
