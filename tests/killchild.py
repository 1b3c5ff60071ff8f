"""The process that `tests.killtest` kills: it saves the same few megabytes again and again.

Read `save_for_ever`. `serve` is the process that it is forked from: one that has imported and made
everything, and forks children in no time.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gulliver.checkpoint import AsyncCheckpointer, CheckpointFolder, PerRank
from gulliver.checkpoint import folder as folder_module
from gulliver.checkpoint.snapshot import Snapshot
from tests.pool import _consequence

KEEP = 2
RING_MB = 8
NAMING = ("mkdir", "replace", "unlink", "rmdir", "fsync")
"""What changes names on the disk, or forces them there, among the functions of `os`."""


class Phase(IntEnum):
    """Where in a save a process is, as it marks in memory that its parent sees."""

    BETWEEN = 0
    BEGINNING = 1
    COPYING = 2
    WRITING = 3
    BEFORE_RENAME = 4
    AFTER_RENAME = 5


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
        named = any(text in str(error) for text in ("did one of them exit?", "rank 1 ended"))
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
