"""Slots in transit: a job that leaves holds its slots until it has saved; the next one waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from gulliver.schedule._state import JobState


class Start(NamedTuple):
    """A decided start of a job."""

    # Second of it; inf of a job that has no slots.
    at: float
    # Second at which it has left the slots that it had before.
    gone: float
    # Seconds from then to its first step.
    seconds: float


@dataclass
class Handover:
    """Decided starts, and slots that are not free yet."""

    # Second at which a slot is free of the job that leaves it.
    free: dict[int, float] = field(default_factory=dict)
    # Last start of each job.
    starts: dict[str, Start] = field(default_factory=dict)

    def end(self, state: JobState, now: float) -> None:
        """Holds the slots of a job that has done its last step until it has ended."""
        if state.job.end_seconds:
            self.free |= dict.fromkeys(state.slots, now + state.job.end_seconds)

    def leave(self, state: JobState, now: float) -> Start:
        """Plans a job's leave from its slots, before they are given to others."""
        # What is decided before a job was started again costs nothing more: it starts on what was
        # decided last.
        job, last = state.job, self.starts.get(state.job.name)
        if last is not None and (last.at > now or not state.slots):
            return last
        if state.started is None:
            return Start(math.inf, now, job.start_seconds)
        if not job.save_seconds or not state.slots:
            return Start(math.inf, now, job.resize_seconds - job.save_seconds)
        # At the end of a step, half of one from now in the mean; of the first, where it starts.
        step = (state.scaling or job.scaling).seconds(state.count, state.batch)
        still = step if state.ready > now else step / 2
        gone = max(state.ready, now) + still + job.save_seconds
        self.free |= dict.fromkeys(state.slots, gone)
        # The step that it still does counts, so that it loses no more than its resize.
        return Start(math.inf, gone, max(0.0, job.resize_seconds - job.save_seconds - still))

    def enter(self, state: JobState, slots: tuple[int, ...], now: float, left: Start) -> float:
        """Starts a job on slots, or on none, once it and others have left; returns when it runs."""
        at = max(now, left.gone, *(self.free.get(slot, now) for slot in slots))
        self.starts[state.job.name] = left._replace(at=at if slots else math.inf)
        return at + left.seconds
