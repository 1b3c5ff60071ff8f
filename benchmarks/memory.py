"""Training under a limit of memory, compared with no limit, a swap file, FSDP2 and DeepSpeed.

`python -m benchmarks.memory` runs every contestant in a control group that the kernel ends at its
limit, so it needs root, and a disk. *headline*: a GPT whose states are more than twice the limit,
everyone on the same work; *curve*: ours over tokens of a step.

By default sizes are scaled down; `--full` takes a GPT of 1 B parameters in 6 GiB, and needs 18 GiB
for the resident run beside it. With `--ledger FILE` a run that was ended goes on where it was.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmarks._harness import finish
from benchmarks._memory_headline import FULL, SMALL, Scale, curve, headline
from benchmarks._memory_jobs import MB, Ledger, folder_on_disk
from benchmarks.limits import LimitsError, check_limits

Part = Literal["headline", "curve"]


@dataclass(frozen=True)
class Options:
    """What is run."""

    parts: tuple[Part, ...] = ("headline", "curve")
    full: bool = False  # A GPT of 1 B parameters in 6 GiB, and more settings; needs 18 GiB
    folder: Path = Path("out")  # Folder on the disk that is used; what is written there is removed
    rate: float = 0.0
    """MB per second that the disk of headline and curve is shaped to; 0 for what it can."""
    minutes: float = 0.0
    """Minutes after which what runs is ended and what is left is left out; 0 for no end."""
    ledger: Path | None = None  # File of outcomes: jobs that are in it are not run again
    keep: bool = False  # Write benchmarks/results

    @property
    def scale(self) -> Scale:
        """Sizes of the GPT."""
        return FULL if self.full else SMALL


def say(line: str) -> None:
    """Tells what goes on, beside the tables."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    try:
        check_limits()
        options.folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(options.ledger, 60 * options.minutes or math.inf)
        with folder_on_disk(options.folder.absolute()) as folder:
            for part in options.parts:
                run = {"headline": headline, "curve": curve}[part]
                report = run(options.scale, folder, ledger, say, int(options.rate * MB))
                finish(report, options.keep)
    except LimitsError as error:
        sys.exit(f"benchmarks.memory: {error}")


if __name__ == "__main__":
    main()
