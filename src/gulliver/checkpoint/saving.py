"""Saves steps asynchronously.

`agree_on_save` implements the agreement between ranks, which depends only on their statuses.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from gulliver.checkpoint.collect import RankContent, collect, install_hooks
from gulliver.checkpoint.folder import CheckpointFolder, FolderLock
from gulliver.checkpoint.manifest import checked_about, file_to_json
from gulliver.checkpoint.publishing import Heartbeat, create_heartbeats, publish, write_rank_report
from gulliver.checkpoint.snapshot import CopyStream, CudaCopyStream, Snapshot
from gulliver.checkpoint.tree import values_of
from gulliver.comm.collectives import gather_objects
from gulliver.comm.groups import host_rank_group, return_rank_group
from gulliver.errors import GulliverError, nearest
from gulliver.io.engine import Engine, IoError
from gulliver.io.native import default_engine
from gulliver.memory.pending import add_read_lock, drop_read_lock
from gulliver.options import positive_number, whole_number

log = logging.getLogger("gulliver")


@dataclass(frozen=True)
class Saved:
    """Result of a successful save."""

    # Number of the step that was saved.
    step: int
    # Bytes that this rank wrote.
    nbytes: int
    # Seconds for which training was blocked: in `save`, and until it could modify the state.
    stall_s: float
    # Seconds from the start until the state could be modified again.
    copied_s: float
    # Seconds from the start until the step was complete.
    total_s: float
    # Steps skipped since the save before this one (``when_busy="skip"``).
    skipped: int = 0


@dataclass
class RankStatus:
    """A rank's message to the others before a joint save."""

    skips: bool
    failure: Exception | None
    problem: Exception | None = None
    """Reason why this save cannot start."""
    digest: str = ""
    begun: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "skips": self.skips,
            "failure": None if self.failure is None else text_of(self.failure),
            "problem": None if self.problem is None else text_of(self.problem),
            "digest": self.digest,
            "save_id": uuid.uuid4().hex,
        }


@dataclass
class Save:
    """A step being saved."""

    step: int
    save_id: str
    begun: float
    skipped: int = 0
    snapshot: Snapshot | None = None
    engine: Engine | None = None
    is_ring: bool = False
    copy_stream: CopyStream | None = None
    skeletons: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    heartbeat: Heartbeat | None = None

    def report(self) -> Saved:
        assert self.snapshot is not None
        return Saved(
            self.step,
            self.snapshot.nbytes,
            self.snapshot.stall_s,
            self.snapshot.copied_s or 0.0,
            time.perf_counter() - self.begun,
            self.skipped,
        )


def agree_on_save(
    step: int, own: RankStatus, every: list[dict[str, Any]], raises: bool
) -> str | None:
    """Returns the id of the save, the same on every rank, or None to skip it."""
    failures = [(rank, status["failure"]) for rank, status in enumerate(every) if status["failure"]]
    problems = [(rank, status["problem"]) for rank, status in enumerate(every) if status["problem"]]
    skips = any(status["skips"] for status in every)
    if not failures and not problems and not skips:
        if len({status["digest"] for status in every}) == 1:
            return every[0]["save_id"]
        problems = [(0, "ranks save different states; mark values that differ with PerRank")]
    if failures:
        # Raised once; the next call saves again.
        raise own.failure or GulliverError(f"rank {failures[0][0]} failed: {failures[0][1]}")
    if not problems:
        return None
    problem = own.problem or GulliverError(f"step {step}: rank {problems[0][0]}: {problems[0][1]}")
    if raises:
        raise problem
    log.warning("step %d is not saved: %s; training continues without it", step, problem)
    return None


def text_of(problem: Exception) -> str:
    return str(problem) or type(problem).__name__


# Saves while training continues: `AsyncCheckpointer`.
#
# Read `AsyncCheckpointer.save`, then `_finish`, which runs in the background.


MODES = ("auto", "shadow", "ring")
BUSY = ("wait", "skip", "sparing")
COST = 0.1
"""Maximum slowdown of training by sparing saves, as a fraction."""
ON_ERROR = ("raise", "warn")
PAGE = 4 * 2**20
QUEUE = 2**18
"""Number of pages that may be queued, enough for 1 TiB of state."""
MIB = 2**20
LIMIT = "memory_limit"
NICE = 5
"""Niceness of the threads that copy: they use the time that training's threads leave."""
GROWTH = 32
"""Pages by which the shadow grows at a time; earlier pages are used meanwhile."""


class SavingCost:
    """Measures how much saves slow down training, by the times between calls of `save`."""

    def __init__(self) -> None:
        self._called: float | None = None
        self._was_busy = False
        # Mean seconds of a step without a save, of the last 20; 0 if there was none.
        self._calm = 0.0
        self._calm_steps = 0
        # Steps since the last save began, and their seconds beyond as many calm ones.
        self._steps, self._beyond = 0, 0.0

    def note(self, now: float, busy: bool) -> None:
        """Records a call, and whether a save was being written after the one before."""
        if self._called is not None:
            seconds = now - self._called
            self._steps += 1
            if not self._was_busy:
                self._calm_steps = min(self._calm_steps + 1, 20)
                self._calm += (seconds - self._calm) / self._calm_steps
            elif self._calm_steps:
                self._beyond += seconds - self._calm
        self._called, self._was_busy = now, busy

    def began(self) -> None:
        self._was_busy, self._steps, self._beyond = True, 0, 0.0

    @property
    def exceeded(self) -> bool:
        """Whether another save now would cost too much."""
        if not self._steps:
            return False  # the first call
        return not self._calm_steps or self._beyond > COST * self._calm * self._steps


# [Note: ranks] All ranks call `save` and `wait` together, and agree there on what has happened so
# far. Between these calls each rank's thread works independently: it reports what it wrote in a
# small file of the unfinished step, and rank 0 completes the step when all reports are there.
class AsyncCheckpointer:
    """Saves a program's state while the program continues.

    Native threads copy parameters and torch optimizer state during the next forward and backward;
    an optimizer step automatically waits for the tensors it updates. `save` returns when everything
    else (averages, buffers, frozen weights) has been copied, because it may change at any time.
    Other code that modifies trained parameters must call `wait_copied` first.

    Args:
        folder: folder of the run; every step becomes a subfolder.
        keep: number of newest steps to keep; 0 keeps all.
        mode: where the copy is held. ``shadow`` keeps a copy of the full state in host memory,
            which is allocated by the first save and reused: training only waits for a memory copy.
            ``ring`` holds only `ring_mb`: training waits if the disk is slower than a step.
            ``auto`` is ``ring`` if the copy exceeds `memory_limit` or some of the state is on disk,
            otherwise ``shadow``.
        ring_mb: size of the ring in MiB.
        memory_limit: bytes of host memory for a rank's copy; None for the available memory.
        on_error: reaction to a failure: ``raise`` raises it from the next call, ``warn`` logs it
            and continues.
        when_busy: behavior of `save` while a step is still being written. ``wait`` waits for it.
            ``skip`` skips the new step, so `save` may be called at every step: training does not
            wait for the disk, one state is in memory at a time, and the first call after the write
            saves its step. Skipped steps are counted in `skipped` and `last`. ``sparing`` is for
            calls at every step, too, and skips so many that the steps between calls take at most
            a tenth longer in the mean than those without a save.
        group: ranks that save together; None for all.
        engine: I/O engine; None for the best one on this machine. A given engine keeps its pool
            size.
        about: additional JSON values for the manifest.
        silence_s: seconds within which each rank has to start writing. A rank that ends during a
            save is detected immediately and named in the error.

    Raises:
        GulliverError: an option is unknown or out of range, or `about` is not JSON.

    Example:
        >>> checkpointer = AsyncCheckpointer("checkpoints")
        >>> checkpointer.save(step, {"model": model, "optimizer": optimizer})
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 3,
        mode: Literal["auto", "shadow", "ring"] = "auto",
        ring_mb: int = 64,
        on_error: Literal["raise", "warn"] = "raise",
        when_busy: Literal["wait", "skip", "sparing"] = "wait",
        group: dist.ProcessGroup | None = None,
        engine: Engine | None = None,
        about: Mapping[str, Any] | None = None,
        silence_s: float = 15.0,
        memory_limit: int | None = None,
    ) -> None:
        for name, value, choices in (
            ("mode", mode, MODES),
            ("on_error", on_error, ON_ERROR),
            ("when_busy", when_busy, BUSY),
        ):
            if value not in choices:
                raise GulliverError(
                    f"{name}={value!r} is not known: {nearest(str(value), choices)}"
                )
        ring_mb = whole_number("ring_mb", ring_mb)
        if ring_mb * 2**20 < 2 * PAGE:
            raise GulliverError(f"ring_mb={ring_mb} is too small; use at least {2 * PAGE // 2**20}")
        self.memory_limit = None if memory_limit is None else whole_number(LIMIT, memory_limit)
        if memory_limit is not None and memory_limit < 2 * PAGE:
            raise GulliverError(f"{LIMIT}={memory_limit} is too small; use at least {2 * PAGE}")
        self.folder = CheckpointFolder(Path(folder), keep)
        self.mode, self.on_error, self.when_busy = mode, on_error, when_busy
        self.about, self.silence_s = checked_about(about), positive_number("silence_s", silence_s)
        self._process = os.getpid()
        self.last: Saved | None = None
        # Statuses are in host memory: with a device group, gathering them would wait for its work.
        self._ranks = host_rank_group(group, "checkpoint")
        self.rank, self.world_size = self._ranks.rank, self._ranks.size
        self._ring_pages = min(ring_mb * 2**20, self.memory_limit or 2**63) // PAGE
        self.held = ""
        """Where the last copy was held, and why."""
        self._given = engine
        self._engine = engine
        self._copy_stream: CopyStream | None = None
        self._lock = FolderLock(self.folder.root)
        # One thread, created by the first save; the interpreter waits for it at exit.
        self._worker: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        self._snapshot: Snapshot | None = None
        self._failure: Exception | None = None
        self._caught: set[str] = set()
        self.saves = self.skipped = 0
        self._skipped_before = 0
        self._cost = SavingCost()
        self._stalled = 0.0
        self._finalize = weakref.finalize(self, self._lock.release)
        install_hooks()

    @property
    def stall_s(self) -> float:
        """Total seconds for which saves have stalled training."""
        return self._stalled + (0.0 if self._snapshot is None else self._snapshot.stall_s)

    def save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Starts saving a step (collective).

        Args:
            step: number of the step; an existing step with this number is replaced when the new one
                is complete.
            state: values by entry, such as ``{"model": model, "optimizer": adam, "epoch": 3}``:
                objects with a ``state_dict``, or tensors, numbers, text and dicts, lists and tuples
                of them. Tensors, except `Part`s, DTensors and `PerRank` values, must be the same on
                all ranks; each rank writes some of them.

        Returns:
            Whether the save was started: False if the step was skipped (see `when_busy`), or if it
            failed and ``on_error`` is ``warn``.

        Raises:
            GulliverError: the previous save failed (``on_error="raise"``), the folder cannot be
                written or another job has locked it, or something in the state cannot be saved.
        """
        self._check_process()
        with _without_collection():
            return self._save(step, state)

    def _save(self, step: int, state: Mapping[str, Any]) -> bool:
        begun = time.perf_counter()
        step = whole_number("step", step)
        if step < 0:
            raise GulliverError(f"step {step} cannot be saved: steps start at 0")
        busy = self._job is not None and not self._job.done()
        if busy and self.when_busy == "wait":
            self._join()
            waited = time.perf_counter() - begun
            log.warning(
                "step %d waited %.1f s: the step before was still being written", step, waited
            )
        self._cost.note(begun, busy)
        skips = busy and self.when_busy != "wait"
        skips = skips or (self.when_busy == "sparing" and self._cost.exceeded)
        # A rank that skips keeps its failure, so that the next call that saves raises it on all
        # ranks.
        status = RankStatus(skips, None if skips else self._pop_failure())
        collected = None if skips or status.failure else self._prepare(step, state, status)
        save_id = self._agree(step, status)
        if save_id is None:
            return False
        assert collected is not None
        skipped, self._skipped_before = self.skipped - self._skipped_before, self.skipped
        self._start(Save(step, save_id, begun, skipped), collected)
        self._cost.began()
        return True

    def _skip(self, step: int) -> None:
        if not self.skipped and self.rank == 0:
            log.warning(
                "step %d is not saved: the step before is still being written, or saves cost too "
                "much; with when_busy=%r the newest step is saved next, and skipped steps are "
                "counted",
                *(step, self.when_busy),
            )
        self.skipped += 1

    def _check_process(self) -> None:
        """Rejects calls in a forked process, which lacks the threads and would wait forever."""
        if os.getpid() != self._process:
            raise GulliverError(
                f"this checkpointer belongs to process {self._process}, which forked this one: "
                "create another one here, for another folder"
            )

    def _gather(self, mine: Any, failure: Exception | None) -> list[Any]:
        """Gathers all ranks' statuses; if a rank is gone, raises the known failure."""
        if self.world_size == 1:
            return [mine]
        try:
            return gather_objects(mine, self._ranks.process_group)
        except RuntimeError as error:
            raise failure or GulliverError(
                f"the ranks that save {self.folder.root} cannot agree; did one of them exit? "
                f"({error})"
            ) from error

    def _prepare(
        self, step: int, state: Mapping[str, Any], status: RankStatus
    ) -> RankContent | None:
        try:
            collected = collect(state, self.rank, self.world_size)
            self._check_limit(collected)
            if self.rank == 0:
                self._lock.take()
                partial = self.folder.begin(step)
                status.begun = True
                create_heartbeats(partial, self.world_size)
            status.digest = collected.digest
            return collected
        except Exception as error:
            # After any error, the other ranks must not wait for this one.
            status.problem = error
            return None

    def _check_limit(self, collected: RankContent) -> None:
        if self.mode == "shadow" and self.memory_limit is not None:
            leaves = (leaf for found in collected.tensors.values() for leaf in found.values())
            needed = sum(values_of(leaf).nbytes for leaf in leaves)
            if needed > self.memory_limit:
                raise GulliverError(
                    f"mode='shadow' needs {needed} bytes of host memory on rank {self.rank}, but "
                    f"{LIMIT} allows {self.memory_limit}; use mode='ring'"
                )

    def _agree(self, step: int, status: RankStatus) -> str | None:
        every = self._gather(status.to_json(), status.failure)
        save_id = None
        try:
            save_id = agree_on_save(step, status, every, self.on_error == "raise")
        finally:
            if save_id is None and status.begun:
                self.folder.discard(step)
        if not (save_id or any(each["failure"] or each["problem"] for each in every)):
            self._skip(step)
        return save_id

    def _start(self, save: Save, collected: RankContent) -> None:
        """Submits all copies and writes; later failures reach other ranks through reports."""
        self._stalled, self.saves = self.stall_s, self.saves + 1
        self._snapshot = None
        # Before anything that can fail: rank 0 must see that this rank lives until it reports.
        save.heartbeat = Heartbeat(self.folder.partial(save.step), self.rank)
        try:
            snapshot = Snapshot(collected, self.rank, self.world_size, self._caught)
            self._snapshot = save.snapshot = snapshot
            save.is_ring = self._choose(snapshot)
            save.engine = self._ready_engine()
            save.copy_stream = self._ready_copy_stream(snapshot)
            add_read_lock(snapshot)
        except Exception as error:
            save.problem, self._snapshot = error, None
        save.skeletons = {
            "entries": collected.skeletons,
            "own": collected.own,
            "kinds": collected.kinds,
        }
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "gulliver-save")
        self._job = self._worker.submit(self._finish, save)
        if save.snapshot is not None:
            save.snapshot.stall_s += time.perf_counter() - save.begun
        # Last, when the pages of all tensors are queued: tensors that may change without notice
        # must be copied before `save` returns, and are copied first.
        if self._snapshot is not None and self._snapshot.unguarded:
            self._snapshot.release(self._snapshot.unguarded)

    def _choose(self, snapshot: Snapshot) -> bool:
        """Whether this save uses a ring; records the reason in `held`."""
        needed, limit, on_disk = snapshot.source_bytes, self.memory_limit, snapshot.disk_bytes
        is_ring, reason = self.mode == "ring", f"because mode={self.mode!r} was given"
        if self.mode == "auto" and limit is not None and needed > limit:
            is_ring = True
            reason = f"a copy of {needed / MIB:.0f} MiB is more than {LIMIT} of {limit / MIB:.0f}"
        elif self.mode == "auto":
            is_ring = on_disk > 0
            reason = f"{on_disk / MIB:.0f} MiB of the state are on disk" if on_disk else "it fits"
        size = self._ring_pages * PAGE if is_ring else needed
        kind = "ring" if is_ring else "shadow"
        self.held = f"a {kind} of {size / MIB:.0f} MiB of host memory per rank: {reason}"
        if self.when_busy != "wait":
            self.held += "; one state at a time, since a second would wait for the same disk"
        return is_ring

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            self._engine = default_engine(
                page_bytes=PAGE, pages=self._ring_pages, queue=QUEUE, nice=NICE
            )
            if self.rank == 0:
                log.info("checkpoints: %s, %s", self._engine.kind, self.held)
        return self._engine

    def _ready_copy_stream(self, snapshot: Snapshot) -> CopyStream | None:
        devices = snapshot.devices
        if not devices:
            return None
        if len(devices) > 1 or next(iter(devices)).type != "cuda":
            raise GulliverError(
                f"tensors on {', '.join(sorted(map(str, devices)))} cannot be saved together; use "
                "one CUDA device and host memory"
            )
        if self._copy_stream is None:
            self._copy_stream = CudaCopyStream(next(iter(devices)))
        self._copy_stream.begin()
        return self._copy_stream

    def _finish(self, save: Save) -> None:
        partial = self.folder.partial(save.step)
        try:
            self._write_and_report(save, partial)
            if self.rank == 0:
                size, patience = self.world_size, self.silence_s
                publish(self.folder, save.step, save.save_id, size, self.about, patience)
        except Exception as error:
            # The first cause counts: consequences (no report, a closed file) would hide it.
            save.problem = save.problem or error
        if save.problem is None:
            self.last = save.report()
            return
        if save.snapshot is not None:
            drop_read_lock(save.snapshot)
            self._caught.update(save.snapshot.violations)
        self._failure = self._named(save.step, save.problem)
        if self.rank == 0:
            self.folder.discard(save.step)

    def _write_and_report(self, save: Save, partial: Path) -> None:
        reported = False
        try:
            if save.problem is None:
                self._write(save, partial)
            if save.problem is not None:
                # So that rank 0 stops waiting for this rank.
                write_rank_report(partial, self.rank, save.save_id, {"error": str(save.problem)})
            reported = True
        finally:
            if save.heartbeat is not None:
                save.heartbeat.end(reported)

    def _named(self, step: int, problem: Exception) -> GulliverError:
        text = text_of(problem)
        if isinstance(problem, IoError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            text += f"; {self.folder.needs()}"
        error = GulliverError(f"step {step} was not saved: {text}")
        error.__cause__ = problem
        return error

    def _write(self, save: Save, partial: Path) -> None:
        snapshot, engine = save.snapshot, save.engine
        assert snapshot is not None
        assert engine is not None
        try:
            snapshot.submit(engine, partial, save.copy_stream)
            # After `submit`, so that the first pages are copied while the rest of the shadow is
            # allocated.
            if not save.is_ring and self._given is None:
                self._grow(engine, snapshot)
            if save.copy_stream is not None:
                # Page-locking is slow, so the pool stays locked between saves.
                save.copy_stream.prepare(engine.regions)
                snapshot.pump(engine)
            snapshot.wait_copied()
            files = snapshot.finish(engine)
            drop_read_lock(snapshot)
            report = {
                **save.skeletons,
                "files": {name: file_to_json(entry) for name, entry in files.items()},
                "parts": snapshot.parts,
            }
            write_rank_report(partial, self.rank, save.save_id, report)
        except Exception as error:
            save.problem = error
            snapshot.abandon(engine, error)

    def _grow(self, engine: Engine, snapshot: Snapshot) -> None:
        wanted = snapshot.pages(engine.page_bytes)
        while engine.pages < wanted:
            engine.grow(min(GROWTH, wanted - engine.pages))

    def wait_copied(self) -> None:
        """Waits until the state may be modified in any way."""
        self._check_process()
        if self._snapshot is not None:
            self._snapshot.release(None)

    def wait(self) -> None:
        """Waits until the current save is complete (collective); then the next step is not skipped.

        Raises:
            GulliverError: the save failed (``on_error="raise"``).
        """
        self._check_process()
        self._join()
        self._cost = SavingCost()
        failure = self._pop_failure()
        mine = None if failure is None else str(failure)
        every = self._gather(mine, failure)
        for rank, reason in enumerate(every):
            if reason is not None:
                raise failure or GulliverError(f"rank {rank} failed: {reason}")

    def _join(self) -> None:
        if self._job is not None:
            if self._snapshot is not None:
                self._snapshot.release(None)  # compares versions; the job waits for it
            self._job.result()
            self._stalled, self._job, self._snapshot = self.stall_s, None, None

    def _pop_failure(self) -> Exception | None:
        """Returns the previous failure once; with ``warn``, logs it and returns None."""
        failure, self._failure = self._failure, None
        if failure is not None and self.on_error == "warn":
            log.warning("%s; training continues without it", failure)
            return None
        return failure

    def close(self) -> None:
        """Waits for the current save, then releases memory and folder (collective).

        Raises:
            GulliverError: the last save failed (``on_error="raise"``).
        """
        self._check_process()
        try:
            self.wait()
            return_rank_group(self._ranks)
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                self._worker = None
            if self._engine is not None and self._given is None:
                self._engine.close()
                self._engine = None
            self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Finishes this rank's save and unlocks the folder; used if other ranks may be dead."""
        if os.getpid() == self._process:
            self._join()
            self._finalize()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disables garbage collection, because a full collection takes 0.1 s or more."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
