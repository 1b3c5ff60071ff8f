"""Training under a limit of memory: beside no limit, a swap file, FSDP2, DeepSpeed and the disk.

`python -m benchmarks.memory` runs every contestant in a control group that the kernel ends at its
limit, so it needs root, and a disk. *headline*: a GPT whose states are more than twice the limit,
everyone on the same work; *curve*: ours over tokens of a step. *disk*: the disk shaped to two
rates, seconds predicted and measured. *unet*: the peak of training a UNet of diffusers, and what
lowered it by how much. *moves*: what the manager moves beside its simulation and the least that
there can be. *gpu* needs a GPU.

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

from benchmarks import _memory_disk as disk
from benchmarks import _memory_moves as moves
from benchmarks import _memory_unet as unet
from benchmarks._harness import Report, finish
from benchmarks._memory_headline import FULL, SMALL, Scale, curve, headline
from benchmarks._memory_jobs import MB, Ledger, folder_on_disk
from benchmarks.limits import LimitsError, check_limits

CASES, FULL_CASES = 200, 2000
Part = Literal["headline", "curve", "disk", "unet", "moves", "gpu"]


@dataclass(frozen=True)
class Options:
    """What is run."""

    parts: tuple[Part, ...] = ("headline", "curve", "disk", "unet", "moves")
    full: bool = False
    """A GPT of 1 B parameters in 6 GiB, and more settings; needs 18 GiB."""
    folder: Path = Path("out")
    """Folder on the disk that is used; what is written there is removed."""
    rate: float = 0.0
    """MB per second that the disk of headline and curve is shaped to; 0 for what it can."""
    minutes: float = 0.0
    """Minutes after which what runs is ended and what is left is left out; 0 for no end."""
    ledger: Path | None = None
    """File of outcomes: jobs that are in it are not run again."""
    keep: bool = False
    """Write benchmarks/results."""

    @property
    def scale(self) -> Scale:
        """Sizes of the GPT."""
        return FULL if self.full else SMALL


def reports(options: Options, part: Part, folder: Path, ledger: Ledger) -> list[Report]:
    """Runs a part."""
    rate = int(options.rate * MB)
    if part == "headline":
        return [headline(options.scale, folder, ledger, say, rate)]
    if part == "curve":
        return [curve(options.scale, folder, ledger, say, rate, options.keep)]
    if part == "gpu":
        raise LimitsError("the part gpu needs a CUDA device, and host memory as a tier behind it")
    if part == "disk":
        grid = disk.FULL if options.full else disk.SMALL
        return [disk.report(grid, folder, ledger, say)]
    if part == "moves":
        return [moves.report(FULL_CASES if options.full else CASES, folder)]
    if part == "unet":
        scale = unet.FULL if options.full else unet.SMALL
        return [unet.report(scale, folder, ledger, say)]
    raise LimitsError(f"no part is called {part}")


def say(line: str) -> None:
    """Tells what goes on, beside the tables."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Runs what the options say."""
    options = tyro.cli(Options, description=__doc__)
    try:
        if set(options.parts) - {"moves", "gpu"}:
            check_limits()
        options.folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(options.ledger, 60 * options.minutes or math.inf)
        with folder_on_disk(options.folder.absolute()) as folder:
            for part in options.parts:
                for report in reports(options, part, folder, ledger):
                    finish(report, options.keep)
    except LimitsError as error:
        sys.exit(f"benchmarks.memory: {error}")


if __name__ == "__main__":
    main()
