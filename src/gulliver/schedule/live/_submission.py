"""Jobs as users submit them, and the folder in which scheduler, commands and jobs meet.

Everything goes through files of one folder that all nodes see, as the checkpoints have to: a job is
submitted by a file, says how far it is in one, and is asked to leave by one. So a scheduler that is
killed leaves nothing behind that the next one does not find.

    scheduler.json, scheduler.log    who schedules, on how many slots
    starting.json                    what one that starts is doing
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
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.hardware import Scaling
from gulliver.io import named_errors, write_text
from gulliver.schedule._jobs import Job

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ENDLESS = 1e15
"""Samples of a job that nobody has told the length of."""


@dataclass(frozen=True)
class Submission:
    """A job to be run."""

    # Name, one of its kind in a folder.
    name: str
    # Training script; it says how far it is with `gulliver.schedule.elastic`.
    script: str
    batch: int
    # Slots that it asks for.
    slots: int = 1
    # Samples to process at `batch`; None where that is not known.
    samples: float | None = None
    arguments: tuple[str, ...] = ()
    # Folder that it runs in.
    folder: str = "."
    # Largest number of slots that it runs on, None for any.
    most_slots: int | None = None
    # Smallest batch size that is allowed; None for `batch`.
    least_batch: int | None = None
    # Largest batch size that is allowed; None for `batch`.
    most_batch: int | None = None
    # Gradient noise scale in samples, until the job reports a measured one.
    noise: float = 0.0
    # Samples of an epoch; needed where `samples` is None.
    epoch: float | None = None
    # Seconds after it was submitted at which it should be done.
    deadline: float | None = None
    # Name that quotas know its user by.
    tenant: str = ""
    # Seconds of a sample on one slot; None until it is measured.
    sample_seconds: float | None = None
    # Seconds of a step that neither slots nor samples change.
    step_seconds: float = 0.0
    # Seconds that one slot takes to send all gradients once.
    exchange_seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    # Whether it gets an interpreter of its own, instead of a fork of one that has imported torch.
    fresh: bool = False
    # Seconds after which a job that says nothing is named as silent.
    report_within: float = 300.0
    # Whether such a job is stopped; else it keeps its slots and is not resized.
    stop_silent: bool = False
    # Seconds that it has to save and leave.
    grace: float = 120.0
    # Failures from one checkpoint after which it is given up.
    tries: int = 3
    # Second of the epoch at which it was submitted.
    submitted: float = 0.0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise GulliverError(
                f"job name {self.name!r}: give letters, digits, '.', '_' and '-', 64 at most"
            )
        if self.samples is None and self.epoch is None:
            raise GulliverError(
                f"job {self.name!r}: give samples, or epoch where nobody knows when it ends"
            )
        if self.tries < 1 or self.grace <= 0 or self.report_within <= 0:
            raise GulliverError(
                f"job {self.name!r}: give tries from 1 on, and grace and report_within above 0"
            )
        self.job(0.0, self.first_scaling, 0.0, 0.0, 0.0, 0.0)

    @property
    def first_scaling(self) -> Scaling:
        """Costs as they were told; else a second for a step on the slots that it asks for."""
        if self.sample_seconds is None:
            return Scaling(self.slots / max(self.batch, 1))
        return Scaling(self.sample_seconds, self.step_seconds, self.exchange_seconds)

    def job(
        self, arrival: float, scaling: Scaling, resize: float, start: float, save: float, end: float
    ) -> Job:
        """Makes the job that policies see."""
        # A rank without a sample would only hold a slot, unless several share a model: then its
        # user says how many.
        smallest = self.batch if self.least_batch is None else self.least_batch
        most = self.most_slots or smallest
        return Job(
            self.name,
            arrival,
            ENDLESS if self.samples is None else self.samples,
            self.batch,
            self.slots,
            scaling,
            noise=self.noise,
            least_batch=self.least_batch,
            most_batch=self.most_batch,
            epoch=self.epoch,
            deadline=None if self.deadline is None else arrival + self.deadline,
            tenant=self.tenant,
            resize_seconds=resize,
            start_seconds=start,
            save_seconds=save,
            end_seconds=end,
            most_slots=most,
            announced=self.samples is not None,
        )


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
            told = nearest(name, names) if names else "nothing was submitted there"
            raise GulliverError(f"no job {name!r} in {self.path}: {told}")
        return self.job(name)

    def check(self, submission: Submission) -> None:
        """Refuses what can never be run."""
        script = Path(submission.folder, submission.script)
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

    def starts(self, what: str) -> None:
        """Says how far the start of a scheduler is; empty once it is there."""
        write_object(self.path / "starting.json", {"what": what})

    def starting(self) -> str:
        """What a scheduler that starts is doing; empty where none starts."""
        return (read_object(self.path / "starting.json") or {}).get("what", "")

    def scheduler(self) -> dict[str, Any] | None:
        """What the scheduler says of itself; None where there is none."""
        return read_object(self.path / "scheduler.json")


def default_folder() -> Path:
    """``GULLIVER_JOBS``, or ``~/.gulliver/jobs``."""
    given = os.environ.get("GULLIVER_JOBS")
    return Path(given) if given else Path.home() / ".gulliver" / "jobs"
