"""What `benchmarks.checkpoint` measures, in a process of its own: training that is saved one way.

`python -m benchmarks._checkpoint_saver JOB` with a `Job` as JSON trains, saves while it trains,
saves alone, loads again, and ends with a line of JSON: a `Run`. Its memory is watched from outside.

Read `measure`. A contestant is an `Entrant`: how it saves, when that is complete, how it loads.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._models import GPT, VOCABULARY
from gulliver.checkpoint import AsyncCheckpointer, load
from gulliver.checkpoint.tree import split_state

BLOCK = 4 * 2**20
TORCH_SAVE = "torch.save"
THREAD, PROCESS = "dcp.async_save thread", "dcp.async_save process"
SHADOW, RING, SPARING = "ours, shadow", "ours, ring", "ours, sparing"
PAIRS = 3  # Saves without training, each with a raw write beside it
COPIES = 4  # Of every parameter in the state: itself, its average, and two moments of AdamW


@dataclass(frozen=True)
class Job:
    """Work of one process."""

    entrant: str  # its name
    folder: str  # where it saves; emptied by it
    gb: float  # of state
    threads: int  # of torch, for the training
    length: int  # tokens of a batch
    saves: int  # while training, the first apart
    calm: int  # steps without a save before and after each
    ring_mb: int  # of our ring
    every: int = 0  # steps that are all saved, instead of single saves


@dataclass
class During:
    """A save while training goes on.

    Attributes:
        begun, ended: `time.perf_counter`, of the call and of the end of the last step in the
            way.
    """

    begun: float
    ended: float
    call_s: float  # until the call returned
    held_s: float  # what training could not go on for: the call, and waits before the next update
    beyond_s: float  # what the steps until completion took more than undisturbed ones, the call too
    total_s: float  # until it was complete and forced to the disk
    # median of the steps that were wholly under way while it was saved; None for none
    step_s: float | None
    calm_s: float  # median of the undisturbed steps around it


@dataclass
class Every:
    """Training of which every step is to be saved, with one state in flight.

    Attributes:
        begun, ended: `time.perf_counter` of the first and the last of these steps.
    """

    begun: float
    ended: float
    ratio: float  # seconds of a step, its save included, over those of calm steps around them
    worst: float  # the same of the slowest step
    calm_s: float  # mean of the calm steps
    written: int  # states
    skipped: int  # steps whose state was not saved, as the one before was being written


@dataclass
class Run:
    """Results of one process."""

    nbytes: int  # of the state
    forward_backward_s: float  # median, undisturbed
    # `time.perf_counter` when undisturbed training began and ended, before the first save
    calm: tuple[float, float]
    during: list[During] = field(default_factory=list)  # the saves
    # saves that nothing disturbs, until each was on the disk
    alone_s: list[float] = field(default_factory=list)
    # as many bytes written without anything else, right before or after each of these
    raw_s: list[float] = field(default_factory=list)
    load_s: float = 0.0  # all tensors filled again, files not in the page cache
    equal: bool = False  # whether they were what had been saved, to the bit
    every: Every | None = None  # where that was the job


class Training:
    """A GPT, AdamW and an average of the weights."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        torch.manual_seed(0)
        parameters = job.gb * 1e9 / COPIES / 4
        width = 512 if job.gb <= 2 else 1024
        depth = round((parameters - 2 * VOCABULARY * width) / (12 * width**2))
        self.model = GPT(width, depth, job.length)
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.ids = torch.randint(VOCABULARY, (1, job.length + 1))
        self.forward_backward: list[float] = []
        self.updating: list[float] = []

    def step(self) -> float:
        """A step of training; its seconds."""
        begun = time.perf_counter()
        logits = self.model(self.ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten()).backward()
        between = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        weights = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 0.001)
        ended = time.perf_counter()
        self.forward_backward.append(between - begun)
        self.updating.append(ended - between)
        return ended - begun

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.average, "optimizer": self.optimizer}

    def nested(self) -> dict[str, Any]:
        """The same for those who want dicts."""
        return {
            "model": dict(self.model.state_dict()),
            "ema": self.average,
            "optimizer": self.optimizer.state_dict(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of it, by name; to be read from, or filled."""
        leaves, _ = split_state(self.nested())
        return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}


@dataclass
class Pending:
    """A save that was begun: `wait` returns when it is complete, `ended` is when that was."""

    wait: Callable[[], None]
    ended: Callable[[], float | None]
    held: Callable[[], float] = lambda: 0.0
    """Seconds for which it has held up others than the caller."""


def _complete() -> Pending:
    now = time.perf_counter()
    return Pending(lambda: None, lambda: now)


class Entrant(ABC):
    """A way to save; `save` to a new folder each time."""

    def __init__(self, training: Training, job: Job) -> None:
        self.training, self.job = training, job
        self.pending: Pending | None = None

    @abstractmethod
    def save(self, folder: Path, step: int) -> Pending:
        """Begins."""

    @abstractmethod
    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fills tensors."""

    def save_unless_busy(self, folder: Path, step: int) -> bool:
        """Begins, or skips the step if the one before is still being written."""
        if self.pending is not None:
            if self.pending.ended() is None:
                return False
            self.pending.wait()
        self.pending = self.save(folder, step)
        return True

    def finish(self) -> None:
        """Waits for what was begun."""
        if self.pending is not None:
            self.pending.wait()

    def close(self) -> None:
        return


class TorchSave(Entrant):
    """`torch.save` and fsync."""

    def save(self, folder: Path, step: int) -> Pending:
        folder.mkdir(parents=True)
        torch.save(self.training.nested(), folder / "state.pt")
        force(folder)
        return _complete()

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        found, _ = split_state(torch.load(folder / "state.pt", weights_only=True))
        fill(tensors, found)


class DistributedAsync(Entrant):
    """`torch.distributed.checkpoint.async_save` with a stager that keeps its memory."""

    def __init__(self, training: Training, job: Job) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(training, job)
        if not dist.is_initialized():
            scratch = tempfile.mkdtemp(dir=job.folder)
            dist.init_process_group("gloo", init_method=f"file://{scratch}/s", rank=0, world_size=1)
        # Shared memory is what the other process gets it by. Copied by the call itself, which is
        # what its documentation has users do before they change the state.
        self.stager = DefaultStager(StagingOptions(False, job.entrant == PROCESS, False, False))

    def save(self, folder: Path, step: int) -> Pending:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        process = self.job.entrant == PROCESS
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        found: Any = dcp.async_save(
            self.training.nested(),
            checkpoint_id=folder,
            async_checkpointer_type=kind,
            async_stager=self.stager,
        )
        future = getattr(found, "upload_completion", found)
        ended: list[float] = []
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return Pending(lambda: future.result(), lambda: ended[0] if ended else None)

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.training.nested(), checkpoint_id=folder)


class Ours(Entrant):
    """`gulliver.checkpoint.AsyncCheckpointer`."""

    def __init__(self, training: Training, job: Job) -> None:
        super().__init__(training, job)
        mode = "ring" if job.entrant == RING else "shadow"
        self.checkpointer = AsyncCheckpointer(
            Path(job.folder) / "ours",
            keep=0,
            mode=mode,
            ring_mb=job.ring_mb,
            when_busy=("sparing" if job.entrant == SPARING else "skip") if job.every else "wait",
        )

    def save(self, folder: Path, step: int) -> Pending:
        begun = time.perf_counter()
        self.checkpointer.save(step, self.training.state())
        snapshot = self.checkpointer._snapshot
        assert snapshot is not None
        in_call = snapshot.stall_s

        def ended() -> float | None:
            last = self.checkpointer.last
            return begun + last.total_s if last is not None and last.step == step else None

        return Pending(
            self.checkpointer.wait,
            ended,
            lambda: snapshot.stall_s - in_call,
        )

    def save_unless_busy(self, folder: Path, step: int) -> bool:
        return self.checkpointer.save(step, self.training.state())

    def finish(self) -> None:
        self.checkpointer.wait()

    def load(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        entries: dict[str, dict[Any, Any]] = {}
        for name, tensor in tensors.items():
            entry, inner = name.split(".", 1)
            held = entries.setdefault(entry, {})
            if entry == "optimizer":
                # As its state_dict has them: by number, then by kind.
                _, number, inner = inner.split(".")
                held = held.setdefault("state", {}).setdefault(int(number), {})
            held[inner] = tensor
        load(folder, entries, strict=False)

    def close(self) -> None:
        self.checkpointer.close()


ENTRANTS: dict[str, type[Entrant]] = {
    TORCH_SAVE: TorchSave,
    THREAD: DistributedAsync,
    PROCESS: DistributedAsync,
    SHADOW: Ours,
    RING: Ours,
    SPARING: Ours,
}


def force(folder: Path) -> None:
    """Forces the files of a folder to the disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], found: Mapping[str, Any]) -> None:
    """Copies what was loaded to where it belongs."""
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def write_raw(path: Path, nbytes: int) -> float:
    """Writes bytes past the page cache in blocks of 4 MiB, and forces them; seconds."""
    import mmap

    memory = mmap.mmap(-1, BLOCK)
    memory.write(os.urandom(BLOCK))
    begun = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        for offset in range(0, nbytes, BLOCK):
            if os.pwrite(handle, memory, offset) != BLOCK:
                raise OSError("a write was cut short")
        os.fsync(handle)
    finally:
        os.close(handle)
    seconds = time.perf_counter() - begun
    return seconds / (-(-nbytes // BLOCK) * BLOCK) * nbytes


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: zlib.crc32(_bytes(t)) for name, t in tensors.items()}


def save_during(training: Training, entrant: Entrant, folder: Path, step: int, calm: int) -> During:
    undisturbed = [training.step() for _ in range(calm)]
    begun = time.perf_counter()
    pending = entrant.save(folder, step)
    call_s = time.perf_counter() - begun
    steps, wholly = 0, []
    while steps == 0 or pending.ended() is None:
        seconds = training.step()
        steps += 1
        done = pending.ended()
        if done is None or done >= time.perf_counter():
            wholly.append(seconds)
    ended = time.perf_counter()
    pending.wait()
    complete = pending.ended()
    assert complete is not None
    undisturbed += [training.step() for _ in range(calm)]
    normal = statistics.median(undisturbed)
    return During(
        begun,
        ended,
        call_s,
        call_s + pending.held(),
        ended - begun - steps * normal,
        complete - begun,
        statistics.median(wholly) if wholly else None,
        normal,
    )


def save_every(
    training: Training, entrant: Entrant, place: Callable[[int], Path], job: Job
) -> Every:
    """Trains and saves every step; calm steps before and after say how long steps take alone."""
    # Memory is taken by a save that does not count.
    save_alone(entrant, place(0), 0)
    calm = [training.step() for _ in range(job.calm)]
    seconds, written = [], 0
    begun = time.perf_counter()
    for step in range(1, job.every + 1):
        start = time.perf_counter()
        training.step()
        written += entrant.save_unless_busy(place(step), step)
        seconds.append(time.perf_counter() - start)
    ended = time.perf_counter()
    entrant.finish()
    calm += [training.step() for _ in range(job.calm)]
    normal = statistics.mean(calm)
    ratio, worst = statistics.mean(seconds) / normal, max(seconds) / normal
    return Every(begun, ended, ratio, worst, normal, written, job.every - written)


def save_alone(entrant: Entrant, folder: Path, step: int) -> float:
    """A save while nothing else goes on; seconds until it is on the disk."""
    begun = time.perf_counter()
    pending = entrant.save(folder, step)
    pending.wait()
    ended = pending.ended()
    assert ended is not None
    return ended - begun


def cold(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def measure(job: Job) -> Run:
    """Everything that one contestant does."""
    root = Path(job.folder)
    training = Training(job)
    for _ in range(2):
        training.step()
    entrant = ENTRANTS[job.entrant](training, job)
    begun = time.perf_counter()
    for _ in range(job.calm):
        training.step()
    calm = (begun, time.perf_counter())
    forward_backward = statistics.median(training.forward_backward[-job.calm :])
    run = Run(sum(t.nbytes for t in training.tensors().values()), forward_backward, calm)

    def place(step: int) -> Path:
        # Ours names its folders itself.
        ours = isinstance(entrant, Ours)
        return root / "ours" / f"step-{step:08d}" if ours else root / f"step-{step}"

    if job.every:
        run.every = save_every(training, entrant, place, job)
        return run
    for step in range(job.saves):
        run.during.append(save_during(training, entrant, place(step), step, job.calm))
        shutil.rmtree(place(step))
    last = job.saves
    for number in range(PAIRS):
        # Nothing is removed between the two: the file system would still be at that.
        if number % 2 == 0:
            run.raw_s.append(write_raw(root / f"raw-{number}", run.nbytes))
        run.alone_s.append(save_alone(entrant, place(last := job.saves + number), last))
        if number % 2 == 1:
            run.raw_s.append(write_raw(root / f"raw-{number}", run.nbytes))
    tensors = training.tensors()
    wanted = checksums(tensors)
    entrant.close()
    for tensor in tensors.values():
        tensor.detach().zero_()
    cold(place(last))
    begun = time.perf_counter()
    entrant.load(place(last), tensors)
    run.load_s = time.perf_counter() - begun
    run.equal = checksums(tensors) == wanted
    return run


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    run = measure(job)
    print(json.dumps(asdict(run)), flush=True)
    # Pools of other libraries may hang when they are taken down; everything is written.
    sys.stdout.flush()
    _end_children()
    os._exit(0)


def _end_children() -> None:
    import multiprocessing as mp

    for child in mp.active_children():
        child.kill()
        child.join()
    assert threading.current_thread() is threading.main_thread()


if __name__ == "__main__":
    main()
