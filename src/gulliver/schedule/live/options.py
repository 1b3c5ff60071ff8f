"""Options of schedulers and submitted jobs, shared by Python API, command line and files.

This module does not import torch, so that ``gulliver jobs --help`` is fast.
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

HERE, LOCAL = "here", "local"  # addresses for no Ray, and for a new local Ray cluster
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ENDLESS = 1e15  # number of samples of a job of unknown length
SLOTS = Range(1, 4096)
DAY = Range(0, 86400, open_below=True)


@dataclass(frozen=True)
class JobsFolder(Options):
    """The folder shared by scheduler, commands and jobs.

    Attributes:
        folder: Folder shared by scheduler, commands and jobs, visible on all nodes; default:
            GULLIVER_JOBS or ~/.gulliver/jobs.
    """

    folder: Path | None = None

    @property
    def path(self) -> Path:
        given = self.folder or os.environ.get("GULLIVER_JOBS") or Path.home() / ".gulliver" / "jobs"
        return Path(given).absolute()


@dataclass(frozen=True)
class SchedulerOptions(JobsFolder):
    """Options for starting a scheduler.

    Attributes:
        address: Address of a Ray cluster; local starts one on this machine, here runs without Ray.
        cluster_slots: Slots of this machine, or maximum per node of a cluster; default: its GPUs or
            CPUs.
        policy: Policy: fifo, srpt, tiresias, pollux or rollout.
        seed: Seed of randomized policies.
        quota: Guaranteed slots by tenant, as TENANT=SLOTS.
        idle: Seconds without a job after which the scheduler exits.
        dashboard: Enable the dashboard of a Ray cluster that is started.
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
        return quotas_of(self.quota)


def quotas_of(texts: Sequence[str]) -> dict[str, int]:
    quotas = {}
    for text in texts:
        tenant, equals, slots = text.partition("=")
        if not equals or not slots.isdigit():
            raise GulliverError(f"--quota {text!r} is invalid; use TENANT=SLOTS")
        quotas[tenant] = int(slots)
    return quotas


@dataclass(frozen=True)
class Submission(Options):
    """A job submission.

    Attributes:
        script: Script that reports its progress with gulliver.schedule.elastic().
        batch_size: Global batch size.
        arguments: Arguments of the script, after --.
        name: Name of the job; default: that of the script.
        directory: Working directory; default: the current one.
        samples: Samples to process; if unknown, set --epoch instead.
        epoch: Samples per epoch.
        slots: Requested slots.
        most_slots: Maximum slots; default: the smallest batch size.
        least_batch: Smallest allowed batch size; default: fixed batch size.
        most_batch: Largest allowed batch size; default: fixed batch size.
        noise: Gradient noise scale in samples, until the job reports a measured one.
        deadline: Seconds from now within which the job should be done.
        tenant: User name for quotas.
        sample_seconds: Seconds per sample on one slot, if known; measured while the job runs.
        step_seconds: Constant seconds per step.
        exchange_seconds: Seconds for one slot to send all gradients once.
        env: Environment variables, as NAME=VALUE.
        fresh: Start a new interpreter instead of forking one that has imported torch.
        report_within: Seconds without a report after which the job is flagged; it keeps its slots.
        grace: Seconds allowed for the job to save and leave.
        tries: Failures from the same checkpoint after which the job is abandoned.
        submitted: Unix time of submission.
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
        super().check_combinations()
        if not self.name:
            object.__setattr__(self, "name", Path(self.script).stem)
        if not NAME.fullmatch(self.name):
            raise GulliverError(
                f"job name {self.name!r} is invalid; use up to 64 letters, digits, '.', '_' and '-'"
            )
        for text in self.env:
            if "=" not in text:
                raise GulliverError(f"--env {text!r} is invalid; use NAME=VALUE")
        if self.samples is None and self.epoch is None:
            raise GulliverError(
                f"job {self.name!r} has no length; set samples, or epoch if the number of samples "
                "is unknown"
            )
        self.job(0.0, self.first_scaling, 0.0, 0.0)

    @property
    def environment(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.env)

    @property
    def first_scaling(self) -> Scaling:
        """The submitted step costs; default: one second per step on the requested slots."""
        from gulliver.hardware.scaling import Scaling

        if self.sample_seconds is None:
            return Scaling(self.slots / max(self.batch_size, 1))
        return Scaling(self.sample_seconds, self.step_seconds, self.exchange_seconds)

    def job(self, arrival: float, scaling: Scaling, resize: float, start: float) -> Job:
        from gulliver.schedule.jobs import Job

        # A rank without samples would only block a slot, unless several ranks share a model; the
        # user then sets the limit.
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
