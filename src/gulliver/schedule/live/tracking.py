"""Submitted jobs, and the folder through which scheduler, commands and jobs communicate.

All communication goes through files in one folder that all nodes share: submissions, progress and
stop requests. So a new scheduler can replace one that was killed.

    scheduler.json, scheduler.log    process, host and slots of the scheduler
    schedule.json, schedule.html     history and its chart
    jobs/NAME/job.json               the submission
    jobs/NAME/control.json           requests of the scheduler
    jobs/NAME/progress.json          progress
    jobs/NAME/curve.jsonl            a line per valid step
    jobs/NAME/stop                   present if a user asked to stop it
    jobs/NAME/checkpoints, logs
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.scaling import Scaling, fit_scaling
from gulliver.io.files import named_errors, write_text
from gulliver.schedule.jobs import Job
from gulliver.schedule.live.options import Submission
from gulliver.schedule.simulator import Segment
from gulliver.schedule.state import JobState


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None if the file does not exist."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_object(path: Path, value: Mapping[str, Any], durable: bool = False) -> None:
    """Writes a JSON object atomically."""
    with named_errors(path):
        write_text(path, json.dumps(value), durable)


@dataclass(frozen=True)
class Spool:
    """The folder shared by scheduler, commands and jobs."""

    path: Path

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    def job(self, name: str) -> Path:
        return self.jobs / name

    def make(self) -> None:
        with named_errors(self.path):
            self.jobs.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        if not self.jobs.is_dir():
            return []
        return sorted(p.name for p in self.jobs.iterdir() if (p / "job.json").is_file())

    def known(self, name: str) -> Path:
        names = self.names()
        if name not in names:
            hint = nearest(name, names) if names else "nothing was submitted there"
            raise GulliverError(f"no job {name!r} in {self.path}: {hint}")
        return self.job(name)

    def check(self, submission: Submission) -> None:
        script = Path(submission.directory, submission.script)
        if not script.is_file():
            raise GulliverError(
                f"job {submission.name!r}: script {script} does not exist; pass the path of a file"
            )
        if self.job(submission.name).exists():
            raise GulliverError(
                f"job {submission.name!r} already exists in {self.path}; choose another name"
            )

    def submit(self, submission: Submission) -> Path:
        self.check(submission)
        folder = self.job(submission.name)
        self.make()
        folder.mkdir()
        (folder / "logs").mkdir()
        values = asdict(submission) | {"submitted": submission.submitted or time.time()}
        write_object(folder / "job.json", values, durable=True)
        return folder

    def read(self, name: str) -> Submission:
        values = read_object(self.job(name) / "job.json")
        known = {f.name for f in fields(Submission)}
        if values is None or not {"name", "script", "batch_size"} <= set(values) <= known:
            raise GulliverError(f"{self.job(name) / 'job.json'} is not a job; submit it again")
        values["arguments"] = tuple(values.get("arguments", ()))
        return Submission(**values)

    def scheduler(self) -> dict[str, Any] | None:
        return read_object(self.path / "scheduler.json")


# A live job: its phase, its measurements, and the job that policies see.


RESIZE_SECONDS = 10.0  # seconds assumed for a resize until one has been measured
LAST = 5  # number of recent measurements to use
FEW = 3  # minimum number of steps of an attempt before their mean is used
NOTICED = 0.05  # relative change of the step time that triggers a new fit of the costs


class MeasuredSeconds(NamedTuple):
    """Measured start and resize times of jobs."""

    # Seconds from the first slots to the first step.
    starts: list[float]
    # Seconds from the last step before a resize to the first one after.
    resizes: list[float]
    # Seconds from the request for a resize to the end of all ranks.
    leaves: list[float]

    @classmethod
    def of(cls, jobs: Iterable[LiveJob]) -> MeasuredSeconds:
        found = [job.measured for job in jobs]
        return cls(*(list(chain.from_iterable(values)) for values in zip(*found, strict=True)))

    def or_of(self, others: MeasuredSeconds) -> MeasuredSeconds:
        """Fills gaps with measurements of other jobs; keeps only the most recent ones."""
        return MeasuredSeconds(
            *((own or other)[-LAST:] for own, other in zip(self, others, strict=True))
        )


NOTHING = MeasuredSeconds([], [], [])


class Phase(Enum):
    """State of a job."""

    WAITING = "waits"
    STARTING = "starts"
    RUNNING = "runs"
    LEAVING = "leaves"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        return self in OVER


OVER = frozenset({Phase.ENDED, Phase.FAILED, Phase.STOPPED})
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # Slots assigned; cancelled; too many failures.
    Phase.WAITING: frozenset({Phase.STARTING, Phase.STOPPED, Phase.FAILED}),
    # First step reported; a rank failed; ended without a report.
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.WAITING, *OVER}),
    # Asked to save and leave; a rank failed; ended.
    Phase.RUNNING: frozenset({Phase.LEAVING, Phase.WAITING, *OVER}),
    # Saved and left, or a rank failed; already at its end.
    Phase.LEAVING: frozenset({Phase.WAITING, *OVER}),
    **{phase: frozenset() for phase in OVER},
}


@dataclass
class LiveJob:
    """A submitted job."""

    submission: Submission
    # Time of submission.
    arrival: float
    # Its phase; changed by `set_phase`.
    phase: Phase = Phase.WAITING
    # Its last event, for display.
    note: str = ""
    # Slots assigned by the policy.
    assigned: tuple[int, ...] = ()
    # Slots held by its ranks.
    held: tuple[int, ...] = ()
    # Batch size assigned by the policy.
    batch: int = 0
    # Number of the last attempt.
    attempt: int = 0
    # Ranks still running.
    alive: set[int] = field(default_factory=set)
    # Exit codes of ended ranks.
    codes: dict[int, int] = field(default_factory=dict)
    # Start time of the attempt.
    launched: float = 0.0
    # Time at which it was asked to leave.
    asked: float | None = None
    # Whether a user asked to stop it.
    stopping: bool = False
    # Whether the attempt has reported a step.
    heard: bool = False
    # Whether it was flagged as silent, so that it is not flagged again.
    silent: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    # Measured seconds of its resizes.
    resizes: list[float] = field(default_factory=list)
    # Seconds from its first slots to its first step.
    starts: list[float] = field(default_factory=list)
    # Seconds from requests to leave to the end of all ranks.
    leaves: list[float] = field(default_factory=list)
    # Samples per second, by slots and batch.
    points: dict[tuple[int, int], float] = field(default_factory=dict)
    scaling: Scaling | None = None
    # Step from which the attempt continued.
    base: int = -1
    # Failures since that step.
    failures: int = 0
    # Time of its end.
    ended: float | None = None
    # Seconds from its last step to its end, in the current resize.
    saving: float | None = None
    # Why the attempt failed; empty if it did not.
    first_failed: str = ""
    # Whether the failure is not its own fault.
    blameless: bool = False
    # Samples done when its slots last changed.
    since: float = 0.0
    # Steps of the attempt when its speed was last evaluated.
    looked: int = 0
    # The job that policies see, updated by `seen`.
    state: JobState = field(init=False)
    # Slots that it has held over time.
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = self.batch or self.submission.batch_size
        self.state = JobState(self.job(), changed=self.arrival)

    @property
    def name(self) -> str:
        return self.submission.name

    @property
    def run(self) -> str:
        return f"{self.name}/{self.attempt}"

    def set_phase(self, phase: Phase, note: str = "") -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.name}: {self.phase} to {phase}"
        self.phase, self.note = phase, note or self.note

    @property
    def measured(self) -> MeasuredSeconds:
        return MeasuredSeconds(self.starts, self.resizes, self.leaves)

    def job(self, others: MeasuredSeconds = NOTHING) -> Job:
        """Creates the job that policies see, from the latest measurements."""
        known = self.measured.or_of(others)
        resize = fmean(known.resizes) if known.resizes else RESIZE_SECONDS
        start = fmean(known.starts) if known.starts else 0.0
        scaling = self.scaling or self.submission.first_scaling
        return replace(
            self.submission.job(self.arrival, scaling, resize, start),
            leave_seconds=min(resize, fmean(known.leaves)) if known.leaves else 0.0,
            noise=float(self.progress.get("noise") or self.submission.noise),
        )

    def measure(self) -> bool:
        """Records the reported step time; returns whether the fitted costs have changed."""
        report = self.progress
        # Means of few steps are noisy: evaluated after 3, 6, 12 ... steps.
        if report.get("seconds") is None or report["steps"] < max(FEW, 2 * self.looked):
            return False
        self.looked = report["steps"]
        self.points[report["ranks"], report["batch"]] = report["batch"] / report["seconds"]
        found = self._fitted()
        before, slots, batch = self.scaling, report["ranks"], report["batch"]
        now = found.seconds(slots, batch)
        if before is not None and abs(before.seconds(slots, batch) / now - 1) < NOTICED:
            return False
        self.scaling = found
        return True

    def _fitted(self) -> Scaling:
        """Fits step costs; with measurements at only one slot count, scales the submitted costs."""
        points = [(n, b, speed) for (n, b), speed in self.points.items()]
        if len({n for n, _, _ in points}) > 1 or self.submission.sample_seconds is None:
            return fit_scaling(points)
        report = self.submission.first_scaling
        off = fmean(b / speed / report.seconds(n, b) for n, b, speed in points)
        costs = (report.sample_seconds, report.step_seconds, report.exchange_seconds)
        return Scaling(*(off * seconds for seconds in costs))

    def seen(self, now: float, places: Mapping[int, int], others: MeasuredSeconds) -> JobState:
        state, report = self.state, self.progress
        job = self.job(others)
        count = len(places)
        if job.slots > count:
            job = replace(job, slots=count)
        state.job = job
        # Progress never exceeds the total, because the end has not been reported yet.
        state.done = min(float(report.get("done", 0.0)), job.samples * (1 - 1e-9))
        state.drawn = float(report.get("drawn", 0.0))
        state.epochs_since = max(0.0, state.done - self.since) / job.epoch_samples
        state.slots = tuple(places[slot] for slot in self.assigned if slot in places)
        state.batch = self.batch if state.slots else 0
        state.ready = max(now, self._ready(job)) if state.slots else now
        return state

    def _ready(self, job: Job) -> float:
        """Time at which the job starts to make progress on its assigned slots."""
        if self.phase is Phase.RUNNING and self.held == self.assigned:
            return 0.0
        if self.phase is Phase.STARTING:
            first = self.attempt == 1
            return self.launched + (job.start_seconds if first else job.resize_seconds)
        return self.state.changed + job.resize_seconds
