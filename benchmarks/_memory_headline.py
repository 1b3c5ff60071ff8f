"""A GPT whose states are more than twice the limit: everyone at one size of step, ours at several.

*headline*: every contestant in a control group of the same limit, and the plain loop without one.
*curve*: ours and the resident run over tokens of a step, for what a step computes grows with its
tokens, and what it moves does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks._harness import Bar, Report, free_memory
from benchmarks._memory_jobs import (
    DEEPSPEED_CPU,
    DEEPSPEED_DISK,
    DISK,
    FSDP2,
    GB,
    GEMINI,
    GIB,
    MIB,
    PLAIN,
    SWAP,
    Job,
    Ledger,
    Outcome,
    alone,
    run,
)
from benchmarks._memory_report import (
    COLUMNS,
    Beside,
    Rates,
    figures,
    limit_bars,
    loss_bar,
    row,
    scale_of,
    speed_bars,
    swap_bar,
)
from benchmarks._models import gpt
from benchmarks.limits import LimitsError

CONSTANT = 384 * MIB
"""What the interpreter, torch and its threads need beside tensors: the limit that ours is told is
the group's, less this."""
BLOCK_FLOATS = 16
"""Floats of activations of a block for each token and element of width, kept for backward."""
KEPT_SHARE = 0.25
"""Share of the limit that activations may take before blocks are recomputed, for all alike."""
STATE_BYTES = 16
LENGTH = 512


@dataclass(frozen=True)
class Scale:
    """Sizes of a run."""

    width: int  # width of the GPT
    depth: int  # number of its blocks
    limit: int  # bytes of the control group
    tokens: tuple[int, ...]  # tokens of a step, along the curve
    headline: int  # tokens of a step where everyone runs
    steps: int  # timed steps
    cap_s: float  # seconds after which ours and the resident run are ended
    others_cap_s: float = 100.0  # the same of all others

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        with torch.device("meta"):
            return sum(p.numel() for p in gpt(self.width, self.depth).model().parameters())

    def job(self, tokens: int, folder: Path) -> Job:
        """Ours, with so many tokens in a step."""
        length = min(tokens, LENGTH)
        activations = 4 * BLOCK_FLOATS * self.width * self.depth * tokens
        return Job(
            GEMINI,
            width=self.width,
            depth=self.depth,
            length=length,
            batch=tokens // length,
            steps=self.steps,
            recompute=activations > KEPT_SHARE * self.limit,
            limit=self.limit,
            disk=2 * STATE_BYTES * self.parameters,
            folder=str(folder),
            cap_s=self.cap_s,
            options={"constant": CONSTANT, "step_in_backward": True},
        )


SMALL = Scale(1024, 20, 3 * GIB // 2, (128, 512, 2048), 512, 2, 120.0)
FULL = Scale(2048, 20, 6 * GIB, (128, 512, 2048), 512, 2, 300.0)
Say = Callable[[str], None]


def headline(scale: Scale, folder: Path, ledger: Ledger, say: Say, rate: int = 0) -> Report:
    """Everyone at one number of tokens; what matters most runs first."""
    job = replace(scale.job(scale.headline, folder), rate=rate)
    rates, resident = rates_of(job, ledger, say), resident_of(job, ledger, say)
    limited = {GEMINI: job, **_others(scale, job)}
    found = {
        n: Beside(run(j, ledger, say), resident, rates, job.tokens) for n, j in limited.items()
    }
    made = Report(
        f"memory-headline-{scale.width}x{scale.depth}",
        f"A GPT of {scale.parameters / 1e6:,.0f} M parameters in {scale.limit / GIB:.3g} GiB, "
        f"{job.tokens} tokens of a step",
        COLUMNS,
        notes=_notes(scale, rates),
    )
    plain = Beside(resident, resident, rates, job.tokens)
    made.rows.append(row("plain, no limit", plain, limited=False))
    made.figures["resident"] = figures(plain)
    for name, beside in found.items():
        made.rows.append(row(name, beside))
        made.figures[name] = figures(beside)
    made.figures["rates"] = vars(rates)
    made.bars = [*_own_bars(GEMINI, found[GEMINI], scale), *swap_bar(found)]
    return made


def _others(scale: Scale, job: Job) -> dict[str, Job]:
    """Everyone else under the limit, by their names in the table."""
    other = replace(job, cap_s=scale.others_cap_s, options={})
    swap = 2 * STATE_BYTES * scale.parameters
    return {
        # One step of what swaps says enough, and the first makes the optimizer's state.
        SWAP: replace(other, contestant=SWAP, swap=swap, steps=1, warm_up=1),
        FSDP2: replace(other, contestant=FSDP2),
        f"{PLAIN}, no swap file": replace(other, contestant=PLAIN),
        DEEPSPEED_DISK: replace(other, contestant=DEEPSPEED_DISK),
        DEEPSPEED_CPU: replace(other, contestant=DEEPSPEED_CPU),
    }


def _own_bars(name: str, ours: Beside, scale: Scale) -> list[Bar]:
    bars = limit_bars(name, ours.outcome, scale.limit) + loss_bar(name, ours)
    return bars + speed_bars(name, ours)


def curve(scale: Scale, folder: Path, ledger: Ledger, say: Say, rate: int = 0) -> Report:
    """Ours and the resident run over tokens."""
    made = Report(
        f"memory-curve-{scale.width}x{scale.depth}",
        f"A GPT of {scale.parameters / 1e6:,.0f} M parameters in {scale.limit / GIB:.3g} GiB, over "
        "tokens of a step",
        ("tokens", "resident s", "disk / compute", "recomputed", *COLUMNS[1:]),
    )
    for tokens in scale.tokens:
        job = replace(scale.job(tokens, folder), rate=rate)
        rates, resident = rates_of(job, ledger, say), resident_of(job, ledger, say)
        beside = Beside(run(job, ledger, say), resident, rates, tokens)
        first, *rest = row(str(tokens), beside)
        own = [f"{resident.seconds:.2f}", f"{beside.ratio:.2f}", "yes" if job.recompute else "no"]
        made.rows.append([first, *own, *rest])
        made.figures[f"{tokens}"] = {**figures(beside), "resident_s": resident.seconds}
        made.bars += _own_bars(f"{tokens} tokens", beside, scale)
        made.notes = _notes(scale, rates)
    return made


def rates_of(job: Job, ledger: Ledger, say: Say) -> Rates:
    """The disk alone, measured in a group of the job's rate; anew for every job beside it."""
    beside = {"beside": job.tokens}
    found = run(Job(DISK, folder=job.folder, rate=job.rate, options=beside), ledger, say)
    if found.end != "done":
        raise LimitsError(f"cannot measure the disk of {job.folder}: {found.told}")
    return Rates(**found.facts)


def resident_of(job: Job, ledger: Ledger, say: Say) -> Outcome:
    """The plain loop without a limit."""
    plain = alone(job)
    if ledger.get(plain) is None:
        with torch.device("meta"):
            count = sum(p.numel() for p in gpt(job.width, job.depth).model().parameters())
        need, free = STATE_BYTES * count + GIB, free_memory()
        if need > free:
            raise LimitsError(
                f"the resident run needs {need / GIB:.1f} GiB and {free / GIB:.1f} are free: "
                "run it when nothing else does, or leave out --full"
            )
    return run(plain, ledger, say)


def _notes(scale: Scale, rates: Rates) -> list[str]:
    return [
        f"{scale_of(scale.limit, scale.parameters)}; AdamW, fused. Each contestant is a process in "
        "a control group of its own; peak is what the kernel charged it with, the interpreter and "
        "page cache included, anonymous is without page cache. Blocks are recomputed, for all "
        f"alike, where activations would take more than {KEPT_SHARE:.0%} of the limit.",
        f"Disk alone, past the page cache: reads {rates.read_bps / GB:.2f} GB/s, writes "
        f"{rates.write_bps / GB:.2f}, both at once {rates.both_bps / GB:.2f}. Disk s: what the "
        "bytes of a step, counted by the kernel, need at these rates; hidden: the share of it in "
        "which the step is not longer than the resident one; the bound is the longer of the "
        "resident step and the disk's seconds.",
        f"{GEMINI} is told the limit less {CONSTANT / MIB:.0f} MiB for the interpreter and torch.",
    ]
