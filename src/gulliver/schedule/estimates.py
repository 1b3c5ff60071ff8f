"""Estimates the remaining samples of jobs that do not announce their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from gulliver.errors import check_known
from gulliver.schedule.state import JobState

# curves: posterior from losses. Finished jobs show how far losses had fallen at the end; a job's
#   own loss shows which of these it has not reached yet. Falls back to `lengths` until `LEAST` jobs
#   are done, and before a job's first epoch.
# lengths: posterior from durations only: the seconds, on the requested slots, of jobs that ran
#   longer, and a tail for unseen lengths that halves with every doubling.
# perfect: the true value, which shows the potential of a better estimate.
Way = Literal["curves", "lengths", "perfect"]
LEAST = 3  # minimum number of finished jobs before their loss curves are used
FLAT = 1e-6  # smaller decreases of the loss are ignored (the script may report none)
QUANTILES = (np.arange(16) + 0.5) / 16
"""Quantiles over which a job's remaining samples are averaged."""


class Estimator:
    """Estimates the remaining samples of jobs."""

    def __init__(self, way: Way = "curves") -> None:
        check_known("estimate", way, get_args(Way))
        self.way = way
        self.begin()

    def begin(self) -> None:
        self.finished, self.seconds, self.falls = 0, np.zeros(0), np.zeros(0)

    def learn(self, finished: Sequence[JobState]) -> None:
        if len(finished) == self.finished:
            return
        self.finished = len(finished)
        self.seconds = np.sort([state.done / _requested_rate(state) for state in finished])
        falls = [_loss_fall(state) for state in finished if not state.job.announced]
        self.falls = np.sort([fall for fall in falls if fall > FLAT])

    def remaining(self, state: JobState) -> float:
        """Estimates a job's remaining samples at its own batch size."""
        if state.job.announced or self.way == "perfect":
            return state.job.samples - state.done
        return float(self._quantiles(state, QUANTILES).mean())

    def draws(self, state: JobState, count: int, draw: np.random.Generator) -> np.ndarray:
        """Draws `count` posterior values of a job's remaining samples, stratified and shuffled."""
        if state.job.announced or self.way == "perfect":
            return np.full(count, self.remaining(state))
        return self._quantiles(state, draw.permutation((np.arange(count) + 0.5) / count))

    def _quantiles(self, state: JobState, at: np.ndarray) -> np.ndarray:
        least = state.job.epoch_samples * (1 - state.epochs % 1)
        fallen = _loss_fall(state)
        known = len(self.falls) >= LEAST and state.epochs >= 1 and fallen > FLAT
        if self.way == "curves" and known:
            ends = self.falls[self.falls > fallen]
            # No finished job's loss has fallen this far: it is probably at its end.
            ends = ends if len(ends) else np.array([fallen])
            ratios = np.quantile(ends, at) / fallen - 1
            return np.maximum(least, state.done * ratios)
        rate = _requested_rate(state)
        served = max(state.done, least) / rate
        longer = self.seconds[self.seconds > served]
        # Adds one unseen job to those observed.
        tail = 1 / (len(longer) + 1)
        unseen = served / np.maximum(np.minimum(at / tail, 1.0), 1e-3)
        if not len(longer):
            return np.maximum(least, unseen * rate - state.done)
        seen = np.quantile(longer, np.clip((at - tail) / (1 - tail), 0, 1))
        return np.maximum(least, np.where(at < tail, unseen, seen) * rate - state.done)


def _requested_rate(state: JobState) -> float:
    return state.job.scaling.throughput(state.job.slots, state.job.batch)


def _loss_fall(state: JobState) -> float:
    """Negative log of the loss relative to its first value."""
    return state.job.curvature * state.done / state.job.samples
