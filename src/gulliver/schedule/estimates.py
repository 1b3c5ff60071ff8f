"""Estimates the samples that a job has left; announced samples are taken as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.schedule.state import JobState

# curves: posterior from losses. How far the loss of finished jobs had fallen at their end is known;
#   a job's own loss says which of these it has not passed yet. Falls back to `lengths` until
#   `LEAST` jobs are done and before a job's first epoch.
# lengths: posterior from durations only: seconds, on the slots asked for, of jobs that lasted
#   longer, and a tail that halves with every doubling for those that nobody has seen.
# perfect: the truth, to show what a better estimate would gain.
Way = Literal["curves", "lengths", "perfect"]
LEAST = 3
"""Jobs that must be done before their curves are looked at."""
FLAT = 1e-6
"""A loss that has not fallen by more says nothing: the script reports none."""
QUANTILES = (np.arange(16) + 0.5) / 16
"""Quantiles that a mean is taken over: the tail has none."""


class Estimator:
    """Estimates samples that are left.

    Args:
        way: one of the ways above, for jobs whose samples are not announced.

    Raises:
        GulliverError: an unknown way.
    """

    def __init__(self, way: Way = "curves") -> None:
        if way not in get_args(Way):
            raise GulliverError(f"unknown estimate {way!r}: {nearest(way, get_args(Way))}")
        self.way = way
        self.begin()

    def begin(self) -> None:
        """Resets what it has learned."""
        self.finished, self.seconds, self.falls = 0, np.zeros(0), np.zeros(0)

    def learn(self, finished: Sequence[JobState]) -> None:
        """Learns from finished jobs."""
        if len(finished) == self.finished:
            return
        self.finished = len(finished)
        self.seconds = np.sort([state.done / _requested_rate(state) for state in finished])
        falls = [_loss_fall(state) for state in finished if not state.job.announced]
        self.falls = np.sort([fall for fall in falls if fall > FLAT])

    def remaining(self, state: JobState) -> float:
        """Estimates the samples that a job has left, counted at its own batch size."""
        if state.job.announced or self.way == "perfect":
            return state.job.samples - state.done
        return float(self._quantiles(state, QUANTILES).mean())

    def draws(self, state: JobState, count: int, draw: np.random.Generator) -> np.ndarray:
        """Draws what a job may have left, [count]: one of each part of its posterior, shuffled."""
        if state.job.announced or self.way == "perfect":
            return np.full(count, self.remaining(state))
        return self._quantiles(state, draw.permutation((np.arange(count) + 0.5) / count))

    def _quantiles(self, state: JobState, at: np.ndarray) -> np.ndarray:
        """Quantiles of the samples that a job has left."""
        least = state.job.epoch_samples * (1 - state.epochs % 1)
        fallen = _loss_fall(state)
        known = len(self.falls) >= LEAST and state.epochs >= 1 and fallen > FLAT
        if self.way == "curves" and known:
            ends = self.falls[self.falls > fallen]
            # Nobody's loss has fallen so far: it is at its end, as far as one can tell.
            ends = ends if len(ends) else np.array([fallen])
            ratios = np.quantile(ends, at) / fallen - 1
            return np.maximum(least, state.done * ratios)
        rate = _requested_rate(state)
        served = max(state.done, least) / rate
        longer = self.seconds[self.seconds > served]
        # One job that nobody has seen is counted among those that were.
        tail = 1 / (len(longer) + 1)
        unseen = served / np.maximum(np.minimum(at / tail, 1.0), 1e-3)
        if not len(longer):
            return np.maximum(least, unseen * rate - state.done)
        seen = np.quantile(longer, np.clip((at - tail) / (1 - tail), 0, 1))
        return np.maximum(least, np.where(at < tail, unseen, seen) * rate - state.done)


def _requested_rate(state: JobState) -> float:
    """Samples a second on the slots and with the batch size that its user asked for."""
    return state.job.scaling.throughput(state.job.slots, state.job.batch)


def _loss_fall(state: JobState) -> float:
    """Log of the relative fall of the loss, which every training script sees."""
    return state.job.curvature * state.done / state.job.samples
