"""Interface of policies: their view of a cluster, and their decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from gulliver.hardware.scaling import Scaling
from gulliver.schedule.jobs import Job, JobCluster


@dataclass
class JobState:
    """The current state of a job; read-only for policies."""

    # The job; policies must not use `samples` unless announced.
    job: Job
    # Samples done, counted at its own batch size.
    done: float = 0.0
    # Samples actually processed.
    drawn: float = 0.0
    slots: tuple[int, ...] = ()
    # Current batch size, 0 without slots.
    batch: int = 0
    # Time of its first start, None before.
    started: float | None = None
    # Time of the last change of its slots.
    changed: float = 0.0
    # Time from which it makes progress: later than `changed` while it resizes.
    ready: float = 0.0
    # Slot-seconds held so far.
    service: float = 0.0
    # Epochs done since its slots last changed.
    epochs_since: float = 0.0
    # Number of resizes that cost time.
    resizes: int = 0
    # Costs for its placement; None on a single node.
    scaling: Scaling | None = None

    @property
    def count(self) -> int:
        return len(self.slots)

    @property
    def epochs(self) -> float:
        return self.done / self.job.epoch_samples

    @property
    def rate(self) -> float:
        """Effective samples per second, once the job is ready."""
        return self.job.goodput(self.count, self.batch, self.scaling) if self.slots else 0.0

    def overhead(self, now: float, count: int) -> float:
        """Seconds without progress if the job gets `count` slots now."""
        if count == self.count:
            return max(0.0, self.ready - now)
        if self.started is None:
            return self.job.start_seconds
        return (max(0.0, self.ready - now) if self.slots else 0.0) + self.job.resize_seconds


class View(NamedTuple):
    """A cluster at one moment.

    Attributes:
        now: seconds since the trace began.
        cluster: slots and quotas.
        jobs: unfinished jobs that have arrived, in order of arrival.
        finished: finished jobs.
        limits: maximum slots of each tenant.
        cause: the event, such as "a arrived".
    """

    now: float
    cluster: JobCluster
    jobs: Sequence[JobState]
    finished: Sequence[JobState]
    limits: Mapping[str, int]
    cause: str = ""


class Allotment(NamedTuple):
    """A job's allocation."""

    # Number of slots, or a list of them.
    slots: int | tuple[int, ...]
    batch: int


@dataclass
class Decision:
    """Decision of a policy.

    Attributes:
        allotments: allocations by job; the others get no slots.
        wake: time of the next call if no event occurs before.
        why: reasons by job.
        predicted: expected sum of completion times if no job arrives; None if unknown.
        bound: lower bound on that sum; None if unknown.
    """

    allotments: dict[str, Allotment]
    wake: float | None = None
    why: dict[str, str] = field(default_factory=dict)
    predicted: float | None = None
    bound: float | None = None


class Policy(ABC):
    """Allocates slots to jobs; subclasses implement `decide`."""

    name: ClassVar[str]
    what: ClassVar[str]
    preempts: ClassVar[bool] = True
    """Whether the policy takes slots back from jobs, so that tenants can lend theirs."""

    def begin(self, cluster: JobCluster) -> None:
        """Resets the policy for a new simulation."""
        del cluster

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Decides the allocation of each job until the next call."""


def limits_of(states: Sequence[JobState], cluster: JobCluster, policy: Policy) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for state in states:
        useful = max(state.job.slots, state.job.modes(cluster).useful)
        wanted[state.job.tenant] = wanted.get(state.job.tenant, 0) + useful
    return cluster.limits(wanted, policy.preempts)


def placed(
    states: Sequence[JobState], decision: Decision, slots: Sequence[int]
) -> dict[str, tuple[tuple[int, ...], int]]:
    """Assigns slot numbers: a job keeps its slots, and gets the lowest free ones in addition."""
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
    """Free slots while a decision is made, in total and per tenant."""

    def __init__(self, view: View) -> None:
        self.free = view.cluster.slots
        self.of_tenant = dict(view.limits)

    def fits(self, job: Job, count: int) -> bool:
        return count <= min(self.free, self.of_tenant[job.tenant])

    def most(self, job: Job) -> int:
        return min(self.free, self.of_tenant[job.tenant])

    def take(self, job: Job, count: int) -> None:
        self.free -= count
        self.of_tenant[job.tenant] -= count
