"""Jobs as users submit them, and the folder in which scheduler, commands and jobs meet.

Everything goes through files of one folder that all nodes see, as the checkpoints have to: a job is
submitted by a file, says how far it is in one, and is asked to leave by one. So a scheduler that is
killed leaves nothing behind that the next one does not find.

    scheduler.json, scheduler.log    who schedules, on how many slots
    schedule.json, schedule.html     what has happened, and its picture
    jobs/NAME/job.json               what was submitted
    jobs/NAME/control.json           what the scheduler asks of it
    jobs/NAME/progress.json          how far it is
    jobs/NAME/curve.jsonl            a line for each step that counts
    jobs/NAME/stop                   somebody wants it to end
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
    """Reads a JSON object; None where there is none yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_object(path: Path, value: Mapping[str, Any], durable: bool = False) -> None:
    """Writes a JSON object, whole or not at all."""
    with named_errors(path):
        write_text(path, json.dumps(value), durable)


@dataclass(frozen=True)
class Spool:
    """The folder that scheduler, commands and jobs meet in."""

    path: Path

    @property
    def jobs(self) -> Path:
        """Folder of the jobs."""
        return self.path / "jobs"

    def job(self, name: str) -> Path:
        """Folder of a job."""
        return self.jobs / name

    def make(self) -> None:
        """Makes the folder."""
        with named_errors(self.path):
            self.jobs.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Names of all jobs."""
        if not self.jobs.is_dir():
            return []
        return sorted(p.name for p in self.jobs.iterdir() if (p / "job.json").is_file())

    def known(self, name: str) -> Path:
        """Folder of a job that is there."""
        names = self.names()
        if name not in names:
            hint = nearest(name, names) if names else "nothing was submitted there"
            raise GulliverError(f"no job {name!r} in {self.path}: {hint}")
        return self.job(name)

    def check(self, submission: Submission) -> None:
        """Refuses what can never be run."""
        script = Path(submission.directory, submission.script)
        if not script.is_file():
            raise GulliverError(
                f"job {submission.name!r}: there is no script {script}: give the path of a file"
            )
        if self.job(submission.name).exists():
            raise GulliverError(
                f"there is a job {submission.name!r} in {self.path}: give another name"
            )

    def submit(self, submission: Submission) -> Path:
        """Writes a job for the scheduler to find."""
        self.check(submission)
        folder = self.job(submission.name)
        self.make()
        folder.mkdir()
        (folder / "logs").mkdir()
        values = asdict(submission) | {"submitted": submission.submitted or time.time()}
        write_object(folder / "job.json", values, durable=True)
        return folder

    def read(self, name: str) -> Submission:
        """Reads what was submitted."""
        values = read_object(self.job(name) / "job.json")
        known = {f.name for f in fields(Submission)}
        if values is None or not {"name", "script", "batch"} <= set(values) <= known:
            raise GulliverError(f"{self.job(name) / 'job.json'} is no job: submit it again")
        values["arguments"] = tuple(values.get("arguments", ()))
        return Submission(**values)

    def scheduler(self) -> dict[str, Any] | None:
        """What the scheduler says of itself; None where there is none."""
        return read_object(self.path / "scheduler.json")


# A live job: its phase, what was measured of it, and what policies see of it.


RESIZE_SECONDS = 10.0
"""Seconds that a resize counts as until one was measured."""
LAST = 5
"""Measured seconds that count."""
FEW = 3
"""Steps of an attempt from which their mean is looked at."""
NOTICED = 0.05
"""Change of a step's seconds from which the costs that policies see are fitted again."""


class MeasuredSeconds(NamedTuple):
    """Seconds that were measured of jobs.

    Attributes:
        starts: seconds from the first slots to the first step.
        resizes: seconds from the last step to the first one after.
    """

    starts: list[float]
    resizes: list[float]

    @classmethod
    def of(cls, jobs: Iterable[LiveJob]) -> MeasuredSeconds:
        """Gathers what was measured of jobs."""
        found = [job.measured for job in jobs]
        return cls(*(list(chain.from_iterable(values)) for values in zip(*found, strict=True)))

    def or_of(self, others: MeasuredSeconds) -> MeasuredSeconds:
        """Takes what others have where there is nothing; of all only the last."""
        return MeasuredSeconds(
            *((own or other)[-LAST:] for own, other in zip(self, others, strict=True))
        )


NOTHING = MeasuredSeconds([], [])


class Phase(Enum):
    """Where a job stands."""

    WAITING = "waits"
    STARTING = "starts"
    RUNNING = "runs"
    LEAVING = "leaves"
    ENDED = "ended"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self in OVER


OVER = frozenset({Phase.ENDED, Phase.FAILED, Phase.STOPPED})
TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # It gets slots; nobody wants it any more; it has failed too often.
    Phase.WAITING: frozenset({Phase.STARTING, Phase.STOPPED, Phase.FAILED}),
    # It says its first step; a rank fails; it ends without a word.
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.WAITING, *OVER}),
    # It is asked to save and leave; a rank fails; it ends.
    Phase.RUNNING: frozenset({Phase.LEAVING, Phase.WAITING, *OVER}),
    # It has saved and left, or a rank has failed; it was at its end.
    Phase.LEAVING: frozenset({Phase.WAITING, *OVER}),
    **{phase: frozenset() for phase in OVER},
}


@dataclass
class LiveJob:
    """A job that was submitted."""

    submission: Submission
    # Second at which it was.
    arrival: float
    # Where it stands; changed by `go`.
    phase: Phase = Phase.WAITING
    # What happened to it last, for people.
    note: str = ""
    # Slots that the policy wants it to have.
    assigned: tuple[int, ...] = ()
    # Slots that its ranks hold.
    held: tuple[int, ...] = ()
    # Batch size that the policy wants.
    batch: int = 0
    # Number of the last attempt.
    attempt: int = 0
    # Ranks that have not ended.
    alive: set[int] = field(default_factory=set)
    # Exit codes of those that have.
    codes: dict[int, int] = field(default_factory=dict)
    # Second at which the attempt was started.
    launched: float = 0.0
    # Second at which it was asked to leave.
    asked: float | None = None
    # Whether somebody wants it to end.
    stopping: bool = False
    # Whether the attempt has said a step.
    heard: bool = False
    # Whether it was named as silent: then it is left alone.
    silent: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    # Seconds of its resizes, as measured.
    resizes: list[float] = field(default_factory=list)
    # Seconds from its first slots to its first step.
    starts: list[float] = field(default_factory=list)
    # Samples a second, by slots and batch.
    points: dict[tuple[int, int], float] = field(default_factory=dict)
    scaling: Scaling | None = None
    # Step that the attempt went on from.
    base: int = -1
    # Failures since that step was another.
    failures: int = 0
    # Second at which it was over.
    ended: float | None = None
    # Seconds from its last step to its end, in the present resize.
    saving: float | None = None
    # Why the attempt fails; empty while it does not.
    first_failed: str = ""
    # Whether that is not its own fault.
    blameless: bool = False
    # Samples done when its slots last changed.
    since: float = 0.0
    # Steps of the attempt when its speed was last looked at.
    looked: int = 0
    # What policies see, filled by `seen`.
    state: JobState = field(init=False)
    # Slots that it has held.
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = self.batch or self.submission.batch_size
        self.state = JobState(self.job(), changed=self.arrival)

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.submission.name

    @property
    def run(self) -> str:
        """Name of the attempt."""
        return f"{self.name}/{self.attempt}"

    def go(self, phase: Phase, note: str = "") -> None:
        """Changes where it stands."""
        assert phase in TRANSITIONS[self.phase], f"{self.name}: {self.phase} to {phase}"
        self.phase, self.note = phase, note or self.note

    @property
    def measured(self) -> MeasuredSeconds:
        """Seconds that were measured of it."""
        return MeasuredSeconds(self.starts, self.resizes)

    def job(self, others: MeasuredSeconds = NOTHING) -> Job:
        """Makes the job that policies see, of what is known by now."""
        known = self.measured.or_of(others)
        resize = fmean(known.resizes) if known.resizes else RESIZE_SECONDS
        start = fmean(known.starts) if known.starts else 0.0
        scaling = self.scaling or self.submission.first_scaling
        return replace(
            self.submission.job(self.arrival, scaling, resize, start),
            noise=float(self.progress.get("noise") or self.submission.noise),
        )

    def measure(self) -> bool:
        """Takes up the seconds of a step that it has said; whether its costs have changed."""
        report = self.progress
        # Means of few steps are no more than guesses: looked at after 3, 6, 12 ... steps.
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
        """Fits costs; with one number of slots only, those that were submitted are scaled."""
        points = [(n, b, speed) for (n, b), speed in self.points.items()]
        if len({n for n, _, _ in points}) > 1 or self.submission.sample_seconds is None:
            return fit_scaling(points)
        report = self.submission.first_scaling
        off = fmean(b / speed / report.seconds(n, b) for n, b, speed in points)
        costs = (report.sample_seconds, report.step_seconds, report.exchange_seconds)
        return Scaling(*(off * seconds for seconds in costs))

    def seen(self, now: float, places: Mapping[int, int], others: MeasuredSeconds) -> JobState:
        """What policies see of it."""
        state, report = self.state, self.progress
        job = self.job(others)
        count = len(places)
        if job.slots > count:
            job = replace(job, slots=count)
        state.job = job
        # What has been done is never more than there is: the end has not been said yet.
        state.done = min(float(report.get("done", 0.0)), job.samples * (1 - 1e-9))
        state.drawn = float(report.get("drawn", 0.0))
        state.epochs_since = max(0.0, state.done - self.since) / job.epoch_samples
        state.slots = tuple(places[slot] for slot in self.assigned if slot in places)
        state.batch = self.batch if state.slots else 0
        state.ready = max(now, self._ready(job)) if state.slots else now
        return state

    def _ready(self, job: Job) -> float:
        """Second from which it makes progress on the slots that it is to have."""
        if self.phase is Phase.RUNNING and self.held == self.assigned:
            return 0.0
        if self.phase is Phase.STARTING:
            first = self.attempt == 1
            return self.launched + (job.start_seconds if first else job.resize_seconds)
        return self.state.changed + job.resize_seconds
