"""Jobs of `benchmarks.memory`: a contestant in a process and a control group of its own.

A `Job` says everything that a run depends on, so that one which has ended need not be repeated: the
`Ledger` keeps outcomes in a file, line by line. The worker (`_memory_worker.py`) prints an event
for everything that it does; if it is killed, what it did until then is known. Jobs run one after
another: two of them would not fit in memory, and would share the disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._harness import Spread
from benchmarks.limits import Group, LimitsError, Swap

MIB, GIB, MB, GB = 1 << 20, 1 << 30, 10**6, 10**9
ROOT = Path(__file__).parent.parent
MARK = "@event "  # Begins a line of the worker that is an event
LOOK_S = 0.05  # Seconds between two looks at a group's anonymous memory
LEAST_S = 10.0  # Seconds below which nothing is begun
TEXTS = "texts"
WORKERS = {TEXTS: "benchmarks._finetune_worker"}
"""Modules that run jobs, by their model; all others run in that of `benchmarks.memory`."""
PLAIN, SWAP, GEMINI = "plain", "plain, swap file", "Gemini"
DISK = "disk"
FSDP2 = "FSDP2, CPU off-load"
DEEPSPEED_DISK, DEEPSPEED_CPU = "DeepSpeed ZeRO-3, NVMe", "DeepSpeed ZeRO-3, CPU"


@dataclass(frozen=True)
class Job:
    """A contestant with a model, a limit and a disk."""

    contestant: str  # name of what trains, or `disk`, which measures the disk alone
    model: str = "gpt"  # `gpt`, or `texts` for what `benchmarks.finetune` trains
    width: int = 0  # width of the model
    depth: int = 0  # number of blocks
    length: int = 0  # tokens of a sequence, or pixels of a latent image's side
    batch: int = 0  # samples of a step
    steps: int = 3  # timed steps
    warm_up: int = 2  # steps before, in which states are made and accesses recorded
    recompute: bool = False  # whether every block is recomputed in backward
    limit: int = 0  # bytes of the control group; 0 for none
    swap: int = 0  # bytes of a swap file; 0 for none
    disk: int = 0  # bytes of the disk that the contestant may use
    rate: int = 0  # bytes per second of the disk, read and written each; 0 for what it can
    folder: str = "."  # folder on the disk
    cap_s: float = 600.0  # seconds after which it is ended
    options: dict[str, Any] = field(default_factory=dict)  # further choices of the contestant

    @property
    def key(self) -> str:
        """Key of the job in the ledger; its folder, another one in each run, is left out."""
        return json.dumps({**asdict(self), "folder": ""}, sort_keys=True)

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True)
class Step:
    """A timed step."""

    seconds: float  # how long it took
    loss: float  # of its batch
    read: int  # bytes that were read from the disk
    written: int  # bytes that were written to it
    number: int = 0  # number of the step, from 0; warm-up steps count


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    # `done`, `killed` by the limit, `stopped` at its cap of seconds, `refused` with an error of one
    # line, `failed` with another, `absent` where it is not installed, or `left out` for want of
    # time
    end: str
    told: str = ""  # the error, in a line
    steps: tuple[Step, ...] = ()  # timed steps that it did
    unfinished_s: float = 0.0  # seconds of the step that it was in when it was ended; 0 if in none
    peak: int = 0  # most bytes that its group was charged with
    anonymous: int = 0  # most bytes of anonymous memory that were seen
    swapped: int = 0  # most bytes in swap that were seen
    facts: dict[str, Any] = field(default_factory=dict)  # what the contestant says of itself

    @property
    def ran(self) -> bool:
        """Whether it did timed steps."""
        return bool(self.steps)

    @property
    def seconds(self) -> float:
        """Seconds of a step, the median; of one that was ended, at least so many."""
        if self.steps:
            return Spread(tuple(s.seconds for s in self.steps)).median
        return self.unfinished_s

    @property
    def read(self) -> float:
        """Bytes read in a step, the mean."""
        return sum(s.read for s in self.steps) / max(1, len(self.steps))

    @property
    def written(self) -> float:
        """Bytes written in a step, the mean."""
        return sum(s.written for s in self.steps) / max(1, len(self.steps))

    @property
    def losses(self) -> dict[int, float]:
        """Losses of the timed steps by their numbers."""
        return {s.number: s.loss for s in self.steps}


class Ledger:
    """Outcomes of jobs that have ended, in a file, so that a run can be taken up again."""

    def __init__(self, path: Path | None, within_s: float = math.inf) -> None:
        self.path, self._until = path, time.monotonic() + within_s
        self._known: dict[str, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                kept = json.loads(line)
                steps = tuple(Step(**s) for s in kept["outcome"].pop("steps"))
                self._known[kept["key"]] = Outcome(steps=steps, **kept["outcome"])

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def get(self, job: Job) -> Outcome | None:
        """The outcome of a job, where it has ended in an earlier run."""
        return self._known.get(job.key)

    def add(self, job: Job, outcome: Outcome) -> None:
        self._known[job.key] = outcome
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": job.key, "outcome": asdict(outcome)}) + "\n")


def run(
    job: Job, ledger: Ledger, say: Callable[[str], None] = lambda _: None, needs_s: float = LEAST_S
) -> Outcome:
    """Runs a job, unless the ledger has it; what could not run is an outcome, too."""
    known = ledger.get(job)
    limited = f" in {job.limit / GIB:.3g} GiB" if job.limit else ""
    shaped = f", disk {job.rate / MB:.0f} MB/s" if job.rate else ""
    title = f"{job.contestant}, {job.tokens} tokens{limited}{shaped}"
    if known is not None:
        say(f"{title}: known, {known.end}")
        return known
    if ledger.left_s < needs_s:
        say(f"{title}: left out, {ledger.left_s:.0f} s are left")
        return Outcome("left out", "no time was left")
    started, cap_s = time.monotonic(), min(job.cap_s, ledger.left_s)
    try:
        outcome = _run(job, cap_s)
    except (LimitsError, OSError) as error:
        outcome = Outcome("failed", str(error))
    # One that was ended early, for others or by what is not its own, can be taken up again.
    if outcome.end not in ("failed", "stopped") or cap_s == job.cap_s:
        ledger.add(job, outcome)
    per_step = f", {outcome.seconds:.3g} s a step" if outcome.ran else ""
    told = f": {outcome.told}" if outcome.told else ""
    say(f"{title}: {outcome.end}{per_step} ({time.monotonic() - started:.0f} s){told}")
    return outcome


def _run(job: Job, cap_s: float) -> Outcome:
    rate = job.rate or None
    with contextlib.ExitStack() as stack:
        if job.swap:
            stack.enter_context(Swap(job.folder, job.swap))
        # The group goes first: with it goes what lies in swap, and need not be brought back.
        group = stack.enter_context(Group(job.limit or None, rate, rate, disk=job.folder))
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        worker = WORKERS.get(job.model, "benchmarks._memory_worker")
        command = [sys.executable, "-m", worker, json.dumps(asdict(job))]
        place = json.dumps([str(group.disk_folder), group.device, group.place.version])
        environment = {**os.environ, "GULLIVER_BENCH_GROUP": place}
        started = time.monotonic()
        process = group.start(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        seen = _watch(group, process, started + cap_s)
        peak, kills = group.peak, group.kills
        took = time.monotonic() - started
        log.seek(0)
        text = log.read()
    return _judged(text, process.returncode, kills, took >= cap_s, took, peak, seen)


def _watch(group: Group, process: subprocess.Popen[Any], until: float) -> tuple[int, int]:
    """Waits for the end; returns the most anonymous and swapped bytes that were seen."""
    anonymous = swapped = 0
    while process.poll() is None:
        anonymous, swapped = max(anonymous, group.anonymous), max(swapped, group.swapped)
        if time.monotonic() > until:
            process.kill()
        time.sleep(LOOK_S)
    return anonymous, swapped


def _judged(
    text: str, code: int, kills: int, late: bool, took: float, peak: int, seen: tuple[int, int]
) -> Outcome:
    """Puts an outcome together from the worker's output and how it ended."""
    events = [json.loads(ln.removeprefix(MARK)) for ln in text.splitlines() if ln.startswith(MARK)]
    by_kind = {event["kind"]: event for event in events}
    steps = tuple(Step(**e["step"]) for e in events if e["kind"] == "step" and e["timed"])
    facts = {k: v for e in events if e["kind"] == "facts" for k, v in e["facts"].items()}
    last = max((event["at"] for event in events), default=0.0)
    ready = by_kind.get("ready", {}).get("at", 0.0)
    error = by_kind.get("error", {"end": "failed", "told": _last_line(text)})
    if kills:
        end, told = "killed", "killed by its limit"
    elif code == 0:
        end, told = "done", ""
    elif late:
        end, told = "stopped", f"stopped after {took:.0f} s"
    else:
        end, told = error["end"], error["told"]
    unfinished = took - last if end == "stopped" and ready else 0.0
    return Outcome(end, told, steps, unfinished, peak, *seen, facts)


def _last_line(text: str) -> str:
    lines = [ln.strip() for ln in text.splitlines() if ln.strip() and not ln.startswith(MARK)]
    return lines[-1][:300] if lines else "it said nothing"


def alone(job: Job, **changes: Any) -> Job:
    """Runs the same job without a limit or a disk, for comparison."""
    plain = {"contestant": PLAIN, "limit": 0, "rate": 0, "disk": 0, "options": {}, "warm_up": 1}
    return replace(job, **{**plain, **changes})


@contextlib.contextmanager
def folder_on_disk(parent: Path) -> Iterator[Path]:
    """A folder of this run, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="gulliver-memory-", dir=parent) as name:
        yield Path(name)
