"""Options of schedulers and of submitted jobs, for programs, the command line and files.

Nothing here imports torch at its top: ``gulliver jobs --help`` reads this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gulliver.errors import GulliverError
from gulliver.options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SEED, Options, Range

if TYPE_CHECKING:
    from gulliver.hardware.scaling import Scaling
    from gulliver.schedule.jobs import Job

HERE, LOCAL = "here", "local"
"""Addresses without Ray, and of a Ray cluster that is started for the schedule."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ENDLESS = 1e15
"""Samples of a job whose length nobody knows."""
SLOTS = Range(1, 4096)
DAY = Range(0, 86400, open_below=True)


@dataclass(frozen=True)
class JobsFolder(Options):
    """The folder that scheduler, commands and jobs meet in.

    Attributes:
        folder: Folder that scheduler, commands and jobs meet in, seen by all nodes; GULLIVER_JOBS
            or ~/.gulliver/jobs by default.
    """

    folder: Path | None = None

    @property
    def path(self) -> Path:
        """The folder, as given or by default."""
        given = self.folder or os.environ.get("GULLIVER_JOBS") or Path.home() / ".gulliver" / "jobs"
        return Path(given).absolute()


@dataclass(frozen=True)
class SchedulerOptions(JobsFolder):
    """What a scheduler is started with.

    Attributes:
        address: Ray cluster: its address, or local to start one on this machine; here does without
            Ray.
        cluster_slots: Slots of a cluster on this machine; of another, most on a node. The GPUs or
            CPUs that there are by default.
        policy: Policy: fifo, srpt, tiresias, pollux or rollout.
        seed: Seed of policies that draw.
        quota: Slots that tenants have a right to, as TENANT=SLOTS.
        idle: Seconds without a job after which the scheduler ends.
        dashboard: Give a Ray cluster that is started its dashboard.
    """

    address: str = LOCAL
    cluster_slots: Annotated[int | None, SLOTS] = None
    policy: str = "rollout"
    seed: Annotated[int, SEED] = 0
    quota: tuple[str, ...] = ()
    idle: Annotated[float, AT_LEAST_0] = 60.0
    dashboard: bool = False

    @property
    def quotas(self) -> dict[str, int]:
        """Slots by tenant."""
        return quotas_of(self.quota)


def quotas_of(texts: Sequence[str]) -> dict[str, int]:
    """Reads slots by tenant."""
    quotas = {}
    for text in texts:
        tenant, equals, slots = text.partition("=")
        if not equals or not slots.isdigit():
            raise GulliverError(f"--quota {text!r}: give TENANT=SLOTS")
        quotas[tenant] = int(slots)
    return quotas


@dataclass(frozen=True)
class Submission(Options):
    """A job to be run.

    Attributes:
        script: Script, which says how far it is with gulliver.schedule.elastic().
        batch_size: Global batch size.
        arguments: Arguments of the script, after --.
        name: Name of the job; that of the script by default.
        directory: Folder that it runs in; the present one by default.
        samples: Samples to process; leave it out where nobody knows, and say --epoch.
        epoch: Samples of an epoch.
        slots: Slots that it asks for.
        most_slots: Most slots that it runs on; its smallest batch size by default.
        least_batch: Smallest batch size that is allowed; it is fixed by default.
        most_batch: Largest batch size that is allowed; it is fixed by default.
        noise: Gradient noise scale in samples, until the job reports a measured one.
        deadline: Seconds from now at which it should be done.
        tenant: Name that quotas know its user by.
        sample_seconds: Seconds of a sample on one slot, where they are known; measured as it runs.
        step_seconds: Seconds of a step that neither slots nor samples change.
        exchange_seconds: Seconds that one slot takes to send all gradients once.
        env: Environment variables, as NAME=VALUE.
        fresh: Give it an interpreter of its own instead of a fork of one that has imported torch.
        report_within: Seconds after which a job that says nothing is named; it keeps its slots.
        grace: Seconds that it has to save and leave.
        tries: Failures from one checkpoint after which it is given up.
        submitted: Second of the epoch at which it was submitted.
    """

    script: str
    batch_size: Annotated[int, AT_LEAST_1]
    arguments: tuple[str, ...] = ()
    name: str = ""
    directory: str = "."
    samples: Annotated[float | None, POSITIVE] = None
    epoch: Annotated[float | None, POSITIVE] = None
    slots: Annotated[int, SLOTS] = 1
    most_slots: Annotated[int | None, SLOTS] = None
    least_batch: Annotated[int | None, AT_LEAST_1] = None
    most_batch: Annotated[int | None, AT_LEAST_1] = None
    noise: Annotated[float, AT_LEAST_0] = 0.0
    deadline: Annotated[float | None, POSITIVE] = None
    tenant: str = ""
    sample_seconds: Annotated[float | None, POSITIVE] = None
    step_seconds: Annotated[float, AT_LEAST_0] = 0.0
    exchange_seconds: Annotated[float, AT_LEAST_0] = 0.0
    env: tuple[str, ...] = ()
    fresh: bool = False
    report_within: Annotated[float, DAY] = 300.0
    grace: Annotated[float, DAY] = 120.0
    tries: Annotated[int, AT_LEAST_1] = 3
    submitted: Annotated[float, AT_LEAST_0] = 0.0

    def check_combinations(self) -> None:
        """Refuses names that no folder can have, and jobs that policies cannot reckon with."""
        super().check_combinations()
        if not self.name:
            object.__setattr__(self, "name", Path(self.script).stem)
        if not NAME.fullmatch(self.name):
            raise GulliverError(
                f"job name {self.name!r}: give letters, digits, '.', '_' and '-', 64 at most"
            )
        for text in self.env:
            if "=" not in text:
                raise GulliverError(f"--env {text!r}: give NAME=VALUE")
        if self.samples is None and self.epoch is None:
            raise GulliverError(
                f"job {self.name!r}: give samples, or epoch where nobody knows when it ends"
            )
        self.job(0.0, self.first_scaling, 0.0, 0.0)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables."""
        return dict(text.split("=", 1) for text in self.env)

    @property
    def first_scaling(self) -> Scaling:
        """Costs as they were given; else a second for a step on the slots that it asks for."""
        from gulliver.hardware.scaling import Scaling

        if self.sample_seconds is None:
            return Scaling(self.slots / max(self.batch_size, 1))
        return Scaling(self.sample_seconds, self.step_seconds, self.exchange_seconds)

    def job(self, arrival: float, scaling: Scaling, resize: float, start: float) -> Job:
        """Makes the job that policies see."""
        from gulliver.schedule.jobs import Job

        # A rank without a sample would only hold a slot, unless several share a model: then its
        # user says how many.
        smallest = self.batch_size if self.least_batch is None else self.least_batch
        return Job(
            self.name,
            arrival,
            ENDLESS if self.samples is None else self.samples,
            self.batch_size,
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
            most_slots=self.most_slots or smallest,
            announced=self.samples is not None,
        )
