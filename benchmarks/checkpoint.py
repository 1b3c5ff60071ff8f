"""Saving while training goes on: torch.save, torch's distributed checkpoint, and ours.

`python -m benchmarks.checkpoint` trains a GPT with AdamW and an average of its weights, and saves
all of that in the middle of training. Contestants take turns, each in a process of its own, which
is watched from outside for its memory. `--gb 4` is refused where memory does not allow it.
`--every 40` saves each of 40 steps instead, with one state in flight.

What each process does, and how it is timed, is in `_checkpoint_saver`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks._checkpoint_saver import (
    ENTRANTS,
    PROCESS,
    RING,
    SHADOW,
    SPARING,
    THREAD,
    TORCH_SAVE,
    Job,
    Run,
)
from benchmarks._harness import Bar, Report, Spread, at_least, at_most, finish, free_memory, turns
from benchmarks.netlab import LoadMeter
from gulliver.errors import GulliverError, nearest

TORCH_ASYNC = (THREAD, PROCESS)
EVERY = (THREAD, PROCESS, SHADOW, SPARING)
"""Contestants that save while training goes on."""
SAMPLE_S = 0.02
TOLERANCE = 0.05
"""Of a bar on memory, as a share of the state: for what else comes and goes in the process."""
TIMEOUT_S = 1800.0
COPIES = {TORCH_SAVE: 0.1, THREAD: 2.0, PROCESS: 3.5, SHADOW: 1.0, SPARING: 1.0}
"""Memory over the state that a contestant needs, roughly; loading may need one more state."""


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    gb: float = 1.0  # State in 1e9 bytes: weights, their average, and AdamW's moments
    rounds: int = 3  # Processes of each contestant
    saves: int = 4  # In each of them while training goes on; the first is reported apart
    calm: int = 2  # Undisturbed steps before and after each
    threads: int = 2  # Of the training; what saves has threads of its own
    length: int = 128  # Tokens of a batch: how long forward and backward are
    every: int = 0  # Steps in a row that are all saved, instead of single saves; 0 for none
    ring_mb: int = 64
    contestants: tuple[str, ...] = tuple(ENTRANTS)
    folder: Path | None = None  # On the disk to be measured; None for the temporary folder
    keep: bool = False  # Write benchmarks/results


@dataclass
class Watched:
    """A process' run, and what memory it took."""

    run: Run  # what it said
    first_extra: int = 0  # most bytes over undisturbed training, in its first save
    later_extra: int = 0  # the same, in the later ones; over the level before the first


@dataclass
class Samples:
    """Memory of a process and its children, from outside: (`time.perf_counter`, bytes)."""

    pid: int
    found: list[tuple[float, int]] = field(default_factory=list)

    def watch(self, stop: threading.Event) -> None:
        """Samples memory until `stop` is set."""
        while not stop.wait(SAMPLE_S):
            self.found.append((time.perf_counter(), memory_of(self.pid)))

    def most(self, begun: float, ended: float) -> int:
        """Returns the peak between two times."""
        return max((n for when, n in self.found if begun <= when <= ended), default=0)


def memory_of(pid: int) -> int:
    """Private bytes of a process and its children, and those that they share once."""
    private = shared = 0
    for each in family(pid):
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        private += int(sizes.get("RssAnon", 0)) << 10
        shared = max(shared, int(sizes.get("RssShmem", 0)) << 10)
    return private + shared


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        try:
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        except OSError:
            continue
    return found


def run_one(options: Options, name: str, folder: Path) -> Watched:
    """A contestant in a process of its own."""
    place = Path(tempfile.mkdtemp(dir=folder))
    job = Job(
        name,
        str(place),
        options.gb,
        options.threads,
        options.length,
        options.saves,
        options.calm,
        options.ring_mb,
        options.every,
    )
    command = [sys.executable, "-m", "benchmarks._checkpoint_saver", json.dumps(asdict(job))]
    try:
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            samples, stop = Samples(process.pid), threading.Event()
            watcher = threading.Thread(target=samples.watch, args=(stop,))
            watcher.start()
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            finally:
                stop.set()
                watcher.join()
                process.kill()
            if process.returncode:
                errors.seek(0)
                raise GulliverError(f"{name} ended with {process.returncode}:\n{errors.read()}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    # The last line: libraries may print, too.
    return watched(Run(**json.loads(output.splitlines()[-1])), samples)


def watched(run: Run, samples: Samples) -> Watched:
    """A run with its memory; its dicts made what they were."""
    from benchmarks._checkpoint_saver import During, Every

    if run.every is not None:
        run.every = Every(**run.every)  # type: ignore[arg-type]
        extra = samples.most(run.every.begun, run.every.ended) - samples.most(*run.calm)
        return Watched(run, later_extra=max(0, extra))
    run.during = [During(**entry) for entry in run.during]  # type: ignore[arg-type]
    level = samples.most(*run.calm)
    extras = [samples.most(entry.begun, entry.ended) - level for entry in run.during]
    return Watched(run, max(0, extras[0]), max(0, *extras[1:]))


def compete(options: Options, folder: Path) -> dict[str, list[Watched]]:
    """Lets contestants take turns; every second round runs backwards."""
    found: dict[str, list[Watched]] = {name: [] for name in options.contestants}
    for number, name in turns(options.contestants, options.rounds):
        print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
        found[name].append(run_one(options, name, folder))
    return found


@dataclass(frozen=True)
class Figures:
    """A contestant over all rounds; later saves unless said otherwise.

    Attributes:
        call, held, beyond, total: seconds, see `During`.
        first_held, first_total: of first saves.
        alone, raw: seconds of a save, and of writing as much, undisturbed.
        extra, first_extra: bytes.
    """

    nbytes: int  # of the state
    call: Spread
    held: Spread
    beyond: Spread
    total: Spread
    first_held: Spread
    first_total: Spread
    slowdown: Spread | None  # of the steps wholly under way while it was saved; None for none
    alone: Spread
    raw: Spread
    rate: Spread  # bytes per second of a save alone, over those of writing right beside it
    extra: int
    first_extra: int
    load: Spread  # seconds
    equal: bool  # every time
    forward_backward: Spread  # seconds


def figures(found: Sequence[Watched]) -> Figures:
    """Combines the results of all processes of a contestant."""
    runs = [each.run for each in found]
    later = [entry for run in runs for entry in run.during[1:]]
    first = [run.during[0] for run in runs]

    slower = tuple(e.step_s / e.calm_s - 1 for e in later if e.step_s is not None)

    def spread(name: str, of: Sequence[Any]) -> Spread:
        return Spread(tuple(getattr(each, name) for each in of))

    pairs = [pair for run in runs for pair in zip(run.alone_s, run.raw_s, strict=True)]
    return Figures(
        runs[0].nbytes,
        spread("call_s", later),
        spread("held_s", later),
        spread("beyond_s", later),
        spread("total_s", later),
        spread("held_s", first),
        spread("total_s", first),
        Spread(slower) if slower else None,
        Spread(tuple(alone for alone, _ in pairs)),
        Spread(tuple(raw for _, raw in pairs)),
        Spread(tuple(raw / alone for alone, raw in pairs)),
        round(statistics.median(each.later_extra for each in found)),
        round(statistics.median(each.first_extra for each in found)),
        spread("load_s", runs),
        all(run.equal for run in runs),
        spread("forward_backward_s", runs),
    )


COLUMNS = (
    "contestant",
    "held up, s",
    "beyond calm steps, s",
    "the call, s",
    "on disk, s",
    "alone, s",
    "extra memory, MB",
    "load, s",
    "equal",
    "first: held up, s",
    "first: on disk, s",
)


def row(name: str, of: Figures) -> list[str]:
    """A line of the table."""
    return [
        name,
        of.held.shown(".3f"),
        of.beyond.shown(".3f"),
        f"{of.call.median:.3f}",
        of.total.shown(".3f"),
        f"{of.alone.median:.2f}",
        f"{of.extra / 1e6:.0f}",
        f"{of.load.median:.2f}",
        "yes" if of.equal else "NO",
        f"{of.first_held.median:.3f}",
        f"{of.first_total.median:.2f}",
    ]


def bars(all_of: dict[str, Figures], options: Options) -> list[Bar]:
    """Returns the bars for the contestants that ran."""
    made = []
    ours = all_of.get(SHADOW)
    theirs = [all_of[name] for name in TORCH_ASYNC if name in all_of]
    if ours is not None and TORCH_SAVE in all_of:
        them = all_of[TORCH_SAVE]
        part = ours.held.median / them.held.median
        made.append(at_most("training held up, over torch.save's", part, 0.03))
    if ours is not None and theirs:
        # Copying and writing alone take 0.18 s per GB from steps, so no bar over torch.save, which
        # takes 0.7 to 2.5 s per GB as the page cache has it.
        part = ours.beyond.median / min(one.beyond.median for one in theirs)
        made.append(at_most("seconds beyond calm steps, over torch's async's", part, 0.5))
        longer = min(one.held.median for one in theirs) / ours.held.median
        made.append(at_least("torch's async holds up longer, times", longer, 3.0))
    if ours is not None:
        made.append(at_least("write rate over the raw disk's", ours.rate.median, 0.9))
        limit = 1 + TOLERANCE
        made.append(at_most("extra memory over the state", ours.extra / ours.nbytes, limit))
        made.append(at_most("first save: the same", ours.first_extra / ours.nbytes, limit))
    if RING in all_of:
        ring = all_of[RING]
        limit = options.ring_mb * 2**20 + TOLERANCE * ring.nbytes
        made.append(at_most("ring: extra memory, MB", ring.extra / 1e6, limit / 1e6))
    for name, of in all_of.items():
        if name in (SHADOW, RING):
            made.append(at_least(f"{name}: bit for bit, 1 is always", float(of.equal), 1.0))
    return made


def report(all_of: dict[str, Figures], options: Options, foreign: float) -> Report:
    """The table, the bars and the notes."""
    some = next(iter(all_of.values()))
    raw = Spread(tuple(value for of in all_of.values() for value in of.raw.values))
    claim = f"checkpoint-{options.gb:g}gb"
    title = f"Saving {some.nbytes / 1e9:.2f} GB (model, average, AdamW) while training goes on"
    made = Report(claim, title, COLUMNS, [row(name, of) for name, of in all_of.items()])
    made.bars = bars(all_of, options)
    made.figures = {
        name: {
            key: asdict(value) | {"median": value.median} if isinstance(value, Spread) else value
            for key, value in vars(of).items()
        }
        for name, of in all_of.items()
    }
    step = Spread(tuple(v for of in all_of.values() for v in of.forward_backward.values))
    slower = ", ".join(
        f"{name} {of.slowdown.median:+.0%}" for name, of in all_of.items() if of.slowdown
    )
    made.notes = [
        f"Medians (quartiles) of {options.rounds} processes, {options.saves - 1} saves in each "
        "after the first. Held up: the call, and what an optimizer's step waited for it. Beyond "
        "calm steps: from the call until the end of the step in which it was complete, less as "
        "many undisturbed steps; slower steps while the machine does both count there.",
        "",
        f"Forward and backward take {step.median:.2f} s ({options.threads} threads). Steps wholly "
        f"under way while something was saved were slower by: {slower or 'there were none'}.",
        "",
        f"Raw disk, 4 MiB blocks past the page cache, then fsync: {raw.shown()} s, "
        f"{some.nbytes / raw.median / 1e9:.2f} GB/s. "
        f"Others kept {foreign:.1f} cores of the machine busy meanwhile.",
        "",
        "Extra memory: most of what the process and its children had over undisturbed training; "
        "the page cache, which all but ours write through, is not counted.",
    ]
    return made


def report_every(all_of: dict[str, list[Watched]], options: Options, foreign: float) -> Report:
    """Step time, memory and states written of those who save every step."""
    rows, bars, figures = [], [], {}
    nbytes = next(iter(all_of.values()))[0].run.nbytes
    for name, found in all_of.items():
        every = [each.run.every for each in found if each.run.every is not None]
        ratio = Spread(tuple(part.ratio for part in every))
        worst = statistics.median(part.worst for part in every)
        written = statistics.median(part.written for part in every)
        calm = statistics.median(part.calm_s for part in every)
        extra = statistics.median(each.later_extra for each in found)
        states = extra / nbytes
        shown = (written, options.every / written, states, calm)
        rows.append([name, ratio.shown(".3f"), f"{worst:.2f}", *(f"{n:.3g}" for n in shown)])
        figures[name] = {"ratio": asdict(ratio), "states": states, "runs": [*map(asdict, every)]}
        if name == SPARING:
            bars.append(at_most("step time, saved sparingly, over calm", ratio.median, 1.1))
            bars.append(at_most("states in memory", states, 1 + TOLERANCE))
            summed = nbytes / checksum_rate() * written
            busy = options.every * calm * options.threads
            bars.append(at_most("checksums, of step time", summed / busy, 0.02))
    title = f"Saving every step: {nbytes / 1e9:.2f} GB (model, average, AdamW)"
    columns = ("contestant", "step over calm", "slowest", "states saved", "steps per state")
    columns = (*columns, "states in memory", "calm step, s")
    made = Report(f"checkpoint-every-{options.gb:g}gb", title, columns, rows)
    made.bars, made.figures = bars, figures
    made.notes = [
        f"Medians (quartiles) of {options.rounds} processes that ask for a save after each of "
        f"{options.every} steps; calm steps are {options.calm} before and as many after. All "
        "have one state in flight, and skip steps while it is written: the next one saved is the "
        "newest. Sparing saves skip more, so that steps take at most a tenth longer. Memory is "
        "over that of calm steps.",
        "",
        f"{options.threads} threads train on {os.cpu_count()} cores, which also copy, sum and "
        f"write. Others kept {foreign:.1f} cores of the machine busy meanwhile.",
    ]
    return made


def checksum_rate() -> float:
    """Bytes per second that one core sums."""
    from gulliver.io._core import crc32  # type: ignore[import-not-found]

    memory = np.ones(2**28, dtype=np.uint8)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        crc32(memory.ctypes.data, memory.nbytes)
        seconds.append(time.perf_counter() - begun)
    return memory.nbytes / min(seconds)


def checked(options: Options, folder: Path) -> Options:
    """The options; without contestants that memory has no room for."""
    for name in options.contestants:
        if name not in ENTRANTS:
            raise GulliverError(f"unknown contestant {name!r}: {nearest(name, list(ENTRANTS))}")
    if options.rounds < 1 or options.saves < 2 or options.calm < 1 or options.gb < 0.1:
        raise GulliverError("at least 1 round, 2 saves, 1 calm step and 0.1 GB")
    if options.every:
        options = replace(options, contestants=tuple(n for n in options.contestants if n in EVERY))
    # Of every step saved at worst, which takes a disk as fast as memory.
    states = max(7, options.every)
    free_disk = shutil.disk_usage(folder).free
    if free_disk < states * 1e9 * options.gb:
        needed = states * options.gb
        raise GulliverError(f"{folder} has {free_disk / 1e9:.0f} GB free, not {needed:.0f}")
    free = free_memory()
    held = 1.35  # state, gradients, activations
    fitting = tuple(
        n
        for n in options.contestants
        if 1e9 * options.gb * (held + max(1.0, COPIES.get(n, 0.1))) + 1.5e9 < free
    )
    left_out = [name for name in options.contestants if name not in fitting]
    if SHADOW in left_out or not fitting:
        raise GulliverError(
            f"{options.gb:g} GB of state do not fit: {free / 1e9:.0f} GB of memory are free"
        )
    if left_out:
        print(f"no memory for {', '.join(left_out)}", file=sys.stderr)
    return replace(options, contestants=fitting)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    folder = Path(tempfile.mkdtemp(prefix="gulliver-checkpoint-", dir=options.folder))
    try:
        options = checked(options, folder)
        meter = LoadMeter()
        found = compete(options, folder)
        if options.every:
            made = report_every(found, options, meter.cores())
        else:
            all_of = {name: figures(runs) for name, runs in found.items()}
            made = report(all_of, options, meter.cores())
    except GulliverError as error:
        sys.exit(f"benchmarks.checkpoint: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish(made, options.keep)


if __name__ == "__main__":
    main()
