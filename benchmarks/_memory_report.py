"""What `benchmarks.memory` makes of its outcomes: seconds of disk, bounds, shares, bars, rows.

All of it is arithmetic; it starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks._harness import Bar, at_least, at_most
from benchmarks._memory_jobs import GB, GEMINI, GIB, MIB, SWAP, Outcome

COVERED, EQUAL = 0.75, 1.33
"""Disk over compute up to which compute covers the disk, and up to which they are about equal."""
BOUND_BAR, SWAP_BAR, COVERED_BAR, EQUAL_BAR = 1.15, 3.0, 0.95, 0.84


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a disk, past the page cache."""

    read_bps: float  # rate of reading alone
    write_bps: float  # rate of writing alone
    both_bps: float  # rate of reading and writing as much at once, both counted

    def seconds(self, read: float, written: float) -> float:
        """Seconds of so many bytes, if the disk never waits: reading while writing where it can."""
        both = min(read, written)
        alone = (read - both) / self.read_bps + (written - both) / self.write_bps
        return 2 * both / self.both_bps + alone


@dataclass(frozen=True)
class Beside:
    """An outcome and the resident one of the same work."""

    outcome: Outcome  # under a limit
    resident: Outcome  # without one
    rates: Rates  # of the disk
    tokens: int  # of a step

    @property
    def disk_s(self) -> float:
        """Seconds that the disk needs for what a step moved."""
        return self.rates.seconds(self.outcome.read, self.outcome.written)

    @property
    def ratio(self) -> float:
        """Disk over compute."""
        return self.disk_s / self.resident.seconds if self.resident.ran else math.nan

    @property
    def bound_s(self) -> float:
        """The shortest step that there can be: compute, or the disk, the other hidden."""
        return max(self.resident.seconds, self.disk_s) if self.resident.ran else math.nan

    @property
    def share(self) -> float:
        """Speed over that of the resident run."""
        known = self.resident.ran and self.outcome.seconds
        return self.resident.seconds / self.outcome.seconds if known else math.nan

    @property
    def hidden(self) -> float:
        """Share of the disk's seconds in which the step went on computing."""
        if not self.resident.ran:
            return math.nan
        exposed = max(0.0, self.outcome.seconds - self.resident.seconds)
        return max(0.0, 1 - exposed / self.disk_s) if self.disk_s else 1.0


COLUMNS = (
    *("", "ended", "peak MiB", "anonymous MiB", "step s", "tokens/s", "of resident"),
    *("GB read, written", "disk s", "hidden", "/ bound"),
)


def row(name: str, found: Beside, limited: bool = True) -> list[str]:
    """A line of the table."""
    outcome = found.outcome
    end = outcome.end if outcome.end != "refused" else f"refused: {outcome.told}"
    memory = [f"{outcome.peak / MIB:.0f}", f"{outcome.anonymous / MIB:.0f}"]
    if not outcome.ran and not outcome.unfinished_s:
        told = outcome.told if outcome.end in ("absent", "failed", "left out", "stopped") else ""
        return [name, f"{end}: {told}" if told else end, *memory, *[""] * 7]
    least = "" if outcome.ran else ">= "
    most = "" if outcome.ran else "<= "
    timed = [
        f"{least}{outcome.seconds:.2f}",
        f"{most}{found.tokens / outcome.seconds:.1f}",
        f"{most}{found.share:.1%}" if limited else "",
    ]
    if not limited or not outcome.ran:
        return [name, end, *memory, *timed, "", "", "", ""]
    moved = f"{outcome.read / GB:.2f}, {outcome.written / GB:.2f}"
    own = [f"{found.disk_s:.2f}", f"{found.hidden:.0%}", f"{outcome.seconds / found.bound_s:.2f}"]
    return [name, end, *memory, *timed, moved, *own]


def figures(found: Beside) -> dict[str, Any]:
    """A line of the table, for the JSON line."""
    outcome = found.outcome
    return {
        "end": outcome.end,
        "peak_bytes": outcome.peak,
        "anonymous_bytes": outcome.anonymous,
        "swapped_bytes": outcome.swapped,
        "step_s": outcome.seconds,
        "steps_s": [s.seconds for s in outcome.steps],
        "read_bytes": outcome.read,
        "written_bytes": outcome.written,
        "disk_s": found.disk_s,
        "facts": outcome.facts,
    }


def limit_bars(name: str, outcome: Outcome, limit: int) -> list[Bar]:
    """A run under a limit ends, and stays within it."""
    return [
        at_least(f"{name}: timed steps under the limit", len(outcome.steps), 1),
        at_most(f"{name}: peak / limit", outcome.peak / limit, 1.0),
    ]


def speed_bars(name: str, found: Beside) -> list[Bar]:
    """A step is about as long as the longer of compute and disk, and near the resident one."""
    if not found.outcome.ran or not found.resident.ran:
        return []
    over = found.outcome.seconds / found.bound_s
    bars = [at_most(f"{name}: step / max(compute, disk)", over, BOUND_BAR)]
    if found.ratio <= COVERED:
        bars.append(at_least(f"{name}: of resident, disk covered", found.share, COVERED_BAR))
    elif found.ratio <= EQUAL:
        bars.append(at_least(f"{name}: of resident, disk equal", found.share, EQUAL_BAR))
    return bars


def loss_bar(name: str, found: Beside) -> list[Bar]:
    """Losses are those of the resident run, bit for bit."""
    if not found.outcome.ran or not found.resident.ran:
        return []
    ours, wanted = found.outcome.losses, found.resident.losses
    off = max((abs(ours[n] - wanted[n]) for n in ours.keys() & wanted.keys()), default=math.inf)
    return [at_most(f"{name}: loss, off the resident run's", off, 0.0)]


def swap_bar(found: Mapping[str, Beside]) -> list[Bar]:
    """Ours against the plain loop with a swap file."""
    ours, swapped = found[GEMINI].outcome, found[SWAP].outcome
    if not ours.ran or not swapped.seconds:
        return []
    times = swapped.seconds / ours.seconds
    return [at_least(f"{GEMINI}: times faster than swapping", times, SWAP_BAR)]


def scale_of(limit: int, parameters: int) -> str:
    """Describes the size of a model's states compared with a limit."""
    states = 16 * parameters
    return (
        f"{parameters / 1e6:,.0f} M parameters: {states / GIB:.1f} GiB of float32 parameters, "
        f"gradients and AdamW's state, {states / limit:.1f} times the limit"
    )
