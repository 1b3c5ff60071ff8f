"""Simulates rules of sharing into the future, as if no more jobs came.

One world per rule is followed from completion to completion, all in one array. In each phase the
slots are shared exactly (`gulliver.solve.allocate`) for the rule's weights:

    maximise sum_j weight_j x (seconds of j on one slot now) / (seconds of j on n_j slots from now)

where the seconds on another number of slots include the resize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gulliver.schedule._state import View

HORIZON = 40
"""Most jobs that are shared among in a phase: those with the least work."""
NEVER = 1e30
"""Seconds of a sample where a job cannot run."""
LATE = 1e9
"""Seconds that a missed deadline counts as."""

Share = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class SharingRule(NamedTuple):
    """A rule of sharing."""

    # Power of the remaining seconds; None for the weights of the closed form.
    power: float | None
    # Power p of the speed-up, where power is None.
    speedup: float = 0.0
    # Whether jobs that run keep at least their slots.
    lazy: bool = False
    # Whether jobs with a deadline come first.
    reserving: bool = False
    # Whether the sum of weighted slowdowns is minimised instead.
    inverse: bool = False
    # Power of the slowdowns in that sum.
    exponent: float = 1.0
    # Slowdown, over all slots for itself, that a job without slots counts with.
    worst: float = 20.0
    # Times that the seconds of a resize count.
    inertia: float = 1.0
    # Part of its weight that a job is charged for all slots.
    price: float = 0.0

    def __str__(self) -> str:
        text = (
            f"weights of heSRPT at {self.speedup:g}"
            if self.power is None
            else f"seconds to the -{self.power:g}"
        )
        text = f"slowdowns ^ {self.exponent:g}, {text}" if self.inverse else text
        text += f", resizes x {self.inertia:g}" * (self.inertia != 1)
        return text + ", lazy" * self.lazy + ", deadlines first" * self.reserving


RULES = tuple(
    SharingRule(power, speedup, lazy)
    for power, speedup in ((0, 0), (0.5, 0), (1, 0), (2, 0), (5, 0), (None, 0.5), (None, 0.75))
    for lazy in (False, True)
) + tuple(
    SharingRule(power, lazy=lazy, inverse=True)
    for power in (-1, 0, 0.5, 1, 2)
    for lazy in (False, True)
)
CALM = SharingRule(0.45, inverse=True, exponent=0.5, worst=4.7, inertia=4.0, price=0.06)
"""Best rule while jobs keep arriving; a resize counts four times, as the next job undoes it.
Its numbers were searched on 24 traces of each kind, with other seeds than any table of ours."""


class Jobs(NamedTuple):
    """Jobs as numbers."""

    # Samples that are left, [jobs].
    left: np.ndarray
    # Samples a second over slots, [jobs, slots + 1].
    goodputs: np.ndarray
    held: np.ndarray
    # Seconds until it makes progress on these, [jobs].
    ready: np.ndarray
    # Seconds that other slots cost, [jobs]; those of a start of one that has not started.
    resize: np.ndarray
    # Seconds that a resize costs once it has started, [jobs].
    resume: np.ndarray
    # Seconds to the deadline, inf without one, [jobs].
    slack: np.ndarray
    # Seconds until it comes, 0 of one that is there, [jobs].
    comes: np.ndarray


def jobs_of(view: View, left: list[float]) -> Jobs:
    """Converts a view to arrays; `left` is the estimated remaining work."""
    states = view.jobs
    return Jobs(
        np.array(left),
        np.stack([useful_goodputs(state.job.modes(view.cluster).goodputs) for state in states]),
        np.array([state.count for state in states]),
        np.array([max(0.0, state.ready - view.now) for state in states]),
        np.array([state.overhead(view.now, -1) for state in states]),
        np.array([state.job.resize_seconds for state in states]),
        np.array([np.inf if s.job.deadline is None else s.job.deadline - view.now for s in states]),
        np.zeros(len(states)),
    )


def useful_goodputs(goodputs: np.ndarray) -> np.ndarray:
    """Zeroes numbers of slots that are no faster than fewer."""
    before = np.maximum.accumulate(np.concatenate([[0.0], goodputs[:-1]]))
    return np.where(goodputs > before, goodputs, 0.0)


class WorldsOutcome(NamedTuple):
    """Results of worlds that were simulated to their end.

    Attributes:
        counts: slots of the first phase, [worlds, jobs].
        ends: seconds until each job is done, [worlds, jobs].
        starts: seconds until each job first holds slots, [worlds, jobs].
        cost: sum of seconds until jobs are done that are there, or from their arrival on, and of
            `LATE` by missed deadline, [worlds].
    """

    counts: np.ndarray
    ends: np.ndarray
    starts: np.ndarray
    cost: np.ndarray


class Worlds:
    """Worlds that are simulated together."""

    def __init__(
        self,
        jobs: Jobs,
        rules: tuple[SharingRule, ...],
        share: Share,
        first: np.ndarray | None = None,
        limited: bool = False,
        there: np.ndarray | None = None,
        boost: np.ndarray | None = None,
    ) -> None:
        self.rules, self.share, self.first, self.limited = rules, share, first, limited
        wide = (len(rules), 1)
        self.goodputs, self.slack, self.resume = jobs.goodputs, jobs.slack, jobs.resume
        self.left = np.array(np.broadcast_to(jobs.left, (len(rules), jobs.left.shape[-1])))
        self.held, self.comes, self.boost = np.tile(jobs.held, wide), jobs.comes, boost
        self.ready, self.resize = np.tile(jobs.ready, wide), np.tile(jobs.resize, wide)
        self.now = np.zeros(len(rules))
        there = np.ones(self.left.shape, dtype=bool) if there is None else there
        self.there, self.coming = there, there & (self.comes > 0)
        self.alive = there & ~self.coming
        self.ends = np.zeros(self.left.shape)
        self.starts = np.where(self.held > 0, 0.0, np.inf)
        with np.errstate(divide="ignore"):
            # Seconds of one sample on each number of slots; NEVER where it cannot run.
            self.slow = np.minimum(1 / self.goodputs, NEVER)
            self.fastest = self.slow.min(axis=1)
        self.lazy = np.array([rule.lazy for rule in rules])
        self.reserving = np.array([rule.reserving for rule in rules])
        self.inverse = np.array([rule.inverse for rule in rules])[:, None, None]
        self.exponent = np.array([rule.exponent for rule in rules])[:, None, None]
        self.worst = np.array([rule.worst for rule in rules])[:, None, None]
        self.price = np.array([rule.price for rule in rules])[:, None, None]
        self.inertia = np.array([rule.inertia for rule in rules])[:, None]

    def follow(self) -> WorldsOutcome:
        """Simulates all worlds until every job is done."""
        counts = self.shared() if self.first is None else self.first
        firsts = counts.copy()
        for _ in range(3 * self.left.shape[1] + 2):
            self._advance(counts)
            if not (self.alive.any() or self.coming.any()):
                break
            counts = self.shared()
        # Nobody runs first where a lazy rule cannot keep all: tenants want their slots back.
        self.ends[self.alive | (firsts.sum(axis=1) == 0)[:, None]] = np.inf
        late = (self.ends > self.slack).sum(axis=1)
        cost = (self.ends - self.comes * self.there).sum(axis=1) + LATE * late
        return WorldsOutcome(firsts, self.ends, self.starts, cost)

    def shared(self) -> np.ndarray:
        """Shares the slots by each world's rule."""
        worlds, jobs = self.left.shape
        width = self.goodputs.shape[1]
        most = max(1, int(self.alive.sum(axis=1).max()))
        kept = jobs if self.limited else min(most, HORIZON)
        alone = np.where(self.alive, self.left * self.fastest, np.inf)
        # Who runs is never left out: a lazy rule keeps it.
        order = np.argsort(np.where(self.held > 0, -1 / (1 + alone), alone), axis=1, kind="stable")
        chosen = np.arange(jobs)[None].repeat(worlds, 0) if kept == jobs else order[:, :kept]
        row = np.arange(worlds)[:, None]
        alive, held = self.alive[row, chosen], self.held[row, chosen]
        left = self.left[row, chosen]
        lost = self.inertia * self.resize[row, chosen]
        seconds = left[:, :, None] * self.slow[chosen] + lost[:, :, None]
        stays = np.arange(width) == held[:, :, None]
        now = left * self.slow[chosen, held] + self.inertia * self.ready[row, chosen]
        seconds = np.where(stays & (held > 0)[:, :, None], now[:, :, None], seconds)
        seconds[:, :, 0] = NEVER
        alone = left * self.fastest[chosen]
        weights = self._weights(np.where(alive, np.maximum(alone, 1e-9), np.nan))
        if self.boost is not None:
            weights = weights * self.boost[row, chosen]
        values = np.where(
            alive[:, :, None], (weights * alone)[:, :, None] / np.maximum(seconds, 1e-12), -np.inf
        )
        values[:, :, 0] = 0.0
        slowdown = seconds / np.maximum(alone, 1e-9)[:, :, None]
        slower = -weights[:, :, None] * (
            np.minimum(slowdown, self.worst) ** self.exponent
            + self.price * np.arange(width) / (width - 1)
        )
        values = np.where(self.inverse & alive[:, :, None], slower, values)
        values[seconds >= NEVER / 1e6] = -np.inf
        none = -1.05 * weights * (self.worst**self.exponent)[:, :, 0]
        values[:, :, 0] = np.where(self.inverse[:, :, 0] & alive, none, 0.0)
        if self.reserving.any():
            slack = self.slack[chosen] - self.now[:, None]
            urgent = np.isfinite(slack) & (slack > 0) & alive & self.reserving[:, None]
            meets = urgent[:, :, None] & (seconds <= slack[:, :, None])
            # What comes first is what is due first.
            due = np.argsort(np.argsort(np.where(urgent, slack, np.inf), axis=1), axis=1)
            values = np.where(meets, values + 1e6 * (jobs - due)[:, :, None], values)
        fewer = (np.arange(width) < held[:, :, None]) & self.lazy[:, None, None]
        values[fewer & alive[:, :, None]] = -np.inf
        found, _ = self.share(values)
        counts = np.zeros((worlds, jobs), dtype=np.int64)
        np.put_along_axis(counts, chosen, found, axis=1)
        return counts

    def _weights(self, alone: np.ndarray) -> np.ndarray:
        """Weights of jobs by their remaining work; nan marks finished jobs."""
        weights = np.zeros(alone.shape)
        shortest = np.where(np.isnan(alone), np.inf, alone).min(axis=1)
        shortest = np.where(np.isfinite(shortest), shortest, 1.0)
        for world, rule in enumerate(self.rules):
            if rule.power is not None:
                relative = alone[world] / max(shortest[world], 1e-9)
                weights[world] = np.maximum(relative**-rule.power, 1e-6)
                continue
            # The optimal policy for speed-up n^p (Berg et al. 2020, "heSRPT"): with m jobs the i-th
            # longest gets weight ((i/m)^(1/(1-p)) - ((i-1)/m)^(1/(1-p)))^(1-p).
            known = ~np.isnan(alone[world])
            order = np.argsort(-np.where(known, alone[world], -np.inf), kind="stable")
            count = int(known.sum())
            ends = (np.arange(count + 1) / max(1, count)) ** (1 / (1 - rule.speedup))
            weights[world, order[:count]] = np.diff(ends) ** (1 - rule.speedup)
        return np.nan_to_num(weights)

    def _advance(self, counts: np.ndarray) -> None:
        """Advances every world to its next completion."""
        moved = (counts != self.held) & self.alive
        self.ready = np.where(moved & (counts > 0), self.resize, self.ready)
        self.held = np.where(self.alive, counts, 0)
        runs = self.held > 0
        self.starts = np.where(runs, np.minimum(self.starts, self.now[:, None]), self.starts)
        self.resize = np.where(runs, self.resume, self.resize)
        slow = self.slow[np.arange(counts.shape[1])[None], self.held]
        with np.errstate(invalid="ignore"):
            until = np.where(runs, self.ready + self.left * slow, np.inf)
        spent = until.min(axis=1)[:, None]
        if self.coming.any():
            wait = np.where(self.coming, self.comes, np.inf).min(axis=1) - self.now
            spent = np.minimum(spent, np.maximum(wait, 0.0)[:, None])
        spent = np.where(np.isfinite(spent), spent, 0.0)
        ran = np.where(runs, np.maximum(0.0, spent - self.ready), 0.0)
        with np.errstate(invalid="ignore"):
            self.left = np.maximum(0.0, self.left - np.where(runs, ran / slow, 0.0))
        self.ready = np.maximum(0.0, self.ready - spent)
        self.now = self.now + spent[:, 0]
        ended = (until <= spent * (1 + 1e-12)) & runs
        self.ends = np.where(ended, self.now[:, None], self.ends)
        self.alive &= ~ended
        self.held = np.where(ended, 0, self.held)
        came = self.coming & (self.comes <= self.now[:, None] * (1 + 1e-12))
        self.alive, self.coming = self.alive | came, self.coming & ~came
