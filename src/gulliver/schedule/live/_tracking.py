"""A live job: where it stands, what was measured of it, and what policies see of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from gulliver.hardware import Scaling, fit_scaling
from gulliver.schedule._jobs import Job
from gulliver.schedule._result import Segment
from gulliver.schedule._state import JobState
from gulliver.schedule.live._submission import Submission

RESIZE_SECONDS = 10.0
"""Seconds that a resize counts as until one was measured."""
LAST = 5
"""Measured seconds of resizes that count."""
FEW = 3
"""Steps of an attempt from which their mean is looked at."""
NOTICED = 0.05
"""Change of a step's seconds from which the costs that policies see are fitted anew."""


class Measured(NamedTuple):
    """Seconds that were measured of jobs.

    Attributes:
        starts: seconds from the first slots to the first step.
        resizes: seconds from the last step to the first one after.
        saves: seconds of resizes, from the last step until the slots are free.
        ends: seconds from the last step until a job that is done has ended.
    """

    starts: list[float]
    resizes: list[float]
    saves: list[float]
    ends: list[float]

    @classmethod
    def of(cls, jobs: Iterable[LiveJob]) -> Measured:
        """Gathers what was measured of jobs."""
        found = [job.measured for job in jobs]
        return cls(*(list(chain.from_iterable(values)) for values in zip(*found, strict=True)))

    def or_of(self, others: Measured) -> Measured:
        """Takes what others have where there is nothing; of all only the last."""
        return Measured(*((own or other)[-LAST:] for own, other in zip(self, others, strict=True)))


NOTHING = Measured([], [], [], [])


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
    """A job that was submitted.

    Attributes:
        submission: what was submitted.
        arrival: second at which it was.
        phase: where it stands; changed by `go`.
        note: what happened to it last, for people.
        assigned: slots that the policy wants it to have.
        held: slots that its ranks hold.
        batch: batch size that the policy wants.
        attempt: number of the last attempt.
        alive: ranks that have not ended.
        codes: exit codes of those that have.
        launched: second at which the attempt was started.
        asked: second at which it was asked to leave.
        stopping: whether somebody wants it to end.
        heard: whether the attempt has said a step.
        silent: whether it was named as silent: then it is left alone.
        progress: what it said last.
        resizes: seconds of its resizes, as measured.
        starts: seconds from its first slots to its first step.
        saves: seconds of resizes in which it still held its slots.
        ends: seconds from its last step to its end.
        points: samples a second, by slots and batch.
        scaling: costs that policies see.
        base: step that the attempt went on from.
        failures: failures since that step was another.
        ended: second at which it was over.
        saving: seconds from its last step to its end, in the resize under way.
        first_failed: why the attempt fails; empty while it does not.
        blameless: whether that is not its own fault.
        looked: steps of the attempt when its speed was last looked at.
        since: samples done when its slots last changed.
        state: what policies see, filled by `seen`.
        segments: slots that it has held.
    """

    submission: Submission
    arrival: float
    phase: Phase = Phase.WAITING
    note: str = ""
    assigned: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    batch: int = 0
    attempt: int = 0
    alive: set[int] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)
    launched: float = 0.0
    asked: float | None = None
    stopping: bool = False
    heard: bool = False
    silent: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    resizes: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    points: dict[tuple[int, int], float] = field(default_factory=dict)
    scaling: Scaling | None = None
    base: int = -1
    failures: int = 0
    ended: float | None = None
    saving: float | None = None
    first_failed: str = ""
    blameless: bool = False
    since: float = 0.0
    looked: int = 0
    state: JobState = field(init=False)
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = self.batch or self.submission.batch
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
    def measured(self) -> Measured:
        """Seconds that were measured of it."""
        return Measured(self.starts, self.resizes, self.saves, self.ends)

    def job(self, others: Measured = NOTHING) -> Job:
        """Makes the job that policies see, of what is known by now.

        Args:
            others: seconds of all jobs, for those that this one has none of yet.
        """
        known = self.measured.or_of(others)
        resize = fmean(known.resizes) if known.resizes else RESIZE_SECONDS
        start, save, end = (
            fmean(seconds) if seconds else 0.0
            for seconds in (known.starts, known.saves, known.ends)
        )
        return replace(
            self.submission.job(
                self.arrival,
                self.scaling or self.submission.first_scaling,
                resize,
                start,
                min(save, resize),
                end,
            ),
            noise=float(self.progress.get("noise") or self.submission.noise),
        )

    def measure(self) -> bool:
        """Takes up the seconds of a step that it has said; whether its costs have changed."""
        told = self.progress
        # Means of few steps are no more than guesses: looked at after 3, 6, 12 ... steps.
        if told.get("seconds") is None or told["steps"] < max(FEW, 2 * self.looked):
            return False
        self.looked = told["steps"]
        self.points[told["ranks"], told["batch"]] = told["batch"] / told["seconds"]
        found = self._fitted()
        before, slots, batch = self.scaling, told["ranks"], told["batch"]
        now = found.seconds(slots, batch)
        if before is not None and abs(before.seconds(slots, batch) / now - 1) < NOTICED:
            return False
        self.scaling = found
        return True

    def _fitted(self) -> Scaling:
        """Costs of what was measured; of one number of slots alone they are those told, scaled."""
        points = [(n, b, speed) for (n, b), speed in self.points.items()]
        if len({n for n, _, _ in points}) > 1 or self.submission.sample_seconds is None:
            return fit_scaling(points)
        told = self.submission.first_scaling
        off = fmean(b / speed / told.seconds(n, b) for n, b, speed in points)
        costs = (told.sample_seconds, told.step_seconds, told.exchange_seconds)
        return Scaling(*(off * seconds for seconds in costs))

    def seen(self, now: float, places: Mapping[int, int], others: Measured) -> JobState:
        """What policies see of it.

        Args:
            now: second.
            places: number among the slots that are there, of each of them.
            others: seconds that were measured of all jobs.
        """
        state, told = self.state, self.progress
        job = self.job(others)
        count = len(places)
        if job.slots > count:
            job = replace(job, slots=count)
        state.job = job
        # What has been done is never more than there is: the end has not been said yet.
        state.done = min(float(told.get("done", 0.0)), job.samples * (1 - 1e-9))
        state.drawn = float(told.get("drawn", 0.0))
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
