"""Interface between a training script and the scheduler.

    job = elastic()
    first = booster.load(job.checkpoints, model, optimizer).step + 1 if job.resumes else 0
    for step in job.steps(first, STEPS):
        mine = job.share()                                   # of range(job.batch)
        loss = criterion(model(x[mine]), y[mine])            # a mean over this rank's samples
        booster.backward(loss * job.weight(), optimizer)     # gradients of the whole batch's mean
        optimizer.step()
        optimizer.zero_grad()
        if job.report(loss) or step % 100 == 99:             # True: save now; then the loop ends
            booster.save(job.checkpoints, step, model, optimizer)
    booster.close()

Without a scheduler the same script runs to its end, directly or with torchrun.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from gulliver.errors import GulliverError
from gulliver.hardware.scaling import batch_efficiency
from gulliver.jobs.log import Log
from gulliver.schedule.live.tracking import read_object, write_object

JOB, ATTEMPT, BATCH = "GULLIVER_JOB", "GULLIVER_JOB_ATTEMPT", "GULLIVER_JOB_BATCH"
"""Environment variables with the job's folder, attempt and initial batch size."""
SECONDS_BETWEEN = 0.2  # minimum seconds between writes of progress


def share_of(batch: int, part: int, parts: int) -> range:
    """Contiguous range of a batch's samples for one part; part sizes differ by at most one."""
    # Rank r of n takes the samples from floor(r B / n) to floor((r + 1) B / n) of B. Gradients are
    # averaged over ranks, so a rank's mean loss is weighted by its samples times n / B
    # (`Elastic.weight`): the step equals that of one rank up to rounding, for any number of slots.
    return range(part * batch // parts, (part + 1) * batch // parts)


def elastic(
    checkpoints: str | Path = "checkpoints", batch: int | None = None, samples: float | None = None
) -> Elastic:
    """Joins the job for which the scheduler started this rank.

    Args:
        checkpoints: checkpoint folder if there is no scheduler.
        batch: global batch size if there is no scheduler.
        samples: samples to process if there is no scheduler; None for no limit.
    """
    place = os.environ.get(JOB)
    if place is None:
        return Elastic(None, Path(checkpoints), batch, samples, 0)
    values = read_object(Path(place) / "job.json")
    if values is None:
        raise GulliverError(f"{JOB} is {place}, which contains no job; submit the job again")
    found = Elastic(
        Path(place),
        Path(place) / "checkpoints",
        int(os.environ.get(BATCH) or values["batch_size"]),
        values["samples"],
        int(os.environ.get(ATTEMPT) or 1),
    )
    found.base, found.noise = int(values["batch_size"]), float(values.get("noise", 0.0))
    return found


class Elastic:
    """A job as seen by its ranks; created by `elastic`."""

    def __init__(
        self,
        folder: Path | None,
        checkpoints: Path,
        batch: int | None,
        samples: float | None,
        attempt: int,
    ) -> None:
        self.folder, self.checkpoints, self.attempt = folder, checkpoints, attempt
        self._batch, self.samples = batch, samples
        self.base, self.noise = batch or 0, 0.0
        self.drawn = self.done = 0.0
        self._step: int | None = None
        self._leaving = False
        self._control: tuple[int, bool, int] = (-1, False, 0)
        self._pace = Pace()

    @property
    def batch(self) -> int:
        """Global batch size of the next step."""
        if self._batch is None:
            raise GulliverError("the batch size is unknown; call elastic(batch=...)")
        return self._batch

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint to load."""
        from gulliver.checkpoint.folder import CheckpointFolder

        found = self.checkpoints.is_dir()
        return found and CheckpointFolder(self.checkpoints).latest() is not None

    @property
    def leaving(self) -> bool:
        """Whether the scheduler has asked the job to save and stop."""
        return self._leaving

    def share(self, part: int | None = None, parts: int | None = None) -> range:
        """Samples of the global batch for this rank.

        Args:
            part: data-parallel index of this rank, if several ranks share a model.
            parts: number of data-parallel replicas.
        """
        world = _world()
        return share_of(
            self.batch,
            world.rank if part is None else part,
            world.size if parts is None else parts,
        )

    def weight(self, part: int | None = None, parts: int | None = None) -> float:
        """Scale of this rank's mean loss that yields the gradients of the global mean loss."""
        count = _world().size if parts is None else parts
        return len(self.share(part, parts)) * count / self.batch

    def rate_factor(self, rule: Literal["linear", "sqrt"] = "linear") -> float:
        """Learning rate factor if the batch size differs from the submitted one."""
        if rule not in ("linear", "sqrt"):
            raise GulliverError(f"rule {rule!r} is unknown; use 'linear' or 'sqrt'")
        grown = self.batch / self.base
        return grown if rule == "linear" else grown**0.5

    def steps(self, first: int = 0, last: int | None = None) -> Iterator[int]:
        """Yields step numbers until the job is done, or has saved because it must leave.

        Args:
            first: 0, or the step after the loaded checkpoint.
            last: total number of steps of the job; None to continue until all samples are done.

        Raises:
            GulliverError: the job has no length, or a step was not reported.
        """
        if last is None and self.samples is None:
            raise GulliverError("the job has no length; pass last to job.steps(first, last)")
        self._begin(first)
        step = first
        while not self._leaving and (step < last if last is not None else not self._complete()):
            self._step = step
            yield step
            if self._step is not None:
                raise GulliverError(f"step {step} was not reported; call job.report(loss) in it")
            step += 1

    def report(
        self, loss: Any = None, samples: int | None = None, noise: float | None = None
    ) -> bool:
        """Reports that a step is done; every rank calls it once per step.

        Args:
            loss: this rank's mean loss, a number or tensor; the mean over all ranks' samples is
                stored.
            samples: samples processed by this rank; default: its share. If several ranks share a
                model, all but one of them pass 0.
            noise: gradient noise scale in samples, if measured.

        Returns:
            Whether to save now because the scheduler wants the job to leave; `steps` ends then.
        """
        if self._step is None:
            raise GulliverError("report must be called exactly once in each step of job.steps")
        count = len(self.share()) if samples is None else samples
        leave, batch = self._read_requests()
        # While it cannot be measured, the last known value is kept.
        noise = float(noise) if noise is not None and math.isfinite(noise) else self.noise
        drawn, mean, leave, batch, self.noise = _agree(count, loss, leave, batch, noise)
        self.drawn += drawn
        self.done += drawn * (
            batch_efficiency(self.noise, self.base, self.batch)
            if self.base and self.batch != self.base
            else 1.0
        )
        # A job that has reached its end need not leave.
        self._leaving = leave and not self._complete()
        if self.folder is not None and _world().is_main:
            self._write(drawn, mean)
        self._batch = batch or self._batch
        self._step = None
        return self._leaving

    def _complete(self) -> bool:
        # With a small tolerance: done is a sum of rounded numbers if batches differ.
        return self.samples is not None and self.done >= self.samples * (1 - 1e-12)

    def _begin(self, first: int) -> None:
        """Restores the counts at step `first`, and removes later steps from the curve."""
        from gulliver.comm.collectives import broadcast_object

        counted = (0.0, 0.0)
        if self.folder is not None and _world().is_main:
            log = Log(self.folder / "curve.jsonl")
            log.cut(first - 1)
            lines = log.read()
            if lines:
                counted = lines[-1]["drawn"], lines[-1]["done"]
        self.drawn, self.done = broadcast_object(counted)
        self._pace.begin(_world().size, first)
        if self.folder is not None and _world().is_main:
            self._report_step()

    def _read_requests(self) -> tuple[bool, int]:
        """Reads the scheduler's requests on rank 0: whether to leave, and the next batch size."""
        if self.folder is None or not _world().is_main:
            return False, 0
        path = self.folder / "control.json"
        try:
            changed = path.stat().st_mtime_ns
        except OSError:
            return False, 0
        if changed != self._control[0]:
            found = read_object(path) or {}
            mine = found.get("attempt") == self.attempt
            leave, batch = bool(found.get("leave")) and mine, int(found.get("batch", 0)) * mine
            self._control = changed, leave, batch
        return self._control[1:]

    def _write(self, drawn: float, mean: float | None) -> None:
        assert self.folder is not None
        now = time.time()
        line = {"step": self._step, "samples": drawn, "drawn": self.drawn, "done": self.done}
        line |= {"loss": mean, "batch": self.batch, "attempt": self.attempt, "time": now}
        Log(self.folder / "curve.jsonl").append(line)
        self._pace.step(now)
        if self._leaving or self._complete() or self._pace.due(now):
            self._report_step()

    def _report_step(self) -> None:
        assert self.folder is not None
        progress = {"attempt": self.attempt, "drawn": self.drawn, "done": self.done}
        progress |= {"noise": self.noise, "batch": self.batch, "leaving": self._leaving}
        write_object(self.folder / "progress.json", progress | self._pace.values(self._step))


class Pace:
    """Measures the steps of one attempt, except the first, which is a warm-up."""

    def begin(self, ranks: int, first: int) -> None:
        self.ranks, self.first = ranks, first
        self.begun = self.last = self.written = time.time()
        self.warm, self.count = self.begun, 0

    def step(self, now: float) -> None:
        self.count += 1
        self.warm = now if self.count == 1 else self.warm
        self.last = now

    def due(self, now: float) -> bool:
        """Whether to write progress: after the first step, and then periodically."""
        if self.count > 1 and now - self.written < SECONDS_BETWEEN:
            return False
        self.written = now
        return True

    def values(self, step: int | None) -> dict[str, Any]:
        """Measurements for the scheduler; times are Unix times."""
        mean = (self.last - self.warm) / (self.count - 1) if self.count > 1 else None
        return {
            "ranks": self.ranks,
            "first": self.first,
            "step": step,
            "steps": self.count,
            "seconds": mean,
            "begun": self.begun,
            "time": self.last,
        }


def _world() -> Any:
    from gulliver.comm.world import current_world

    return current_world()


def _agree(
    count: int, loss: Any, leave: bool, batch: int, noise: float
) -> tuple[float, float | None, bool, int, float]:
    """Sums counts over ranks, and broadcasts the scheduler's requests from rank 0."""
    world = _world()
    value = None if loss is None else float(getattr(loss, "detach", lambda: loss)())
    if world.size == 1:
        return float(count), value, leave, batch, noise
    import torch
    from torch import distributed as dist

    from gulliver.comm.world import guard

    weighed = 0.0 if value is None or not count else value * count
    mine = [count, weighed, count * (value is not None)]
    mine += [leave, batch, noise] if world.is_main else [0, 0, 0]
    numbers = torch.tensor(mine, dtype=torch.float64, device=world.device)
    with guard():
        dist.all_reduce(numbers)
    drawn, total, progress, left, size, scale = numbers.tolist()
    return drawn, total / progress if progress else None, left > 0, int(size), scale


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Reads a job's valid steps without duplicates: step, samples, loss, batch, attempt."""
    return Log(folder / "curve.jsonl").read()
