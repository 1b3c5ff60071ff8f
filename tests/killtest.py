"""Kills a saving process at random moments, and sees what is left: `python -m tests.killtest`.

A child saves the same few megabytes again and again, other values each time, and reports every step
once `wait` has returned. It is killed (SIGKILL): after a random delay, when it enters a random part
of a save, after a random number of bytes has been written, or right before a random one of the
calls that name, rename, remove and force files. Then the newest step is loaded and compared bit for
bit, every complete step is verified, and the next child goes on in the same folder.

Read `Trial.kill_once`, then `tests.killchild`.

What the system does with a write that a killed process had handed over is the system's; that the
disk itself forgets, as when the power fails, cannot be tried here.
"""

from __future__ import annotations

import json
import math
import mmap
import multiprocessing as mp
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gulliver.checkpoint import CheckpointFolder, load, verify
from gulliver.checkpoint.folder import FolderLock
from gulliver.errors import GulliverError
from tests.killchild import KEEP, Child, Phase, State, serve
from tests.pool import start_server

START_S = 60.0
"""Seconds that a child may take to begin a save, or to end."""
CALLS = 60
"""About how many calls of `NAMING` a save makes."""
SAVE_S = 0.04
"""About what a save takes: random delays are of this order."""


@dataclass(frozen=True)
class Options:
    """What is tried."""

    kills: int = 200
    seed: int = 0
    ranks: Literal[1, 2] = 1
    mode: Literal["shadow", "ring"] = "shadow"
    folder: Path | None = None
    """Where to save, kept in the end; None for a temporary folder."""


@dataclass
class Tally:
    """What was found.

    Attributes:
        kills: so far.
        phases: in which rank 0 was when it ended.
        ways: how it was chosen when.
        checked: steps that were compared bit for bit, or verified.
        completed: steps that were reported complete.
        failures: what was wrong.
    """

    kills: int = 0
    phases: Counter[Phase] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    completed: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        hit = ", ".join(
            f"{phase.name.lower().replace('_', ' ')} {self.phases[phase]}" for phase in Phase
        )
        chosen = ", ".join(f"{count} {way}" for way, count in sorted(self.ways.items()))
        lines = [
            f"{self.kills} kills ({chosen}); {self.completed} steps reported complete, "
            f"{self.checked} checked, {len(self.failures)} failures",
            f"killed while: {hit}",
        ]
        return "\n".join([*lines, *self.failures[:10]])


class Trial:
    """A folder that one killed job after the other saves into."""

    def __init__(self, options: Options, root: Path) -> None:
        self.options, self.root = options, root / "run"
        self.tally = Tally()
        self._scratch = root
        self._draw = random.Random(options.seed)
        self._loaded, self._wanted = State(), State()
        self._nbytes = sum(t.nbytes for t in self._wanted._tensors())
        context = mp.get_context("forkserver")
        self._nursery, there = context.Pipe()
        self._server = context.Process(target=serve, args=(there,), daemon=True)
        self._server.start()
        there.close()
        self._number, self._known = 0, set[int]()
        """The number, and the steps, that were last known to be complete."""
        self._begun = 0

    def kill_once(self) -> None:
        """Lets a job save, kills it, and checks what it has left."""
        way = self._draw.choice(["after a delay", "in a phase", "after bytes", "at a call"])
        saves = self._draw.randint(1, 3)
        newest = max(self._known, default=None)
        marks, reports = self._scratch / "marks", self._scratch / "reports"
        marks.write_bytes(bytes(self.options.ranks))
        reports.write_bytes(b"")
        with open(marks, "r+b") as file:
            shared = mmap.mmap(file.fileno(), self.options.ranks)
        pids = self._start(
            marks,
            reports,
            self._draw.choice([None, None, newest]),
            self._random_bytes(saves) if way == "after bytes" else None,
            self._draw.randint(1, saves * CALLS) if way == "at a call" else None,
        )
        told = self._wait_and_kill(way, saves, pids, reports, shared)
        # The killed do not unmap: what they marked last is there.
        phase = Phase(shared[0])
        self.tally.phases[phase] += 1
        self.tally.ways[way] += 1
        self.tally.kills += 1
        for problem in self._problems(told):
            where = f"kill {self.tally.kills} ({way}, {phase.name})"
            self.tally.failures.append(f"{where}: {problem}")

    def close(self) -> None:
        """Ends the process that children are forked from."""
        self._nursery.close()
        self._server.join()

    def _random_bytes(self, saves: int) -> int:
        return int((saves - 1 + self._draw.random()) * self._nbytes / self.options.ranks)

    def _start(
        self,
        marks: Path,
        reports: Path,
        same_step: int | None,
        bytes_to_live: int | None,
        calls_to_live: int | None,
    ) -> list[int]:
        store = str(self._scratch / f"store-{self.tally.kills}")
        pids = []
        for rank in range(self.options.ranks):
            child = Child(
                rank,
                self.options.ranks,
                str(self.root),
                self.options.mode,
                str(marks),
                str(reports),
                store,
                self._begun + 1,
                same_step,
                bytes_to_live,
                calls_to_live,
            )
            self._nursery.send(child)
            pids.append(self._nursery.recv())
        return pids

    def _all_ended(self, patience_s: float = 0.0) -> bool:
        self._nursery.send(patience_s)
        return self._nursery.recv()

    def _wait_and_kill(
        self, way: str, saves: int, pids: list[int], reports: Path, shared: mmap.mmap
    ) -> list[list[Any]]:
        """Everything that the job has told when it is dead."""
        stuck = not self._wait_for(saves, reports)
        begun = time.perf_counter()
        if way == "in a phase":
            wanted = self._draw.choice(list(Phase)[1:])
            # Processes are fast: a sleep here would miss the short phases.
            while shared[0] != wanted and time.perf_counter() - begun < 0.5:
                pass
            _spin(self._draw.choice([0.0, self._draw.uniform(0.0, 5e-3)]))
        elif way == "after a delay":
            _spin(self._draw.uniform(0.0, 1.3 * SAVE_S))
        else:
            self._all_ended(1.0)
        self._draw.shuffle(pids)
        for pid in pids:
            self._nursery.send(pid)
            self._nursery.recv()
            if self._draw.random() < 0.5:
                _spin(self._draw.uniform(0.0, 5e-3))
        assert self._all_ended(START_S)
        told = _told(reports)
        return [*told, ["failed", f"nothing was saved in {START_S:.0f} s"]] if stuck else told

    def _wait_for(self, saves: int, reports: Path) -> bool:
        """Whether a job began its saves, or ended, in time."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            kinds = [kind for kind, *_ in _told(reports)]
            if kinds.count("begun") >= saves or "failed" in kinds or self._all_ended():
                return True
            time.sleep(1e-4)
        return False

    def _problems(self, told: list[list[Any]]) -> list[str]:
        """What is wrong with what a job has left."""
        failed = [text for kind, text, *_ in told if kind == "failed"]
        complete = [report for report in told if report[0] == "complete"]
        self.tally.completed += len(complete)
        self._begun += sum(report[0] == "begun" for report in told)
        self._known |= {step for _, step, _ in complete}
        self._number = max([self._number, *(number for *_, number in complete)])
        try:
            return failed + self._problems_on_disk()
        except GulliverError as error:
            return [*failed, str(error)]

    def _problems_on_disk(self) -> list[str]:
        problems = []
        folder = CheckpointFolder(self.root, KEEP)
        steps = folder.steps()
        if not steps and not self._known:
            return []
        newest = sorted(self._known | set(steps))[-KEEP:]
        # What a save under way makes superfluous may be gone; what counts among the newest may not.
        lost = [step for step in self._known if step >= newest[0] and step not in steps]
        if lost:
            problems.append(f"steps {sorted(lost)} were complete, now there are {steps}")
        self._known |= set(steps)
        number, difference = self._compare()
        if number < self._number:
            problems.append(f"save {self._number} was complete, the newest now is {number}")
        if difference:
            problems.append(f"save {number} was loaded with another {difference}")
        self._number = max(self._number, number)
        for step in steps:
            problems += map(str, verify(folder.path(step)))
            self.tally.checked += 1
        lock = FolderLock(self.root)
        lock.take()
        lock.release()
        return problems

    def _compare(self) -> tuple[int, str | None]:
        """Loads the newest step over the values of another; which save it is, what differs."""
        self._loaded.become(self._number + 101)
        found = load(self.root, self._loaded.entries())
        odd, number = found.values["odd"], found.values["number"]
        self._loaded.odd.update(odd)
        self._wanted.become(number)
        return number, self._loaded.difference(self._wanted)


def _told(reports: Path) -> list[list[Any]]:
    lines = reports.read_bytes().split(b"\n")
    # What follows the last line's end is nothing, or a line that is being written.
    return [json.loads(line) for line in lines[:-1]]


def _spin(seconds: float) -> None:
    """Waits more precisely than a sleep."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def run_kills(options: Options, root: Path) -> Tally:
    """Kills as often as the options say, in a folder; what was found."""
    trial = Trial(options, root)
    try:
        for _ in range(options.kills):
            trial.kill_once()
    finally:
        trial.close()
    return trial.tally


def main() -> None:
    """Runs it; exit code 1 when something was wrong."""
    import tyro

    options = tyro.cli(Options, description=__doc__)
    start_server()
    torch.set_num_threads(1)
    root = options.folder or Path(tempfile.mkdtemp(prefix="gulliver-killtest-"))
    root.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    try:
        tally = run_kills(options, root)
    finally:
        if options.folder is None:
            shutil.rmtree(root, ignore_errors=True)
    print(f"{options.ranks} ranks, mode {options.mode}, seed {options.seed}: {tally}")
    print(f"{math.ceil(time.perf_counter() - begun)} s")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
