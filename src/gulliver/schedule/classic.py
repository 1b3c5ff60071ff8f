"""Baseline policies: FIFO, SRPT, Tiresias, Pollux.

The last two follow their papers; each class lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gulliver.schedule.state import Allotment, Decision, FreeSlots, JobState, Policy, View
from gulliver.solve.allocation import allocate

PERIOD = 60.0  # seconds between scheduling rounds; arrivals and ends also trigger one
FULL_WEIGHT = 14400.0  # slot-seconds above which Pollux decreases a job's weight
LEAST_SPEEDUP = 0.05  # speedup that Pollux assigns to a job without slots


def packed(view: View, order: Sequence[JobState], blocking: bool = False) -> Decision:
    """Allocates requested slots in order; `blocking` stops at the first job that does not fit."""
    room, given, why = FreeSlots(view), {}, {}
    for place, state in enumerate(order):
        job = state.job
        if room.fits(job, job.slots):
            room.take(job, job.slots)
            given[job.name] = Allotment(job.slots, job.batch)
            why[job.name] = f"number {place + 1} in the queue, with the requested slots"
            continue
        why[job.name] = f"requests {job.slots} slots, and {room.most(job)} are available to it"
        if blocking:
            for behind in order[place + 1 :]:
                why[behind.job.name] = (
                    f"queued behind {job.name}, which waits for {job.slots} slots"
                )
            break
    return Decision(given, why=why)


class Fifo(Policy):
    """First in, first out: each job runs to its end with the slots it requests."""

    name, what = "fifo", "in order of arrival, without preemption"
    preempts = False

    def decide(self, view: View) -> Decision:
        running = [state for state in view.jobs if state.slots]
        waiting = [state for state in view.jobs if not state.slots]
        return packed(view, [*running, *waiting], blocking=True)


class Srpt(Policy):
    """Shortest remaining processing time first, with the requested slots."""

    # An oracle: it uses the true remaining time of every job, announced or not.

    name, what = (
        "srpt",
        "shortest remaining time first, with the requested slots; knows all lengths",
    )

    def decide(self, view: View) -> Decision:
        def left(state: JobState) -> float:
            job = state.job
            return (job.samples - state.done) / job.goodput(job.slots, job.batch)

        return packed(view, sorted(view.jobs, key=left))


class Tiresias(Policy):
    """Least attained service first, with the requested slots."""

    # Discretized two-dimensional LAS (Gu et al. 2019, "Tiresias"): a job moves to a lower queue
    # when its slot-seconds exceed a limit; within a queue the earlier start is first. It needs no
    # job lengths. Not implemented: promotion of starving jobs, placement by the skew of a model's
    # tensors.

    name, what = "tiresias", "least attained service first, with the requested slots"

    def __init__(self, limits: tuple[float, ...] = (1000.0, 10000.0)) -> None:
        self.limits = limits

    def _queue(self, state: JobState) -> int:
        # A limit reached up to rounding counts as reached: the policy woke at exactly that time.
        return sum(state.service >= limit * (1 - 1e-12) for limit in self.limits)

    def decide(self, view: View) -> Decision:
        """Packs jobs by queue; sets the wake-up time to the next demotion of a running job."""

        def place(state: JobState) -> tuple[int, float, float]:
            started = np.inf if state.started is None else state.started
            return self._queue(state), started, state.job.arrival

        decision = packed(view, sorted(view.jobs, key=place))
        sinks = []
        for state in view.jobs:
            if state.job.name in decision.allotments and self._queue(state) < len(self.limits):
                left = self.limits[self._queue(state)] - state.service
                sinks.append(view.now + left / state.job.slots)
        return Decision(decision.allotments, min(sinks, default=None), decision.why)


class Pollux(Policy):
    """Allocates slots to maximize the power mean of the jobs' speedups.

    The fitness of Qiao et al. 2021, "Pollux": speedup is goodput relative to a fair share, averaged
    with power -1; weights decrease with attained service, and a job that is moved is discounted by
    (age - resizes x resize) / (age + resize). Its genetic search is replaced by exact dynamic
    programming, because the sum of 1 / speedup is separable; batch sizes follow goodput. Not
    implemented: placement in the search, and a cluster of changing size.
    """

    name, what = "pollux", "power mean of speedups, batch sizes by goodput"

    def decide(self, view: View) -> Decision:
        return self._decision(view, shared(view, self.fitness(view)[None])[0])

    def _decision(self, view: View, counts: np.ndarray) -> Decision:
        given = {
            s.job.name: Allotment(int(n), s.job.modes(view.cluster).batches[n])
            for s, n in zip(view.jobs, counts, strict=True)
            if n
        }
        return Decision(given, view.now + PERIOD)

    def fitness(self, view: View) -> np.ndarray:
        """Fitness of each job for each number of slots, [jobs, slots + 1]; the sum is maximized."""
        slots = view.cluster.slots
        fair = max(1, slots // len(view.jobs))
        values = np.full((len(view.jobs), slots + 1), -np.inf)
        for row, state in enumerate(view.jobs):
            modes = state.job.modes(view.cluster)
            share = min(fair, modes.useful)
            speed = modes.goodputs / modes.goodputs[share]
            age, cost = view.now - state.job.arrival, state.job.resize_seconds
            moved = (age - state.resizes * cost) / (age + cost) if age + cost > 0 else 1.0
            if state.started is not None:
                stays = np.arange(slots + 1) == state.count
                speed = np.where(stays, speed, speed * max(moved, LEAST_SPEEDUP))
            weight = min(1.0, FULL_WEIGHT / max(state.service, 1.0)) ** 0.5
            values[row] = -weight / np.maximum(speed, LEAST_SPEEDUP)
            values[row, modes.useful + 1 :] = -np.inf
        return values


def shared(view: View, values: np.ndarray) -> np.ndarray:
    """Allocates slots optimally under the tenants' limits; `values` are those of `allocate`."""
    return shares(view)(values)[0]


def shares(view: View) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns `allocate` bound to a view's limits, with one group or one per tenant."""
    if not view.cluster.quotas:
        return allocate
    tenants = sorted({state.job.tenant for state in view.jobs})
    groups = [
        [place for place, state in enumerate(view.jobs) if state.job.tenant == tenant]
        for tenant in tenants
    ]
    limits = [view.limits[tenant] for tenant in tenants]
    return lambda values: allocate(values, groups, limits)
