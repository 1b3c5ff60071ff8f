"""The training loop of all jobs: fine-tuning, DreamBooth, video models, autoencoders and drafts.

Read `TrainingLoop.train`, then `_step`. A job subclasses `TrainingLoop` and defines where batches
come from (`batches`), what a step computes (`forward_backward`), and what is saved with model and
optimizer (`state`, `load_state`). The loop is independent of data and loss; the booster handles how
parameters are stored.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.comm.collectives import all_reduce, barrier, broadcast_object
from gulliver.comm.world import World
from gulliver.errors import GulliverError
from gulliver.jobs.display import Display, Scalars, console, memory_in_use
from gulliver.jobs.log import derive
from gulliver.jobs.run_folder import RunFolder
from gulliver.jobs.stop import StopRequest
from gulliver.jobs.trackers import track
from gulliver.options import Options, size_text


@dataclass(frozen=True)
class Outcome:
    """Result of a training job.

    Attributes:
        step: last step.
        finished: whether the run is complete; False if a signal stopped it.
        seconds: wall time of training, including the runs that this one resumed.
        best: lowest loss on held-out samples; nan if not evaluated.
        result: file or folder of the result; None if there is none yet.
    """

    step: int
    finished: bool
    seconds: float = 0.0
    best: float = math.nan
    result: Path | None = None


@dataclass(frozen=True)
class LoopOptions(Options):
    """Options of a training loop.

    Attributes:
        title: title of the progress bar.
        steps: optimizer steps of the full run.
        save_every: steps between checkpoints.
        seed: seed of the run.
        stream: number that separates the loop's seeds from other seeds of the job.
        log_every: steps between log lines.
        clip: maximum gradient norm; None or 0 disables clipping.
        frozen: whether checkpoints include frozen parameters.
        use_async: whether checkpoints are written while training continues.
        rate_option: name of the option that a diverged run's error suggests lowering.
        report_to: names of the experiment trackers.
    """

    title: str
    steps: int
    save_every: int
    seed: int = 0
    stream: int = 3
    log_every: int = 1
    clip: float | None = None
    frozen: bool = True
    use_async: bool = True
    rate_option: str = "--learning-rate"
    report_to: tuple[str, ...] = ("tensorboard",)


class TrainingLoop(ABC):
    """Training loop over batches; jobs subclass it."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        options: LoopOptions,
        booster: Any,
        boosted: tuple[Any, Any, Any],
        place: tuple[int, int] = (0, 1),
        replicas: int = 1,
    ) -> None:
        self.run, self.world, self.options, self.booster = run, world, options, booster
        self.model, self.optimizer, self.scheduler = boosted
        # Index of this rank among those that read different samples, and their number; and the
        # number of ranks that compute a sample together, whose metrics count once.
        self.place, self.replicas = place, replicas
        self.step_number, self.saved_step, self.seconds = 0, 0, 0.0
        self.position: Any = None  # in the data, after `step_number` steps
        self.stop = StopRequest()
        self.display: Display
        self.scalars: Scalars

    # What a job must define.

    @abstractmethod
    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yields batches endlessly from the current position, each with the position after it.

        The position is saved only after the step, so batches may be prefetched.
        """

    @abstractmethod
    def forward_backward(self, batch: Any) -> Mapping[str, Tensor | float] | None:
        """Computes gradients; returns this rank's share of ``loss`` and other metrics."""
        # Metrics are summed over ranks, so every rank must return the same names. None, on all
        # ranks, skips the step because there is nothing to learn from.

    # What a job may define.

    @property
    def is_over(self) -> bool:
        return self.step_number >= self.options.steps

    def after_update(self) -> Mapping[str, float]:
        """Called after the optimizer step; returns additional metrics, the same on all ranks."""
        return {}

    def begin(self) -> bool:
        """Called before the first step; returns whether a signal stopped the run."""
        return False

    def evaluate(self) -> None:  # noqa: B027
        """Called after every step, before its checkpoint, to evaluate and to draw samples."""

    def after_saving(self, stopping: bool) -> bool:
        """Called after every step and its checkpoint; returns whether a signal stopped the run."""
        return False

    def describe(self, line: dict[str, Any], batch: Any, seconds: float) -> dict[str, str]:
        """Adds to a step's log line; returns the metrics for the progress bar."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns additional checkpoint entries; ``run`` may only have plain values."""
        return {}

    def loaded_in_place(self) -> dict[str, Any]:
        """Returns the entries that resuming fills in place; `load_state` may load others."""
        return {}

    def load_state(self, run: dict[str, Any], folder: Path) -> None:  # noqa: B027
        """Restores the ``run`` entry of `state` and seeks to its ``position`` in the data."""

    # The loop.

    def start(self, checkpoint: Path | None, **facts: Any) -> None:
        """Starts a run or resumes it from a checkpoint; writes its description (collective)."""
        if checkpoint is not None:
            self.restore(checkpoint)
        if self.world.is_main:
            self.run.write(**facts)
            # Evaluations before the first step have step 0, and are also repeated.
            self.run.cut(-1 if checkpoint is None else self.step_number)
            self.booster.plan.save(self.run.folder / "plan.yaml")
        barrier()

    def train(self, stop: StopRequest) -> bool:
        """Trains until the end or a signal, and saves; returns whether the run is complete."""
        self.stop = stop
        options, main = self.options, self.world.is_main
        facts = self.run.values().get("options", {}) if main else {}
        folder, step = self.run.folder, self.step_number
        with (
            track(options.report_to, folder, step, main, facts) as self.scalars,
            Display(options.title, options.steps, self.step_number, main) as self.display,
        ):
            if not self.begin() and not self.is_over:
                self._steps()
        self.booster.close()
        if not self.is_over and main:
            console().print(
                f"stopped at step {self.step_number} of {options.steps}; continue with --resume "
                f"--out {self.run.folder}"
            )
        return self.is_over

    def _steps(self) -> None:
        for batch, position in self.batches():
            before = self.step_number
            stopping = self._step(batch, position)
            stepped = self.step_number > before
            if stepped:
                self.evaluate()
            due = stepped and self.step_number % self.options.save_every == 0
            # Evaluations come first, because the checkpoint contains their results.
            if self.is_over or stopping or due:
                self.save()
            if stepped and self.after_saving(stopping):
                stopping = True
            if self.is_over or stopping:
                return

    def _step(self, batch: Any, position: Any) -> bool:
        """Runs and reports one optimizer step; returns whether any rank received a signal."""
        started = time.monotonic()
        # Seeded at each step, so that a resumed run needs no saved generator.
        seed, stream = self.options.seed, self.options.stream
        torch.manual_seed(derive(seed, stream, self.step_number, self.place[0]))
        shares = self.forward_backward(batch)
        found, wishes = self._add_up(shares or {})
        if shares is None:
            return wishes > 0
        norm = float(self.optimizer.clip_grad_by_norm(self.options.clip or math.inf))
        # Before the optimizer's step: the weights are still those of the last good step.
        if not math.isfinite(found["loss"]) or not math.isfinite(norm):
            self._refuse_divergence(found["loss"], norm)
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step_number, self.position = self.step_number + 1, position
        found |= self.after_update()
        took = time.monotonic() - started
        self.seconds += took
        line = {"step": self.step_number, **found, "grad_norm": norm, "learning_rate": rate}
        if self.world.is_main:
            self._report(line, batch, took)
        return wishes > 0

    def _add_up(self, shares: Mapping[str, Tensor | float]) -> tuple[dict[str, float], float]:
        """Reduces a step's metrics, and counts stop requests, over all ranks."""
        # One message for everything: the request to stop is sent with the loss.
        values = [*(float(share) for share in shares.values()), float(self.stop.wanted)]
        totals = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        all_reduce(totals, op="sum")
        *figures, wishes = totals.tolist()
        return {n: f / self.replicas for n, f in zip(shares, figures, strict=True)}, wishes

    def _report(self, line: dict[str, Any], batch: Any, seconds: float) -> None:
        numbers = [name for name in line if name != "step"]
        shown = self.describe(line, batch, seconds)
        moved = self.booster.moved or ()  # None unless memory has a limit
        tiers = dict(zip(("read", "wrote"), map(size_text, moved), strict=False))
        loss, memory = f"{line['loss']:.4f}", size_text(memory_in_use())
        self.display.advance(loss=loss, **shown, memory=memory, **tiers)
        if self.step_number % self.options.log_every == 0 or self.is_over:
            self.run.log.append({**line, "seconds": round(self.seconds, 3)})
            for name in numbers:
                self.scalars(f"train/{name}", line[name], self.step_number)

    def save(self) -> None:
        """Starts a checkpoint of this step unless one exists (collective)."""
        if self.step_number == self.saved_step:
            return
        self.saved_step = self.step_number
        if self.world.is_main:  # tuning may have changed it since the start
            self.booster.plan.save(self.run.folder / "plan.yaml")
        state = self.state()
        run = {"step": self.step_number, "position": self.position, **state.pop("run", {})}
        self.booster.save(
            self.run.checkpoints.root,
            self.step_number,
            self.model,
            self.optimizer,
            self.scheduler,
            state={**state, "run": run},
            use_async=self.options.use_async,
            frozen=self.options.frozen,
            keep=self.run.keep,
        )

    def restore(self, folder: Path) -> None:
        loaded = self.booster.load(
            folder,
            self.model,
            self.optimizer,
            self.scheduler,
            state={**self.loaded_in_place(), "run": None},
            random=False,  # every step has its own seed
            frozen=self.options.frozen,
        )
        run = loaded.values["run"]
        self.step_number = self.saved_step = run["step"]
        self.position = run["position"]
        self.load_state(run, folder)
        # Times are in the log and not in the checkpoint, so that equal runs save equal bytes. Other
        # ranks may not see the folder's log yet.
        self.seconds = broadcast_object(self._time_before())
        if self.world.is_main:
            console().print(f"resumed at step {self.step_number} from {folder}")

    def _time_before(self) -> float:
        timed = [line for line in self.run.log.read() if "seconds" in line]
        past = [line["seconds"] for line in timed if line["step"] <= self.step_number]
        return past[-1] if past else 0.0

    def kept(self) -> str:
        """Names the checkpoint from which a failed run can be resumed."""
        self.booster.wait()  # one may be in flight
        newest = self.run.checkpoints.latest()
        return f"the newest checkpoint is {newest}" if newest else "no checkpoint exists yet"

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        raise GulliverError(
            f"loss {loss} with gradient norm {norm} at step {self.step_number}, so training "
            f"stopped before the weights changed; {self.kept()}; try a lower "
            f"{self.options.rate_option}"
        )


def rate_factor(
    step: int, steps: int, warmup: int, schedule: str = "cosine", final: float = 0.0
) -> float:
    """Returns the learning rate of a step as a fraction of the peak: warm-up, then the schedule.

    `schedule` is ``cosine``, ``linear`` or ``constant``; the last step has the fraction `final`.
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return final + (1 - final) * falling
