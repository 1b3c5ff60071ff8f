"""Kills a saving process at random moments, and sees what is left: `python -m tests.killtest`.

A child saves the same few megabytes again and again, other values each time, and reports every step
once `wait` has returned. It is killed (SIGKILL): after a random delay, when it enters a random part
of a save, after a random number of bytes has been written, or right before a random one of the
calls that name, rename, remove and force files. Then the newest step is loaded and compared bit for
bit, every complete step is verified, and the next child goes on in the same folder.

Read `Trial.kill_once`, then `save_for_ever`, which is the child.

What the system does with a write that a killed process had handed over is the system's; that the
disk itself forgets, as when the power fails, cannot be tried here.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gulliver.checkpoint import AsyncCheckpointer, CheckpointFolder, PerRank, StepReader, load
from gulliver.checkpoint import _folder as folder_module
from gulliver.checkpoint._folder import FolderLock
from gulliver.checkpoint._snapshot import Snapshot
from gulliver.errors import GulliverError
from tests.pool import _consequence, start_server

KEEP = 2
RING_MB = 8
START_S = 60.0
"""Seconds that a child may take to begin a save, or to end."""
NAMING = ("mkdir", "replace", "unlink", "rmdir", "fsync")
"""What changes names on the disk, or forces them there, among the functions of `os`."""
CALLS = 60
"""About how many of these a save makes."""
SAVE_S = 0.04
"""About what a save takes: random delays are of this order."""


class Phase(IntEnum):
    """Where in a save a process is, as it marks in memory that its parent sees."""

    BETWEEN = 0
    BEGINNING = 1
    COPYING = 2
    WRITING = 3
    BEFORE_RENAME = 4
    AFTER_RENAME = 5


@dataclass(frozen=True)
class Options:
    """What is tried."""

    kills: int = 200
    seed: int = 0
    ranks: Literal[1, 2] = 1
    mode: Literal["shadow", "ring"] = "shadow"
    folder: Path | None = None
    """Where to save, kept in the end; None for a temporary folder."""


class State:
    """Something of everything that is saved; all its bytes follow from one number."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict(
            {
                "wide": nn.Linear(1021, 517),
                "table": nn.Embedding(3001, 129),
                "norm": nn.BatchNorm1d(77),
                "low": nn.Linear(333, 7).to(torch.bfloat16),
            }
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        self.ema = {n: p.detach().float().clone() for n, p in self.model.named_parameters()}
        self.odd = {
            "bytes": torch.zeros(4_194_301, dtype=torch.int8),
            "fp8": torch.zeros(70_003, dtype=torch.float8_e4m3fn),
            "flags": torch.zeros(65_537, dtype=torch.bool),
            "complex": torch.zeros(101, 103, dtype=torch.complex64),
            "double": torch.zeros((), dtype=torch.float64),
            "nothing": torch.zeros(0, 3),
            "turned": torch.zeros(129, 257).T,
        }
        self.number = 0
        draw = torch.Generator().manual_seed(0)
        self._patterns = [
            torch.randint(256, (tensor.nbytes,), dtype=torch.uint8, generator=draw)
            for tensor in self._tensors()
        ]

    def _tensors(self) -> list[Tensor]:
        moments = [v for state in self.optimizer.state.values() for v in state.values()]
        return [
            *self.model.state_dict().values(),
            *moments,
            *self.ema.values(),
            *(self.odd[n].T if n == "turned" else self.odd[n] for n in self.odd),
        ]

    @torch.no_grad()
    def become(self, number: int) -> None:
        """Takes the values of a number."""
        self.number = number
        for index, (tensor, pattern) in enumerate(
            zip(self._tensors(), self._patterns, strict=True)
        ):
            values = pattern + number * (2 * index + 1) % 256
            if tensor.dtype == torch.bool:
                values &= 1
            flat = tensor.detach().view(-1)
            flat.copy_(values.view(tensor.dtype))

    def entries(self) -> dict[str, Any]:
        """As it is saved and loaded."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "odd": self.odd,
            "number": self.number,
        }

    def difference(self, other: State) -> str | None:
        """The first tensor whose bits differ."""
        for index, (one, two) in enumerate(zip(self._tensors(), other._tensors(), strict=True)):
            if not torch.equal(_bits(one), _bits(two)):
                return f"tensor {index}, {one.dtype} {tuple(one.shape)}"
        return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# The child


@dataclass(frozen=True)
class Child:
    """What a rank of the saving job is told."""

    rank: int
    ranks: int
    root: str
    mode: Literal["shadow", "ring"]
    marks: str
    """A file: a byte for each rank, its `Phase`."""
    reports: str
    """A file: a line of JSON for everything that is told."""
    store: str
    first: int
    """The number that the first save has; the others count on."""
    same_step: int | None
    """Every save replaces this step; None makes a new one each time."""
    bytes_to_live: int | None
    """It kills itself when so many bytes have been written; None leaves that to the parent."""
    calls_to_live: int | None
    """It kills itself instead of making this call, counted over all of `NAMING`; None likewise."""


def tell(child: Child, kind: str, *content: Any) -> None:
    """Reports; one write, which a killed process has made or has not."""
    with open(child.reports, "ab", buffering=0) as file:
        file.write(json.dumps([kind, *content]).encode() + b"\n")


def save_for_ever(child: Child, state: State) -> None:
    """A rank that saves until it is killed; rank 0 reports."""
    if child.ranks > 1:
        import torch.distributed as dist

        store = dist.FileStore(child.store, child.ranks)
        dist.init_process_group("gloo", store=store, rank=child.rank, world_size=child.ranks)
    mark = _marker(child)
    if child.calls_to_live is not None and child.rank == 0:
        _end_at_call(child.calls_to_live)
    number = child.first
    checkpointer = AsyncCheckpointer(child.root, keep=KEEP, mode=child.mode, ring_mb=RING_MB)
    if child.bytes_to_live is not None and child.rank == 0:
        watch = (checkpointer, child.bytes_to_live)
        threading.Thread(target=_end_after, args=watch, daemon=True).start()
    while True:
        checkpointer.wait_copied()
        state.become(number)
        step = number if child.same_step is None else child.same_step
        mark(Phase.BEGINNING)
        if child.rank == 0:
            tell(child, "begun", step, number)
        checkpointer.save(step, {**state.entries(), "rank": PerRank(child.rank)})
        # What training does meanwhile: the next values, as soon as these have been copied.
        checkpointer.wait_copied()
        state.become(number + 1)
        checkpointer.wait()
        if child.rank == 0:
            tell(child, "complete", step, number)
        number += 1


def _marker(child: Child) -> Callable[[Phase], None]:
    """Notes in shared memory how far a save is; wraps what a save consists of."""
    with open(child.marks, "r+b") as file:
        shared = mmap.mmap(file.fileno(), child.ranks)

    def mark(phase: Phase) -> None:
        shared[child.rank] = phase

    def around(owner: Any, name: str, before: Phase | None, after: Phase | None) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                mark(before)
            result = inner(*args, **kwargs)
            if after is not None:
                mark(after)
            return result

        setattr(owner, name, wrapped)

    around(Snapshot, "submit", Phase.COPYING, None)
    around(Snapshot, "wait_copied", None, Phase.WRITING)
    around(Snapshot, "finish", None, Phase.BEFORE_RENAME)
    around(folder_module, "name_folder", None, Phase.AFTER_RENAME)
    around(CheckpointFolder, "publish", None, Phase.BETWEEN)
    return mark


def _end_at_call(nth: int) -> None:
    left = [nth]

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **kwargs)

        return call

    for name in NAMING:
        setattr(os, name, counted(getattr(os, name)))


def _end_after(checkpointer: AsyncCheckpointer, nbytes: int) -> None:
    while checkpointer._engine is None or checkpointer._engine.counters.written < nbytes:
        time.sleep(20e-6)
    os.kill(os.getpid(), signal.SIGKILL)


# Between them: a process that has imported and made everything, and forks children in no time


def serve(connection: Connection) -> None:
    """Answers until the connection is closed.

    To a `Child`, by forking it, with its number; to a number, by killing that; to seconds (a
    float), with whether all have ended by then.
    """
    torch.set_num_threads(1)
    state = State()
    living: dict[int, None] = {}
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            os._exit(0)
        if isinstance(asked, Child):
            pid = os.fork() or _run_child(asked, state)
            living[pid] = None
            connection.send(pid)
        elif isinstance(asked, int):
            # One that is not reaped yet: the number is nobody else's.
            if asked in living:
                os.kill(asked, signal.SIGKILL)
            connection.send(None)
        else:
            connection.send(_reaped(living, asked))


def _run_child(child: Child, state: State) -> NoReturn:
    # The kernel ends it when its parent ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    try:
        save_for_ever(child, state)
    except BaseException as error:
        # That the other rank is dead is no failure of this one.
        named = any(text in str(error) for text in ("has one of them ended?", "rank 1 ended"))
        kind = "left alone" if named or _consequence(error) == 2 else "failed"
        tell(child, kind, f"rank {child.rank}: {type(error).__name__}: {error}")
    os._exit(1)


def _reaped(living: dict[int, None], patience_s: float) -> bool:
    """Whether all children have ended, perhaps after waiting for them a while."""
    end = time.monotonic() + patience_s
    while True:
        for pid in tuple(living):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del living[pid]
        if not living or time.monotonic() >= end:
            return not living
        time.sleep(1e-4)


# The parent


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
            with StepReader(folder.path(step)) as reader:
                for _ in reader.verify():
                    pass
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


def run_kills(
    options: Options, root: Path, after_each: Callable[[Tally], None] | None = None
) -> Tally:
    """Kills as often as the options say, in a folder; what was found."""
    trial = Trial(options, root)
    try:
        for _ in range(options.kills):
            trial.kill_once()
            if after_each is not None:
                after_each(trial.tally)
    finally:
        trial.close()
    return trial.tally


def main() -> None:
    """Runs it with a progress bar; exit code 1 when something was wrong."""
    import tyro
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    options = tyro.cli(Options, description=__doc__)
    start_server()
    torch.set_num_threads(1)
    root = options.folder or Path(tempfile.mkdtemp(prefix="gulliver-killtest-"))
    root.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    begun = time.perf_counter()
    try:
        with Progress(*columns) as progress:
            bar = progress.add_task("kills", total=options.kills)

            def after_each(tally: Tally) -> None:
                wrong = f", {len(tally.failures)} FAILED" if tally.failures else ""
                progress.update(bar, completed=tally.kills, description=f"kills{wrong}")

            tally = run_kills(options, root, after_each)
    finally:
        if options.folder is None:
            shutil.rmtree(root, ignore_errors=True)
    print(f"{options.ranks} ranks, mode {options.mode}, seed {options.seed}: {tally}")
    print(f"{math.ceil(time.perf_counter() - begun)} s")
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
