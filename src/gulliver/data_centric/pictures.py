"""Steps of data-centric training to look at: a chart of ranks over time, as text and as HTML.

Every group of ranks has a row, and every micro-batch a bar: compute, then what is recomputed of it
and the messages in it, then the wait for the step's last group. `Shares` sums the same over steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from gulliver.data_centric.steps import RankGroup, StepPlan

COLUMNS = 60
"""Characters of a step's longest group."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WIDTH, ROW, LEFT = 760, 22, 90
COLORS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#ee8866", "#999933", "#882255")
SENT, AGAIN, WAIT = "#ee6677", "#bbccee", "#eeeeee"
PARTS = ("communication", "recompute")
STYLE = """body{font:15px sans-serif;max-width:1000px;margin:2em auto;color:#222}
table{border-collapse:collapse}
td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
svg{display:block;margin:.5em 0}"""


@dataclass(frozen=True)
class Shares:
    """Shares of the ranks' time in steps."""

    # Predicted seconds of the steps.
    seconds: float
    # Share in which ranks wait for the last group.
    wait: float
    # Share in which they wait for messages inside their group.
    communication: float
    # Share in which they repeat forwards.
    recompute: float
    # Predicted seconds over the bounds, less 1.
    gap: float
    # Samples of the steps.
    samples: int
    # Parts of the seconds that the costs tell of: ``communication``, ``recompute``; None: both,
    # where there is any of one.
    known: tuple[str, ...] | None = None

    def __str__(self) -> str:
        inside = "messages and recompute are inside compute, the costs do not tell them apart"
        if self.known or (self.known is None and (self.communication or self.recompute)):
            parts = {"communicate": "communication", "recompute": "recompute"}
            inside = ", ".join(f"{word} {self.percent(name)}" for word, name in parts.items())
        return (
            f"{self.seconds:.4g} s, {_counted(self.samples)}; ranks wait {100 * self.wait:.2f} %, "
            f"{inside}; {100 * self.gap:.2f} % over the bound"
        )

    def percent(self, part: str) -> str:
        """A part's share in words."""
        return (
            f"{100 * getattr(self, part):.2f} %" if part in (self.known or PARTS) else "not known"
        )


def shares_of(plans: Iterable[StepPlan], known: tuple[str, ...] | None = None) -> Shares:
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
    parts = (sent / whole, again / whole, gap, samples)
    return Shares(seconds, max(0.0, 1 - busy / whole), *parts, known)


def step_lines(
    plan: StepPlan,
    measured: Sequence[float] | None = None,
    known: tuple[str, ...] | None = None,
) -> list[str]:
    """Draws a step as text, a line for each group."""
    names = _names([plan])
    lines = [f"step {plan.step}: {shares_of([plan], known)}"]
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


def steps_page(
    title: str,
    lines: Sequence[str],
    plans: Sequence[StepPlan],
    drawn: int = 8,
    known: tuple[str, ...] | None = None,
) -> str:
    """Draws steps as one HTML file that needs no other."""
    shown = plans[:drawn]
    names = _names(shown)
    parts = [f"<p>{escape(line)}</p>" for line in lines]
    parts.append(f"<p>All {len(plans):,} steps: {escape(str(shares_of(plans, known)))}</p>")
    parts += [_legend(names)]
    for plan in shown:
        parts.append(f"<h2>Step {plan.step}</h2><p>{escape(str(shares_of([plan], known)))}</p>")
        parts.append(_chart(plan, names))
    parts += ["<h2>Steps</h2>", _table(plans, known)]
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
            label = f"{name}: {_counted(len(batch.samples))}, {batch.seconds:.4g} s"
            if batch.communication or batch.recomputing:
                label += (
                    f", of that messages {batch.communication:.3g} s and recompute "
                    f"{batch.recomputing:.3g} s ({batch.recompute} blocks)"
                )
            if batch.bytes >= 2**20:  # less are those of a table that counts in tokens
                label += f", {batch.bytes / 2**30:.3g} GiB"
            color = COLORS[names[name] % len(COLORS)]
            plain = batch.seconds - batch.communication - batch.recomputing
            for seconds, fill in (
                (plain, color),
                (batch.recomputing, AGAIN),
                (batch.communication, SENT),
            ):
                drawn.append(_bar(LEFT + scale * at, y, scale * seconds, fill, label))
                at += seconds
        wait = ends[number] - at
        label = f"waits {max(0.0, wait):.4g} s"
        drawn.append(_bar(LEFT + scale * at, y, max(0.0, scale * wait), WAIT, label))
    return _svg(ROW * len(plan.all_groups), drawn)


def _begins(plan: StepPlan) -> list[float]:
    """Seconds at which each group begins, as if each phase began when the last one had ended."""
    found, begun = [], 0.0
    for phase in plan.phases:
        found += [begun] * len(phase)
        begun += max(group.seconds for group in phase)
    return found


def _bar(x: float, y: float, width: float, fill: str, label: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 5}" fill="{fill}">'
        f"<title>{escape(label)}</title></rect>"
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


def _table(plans: Sequence[StepPlan], known: tuple[str, ...] | None) -> str:
    heads = ["step", "groups", "samples", "seconds", "bound", "wait", "messages", "recompute"]
    rows = []
    for plan in plans:
        label = shares_of([plan], known)
        degrees = " + ".join(str(group.degree) for group in plan.all_groups if group.micro_batches)
        row = [str(plan.step), degrees, str(plan.samples)]
        row += [f"{plan.seconds:.4g}", f"{plan.bound:.4g}", f"{100 * label.wait:.2f} %"]
        row += [label.percent("communication"), label.percent("recompute")]
        rows.append(row)
    head = "".join(f"<th>{name}</th>" for name in heads)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _svg(height: int, drawn: Sequence[str]) -> str:
    return f'<svg width="{WIDTH}" height="{height}" role="img">' + "".join(drawn) + "</svg>"
