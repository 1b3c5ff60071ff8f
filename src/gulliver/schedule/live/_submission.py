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
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.io import named_errors, write_text
from gulliver.schedule.live._options import Submission


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

    def starts(self, what: str) -> None:
        """Says how far the start of a scheduler is; empty once it is there."""
        write_object(self.path / "starting.json", {"what": what})

    def starting(self) -> str:
        """What a scheduler that starts is doing; empty where none starts."""
        return (read_object(self.path / "starting.json") or {}).get("what", "")

    def scheduler(self) -> dict[str, Any] | None:
        """What the scheduler says of itself; None where there is none."""
        return read_object(self.path / "scheduler.json")
