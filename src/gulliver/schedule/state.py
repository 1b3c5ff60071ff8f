"""What a policy sees of a cluster, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from gulliver.hardware.scaling import Scaling
from gulliver.schedule.jobs import Job, JobCluster


@dataclass
class JobState:
    """The present state of a job, read-only for policies."""

    # The job; a policy must not look at `samples` where they are not announced.
    job: Job
    # Samples done, counted as those of its own batch size.
    done: float = 0.0
    # Samples that were really processed.
    drawn: float = 0.0
    slots: tuple[int, ...] = ()
    # Batch size now, 0 while it holds none.
    batch: int = 0
    # Second of its first start, None before.
    started: float | None = None
    # Second at which its slots last changed.
    changed: float = 0.0
    # Second from which it makes progress: later than `changed` while it resizes.
    ready: float = 0.0
    # Slot-seconds that it has held.
    service: float = 0.0
    # Epochs done since its slots last changed.
    epochs_since: float = 0.0
    # Times that it has lost its resize seconds.
    resizes: int = 0
    # Costs where its slots lie; None while they are of one node.
    scaling: Scaling | None = None

    @property
    def count(self) -> int:
        """Number of slots that it holds."""
        return len(self.slots)

    @property
    def epochs(self) -> float:
        """Epochs done."""
        return self.done / self.job.epoch_samples

    @property
    def rate(self) -> float:
        """Samples a second that count, once it is ready."""
        return self.job.goodput(self.count, self.batch, self.scaling) if self.slots else 0.0

    def overhead(self, now: float, count: int) -> float:
        """Seconds without progress if it is to have so many slots now."""
        if count == self.count:
            return max(0.0, self.ready - now)
        return self.job.start_seconds if self.started is None else self.job.resize_seconds


class View(NamedTuple):
    """A cluster at one moment.

    Attributes:
        now: seconds since the trace began.
        cluster: slots and quotas.
        jobs: jobs that have come and are not done, in order of arrival.
        finished: jobs that are done.
        limits: most slots of each tenant.
        cause: what has happened, such as "a arrived".
    """

    now: float
    cluster: JobCluster
    jobs: Sequence[JobState]
    finished: Sequence[JobState]
    limits: Mapping[str, int]
    cause: str = ""


class Allotment(NamedTuple):
    """What a job gets."""

    # Number of slots, or the very slots.
    slots: int | tuple[int, ...]
    batch: int


@dataclass
class Decision:
    """Answer of a policy.

    Attributes:
        allotments: what jobs get; one that is not named gets nothing.
        wake: second at which it wants to be asked again, if nothing happens before.
        why: reason by job, where the policy has one.
        predicted: sum of completion times that it expects if no job comes; None if it does not say.
        bound: sum that no schedule of these jobs is below; None likewise.
    """

    allotments: dict[str, Allotment]
    wake: float | None = None
    why: dict[str, str] = field(default_factory=dict)
    predicted: float | None = None
    bound: float | None = None


class Policy(ABC):
    """Decides which job has how many slots. Subclasses fill in `decide`."""

    name: ClassVar[str]
    what: ClassVar[str]
    preempts: ClassVar[bool] = True
    """Whether it takes slots back, so that tenants may lend them."""

    def begin(self, cluster: JobCluster) -> None:
        """Resets the policy for a new simulation."""
        del cluster

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Decides what each job gets from now on."""


def limits_of(states: Sequence[JobState], cluster: JobCluster, policy: Policy) -> dict[str, int]:
    """Returns the most slots of each tenant, from what its jobs could use now."""
    wanted: dict[str, int] = {}
    for state in states:
        useful = max(state.job.slots, state.job.modes(cluster).useful)
        wanted[state.job.tenant] = wanted.get(state.job.tenant, 0) + useful
    return cluster.limits(wanted, policy.preempts)


def placed(
    states: Sequence[JobState], decision: Decision, slots: Sequence[int]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Chooses slots for numbers of slots: jobs keep theirs, new ones are the lowest free."""
    free, chosen = set(slots), dict[str, tuple[tuple[int, ...], int]]()
    growing = []
    for state in states:
        given = decision.allotments.get(state.job.name)
        if given is None or given.slots in (0, ()):
            continue
        if isinstance(given.slots, tuple):
            kept = given.slots
        else:
            kept = state.slots[: given.slots]
            if given.slots > len(kept):
                growing.append((state, given.slots))
        chosen[state.job.name] = (kept, given.batch)
        free -= set(kept)
    for state, count in growing:
        kept, batch = chosen[state.job.name]
        new = sorted(free)[: count - len(kept)]
        chosen[state.job.name] = ((*kept, *new), batch)
        free -= set(new)
    return chosen


class FreeSlots:
    """Slots that are still free in a decision, over all and of each tenant."""

    def __init__(self, view: View) -> None:
        self.free = view.cluster.slots
        self.of_tenant = dict(view.limits)

    def fits(self, job: Job, count: int) -> bool:
        """Whether the job may have `count` more slots."""
        return count <= min(self.free, self.of_tenant[job.tenant])

    def most(self, job: Job) -> int:
        """Most slots that the job may still have."""
        return min(self.free, self.of_tenant[job.tenant])

    def take(self, job: Job, count: int) -> None:
        """Gives the job `count` more slots."""
        self.free -= count
        self.of_tenant[job.tenant] -= count
