"""Progress of a job as a Beta distribution, learned from finished jobs (ONES, Bian et al. 2021).

Progress is ~ Beta(a, b) with a the epochs done and b = 1 + relu(network of five features).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.schedule.state import JobState

EPOCHS, BATCH, ROWS, RATE, DECAY, WIDTH = 60, 8, 2000, 1e-4, 1e-4, 64
FIRST_LOSS = 5.0


def features(state: JobState, epochs: float) -> list[float]:
    """What is seen of a job after some epochs: five numbers."""
    # They are the log of the epoch's samples, the first loss, epochs, the share that the loss has
    # fallen by, and the accuracy; loss and accuracy follow the job's curvature.
    job = state.job
    progress = epochs * job.epoch_samples / job.samples
    fallen = 1 - math.exp(-job.curvature * progress)
    accuracy = fallen / (1 - math.exp(-job.curvature))
    return [math.log(job.epoch_samples), FIRST_LOSS, epochs, fallen, accuracy]


def beta_slopes(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Gradient of the mean negative log-likelihood of Beta(a, b) by the network's weights."""
    import torch

    hidden, bias, last, end = weights
    layer = np.tanh(x @ hidden + bias)
    out = layer @ last + end
    b = 1 + np.maximum(out, 0)
    # d/db of -log Beta(y; a, b) = -log(1 - y) + digamma(b) - digamma(a + b).
    both = torch.digamma(torch.from_numpy(np.stack([b, np.maximum(x[:, 2], 1e-3) + b]))).numpy()
    slope = (-np.log1p(-y) + both[0] - both[1]) * (out > 0) / len(x)
    inner = (slope[:, None] * last) * (1 - layer * layer)
    return [x.T @ inner, inner.sum(axis=0), slope @ layer, slope.sum(keepdims=True)]


class ProgressPredictor:
    """Learns how far jobs are."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.trained, self.next_size = seed, False, 1
        self.weights: list[np.ndarray] = []

    def learn(self, finished: Sequence[JobState]) -> None:
        """Trains when the number of finished jobs has doubled since."""
        # The paper trains again after every job that ends; after the 1st, 2nd, 4th, 8th ... is what
        # a simulation can afford. The artifact also queries the network in another unit than it was
        # trained on; here both are epochs.
        known = [state for state in finished if not state.job.announced]
        if len(known) < self.next_size:
            return
        self.next_size = 2 * len(known)
        rows, targets = [], []
        for state in known:
            total = state.job.samples / state.job.epoch_samples
            for epoch in range(1, max(2, math.ceil(total))):
                rows.append(features(state, min(epoch, 0.999 * total)))
                targets.append(min(epoch / total, 0.999))
        self._train(np.array(rows[-ROWS:]), np.array(targets[-ROWS:]))
        self.trained = True

    def _train(self, x: np.ndarray, y: np.ndarray) -> None:
        """Maximises the likelihood of `y`, [rows], given `x`, [rows, 5]."""
        draw = np.random.default_rng(self.seed)
        hidden = draw.standard_normal((5, WIDTH)) / math.sqrt(5)
        last = draw.standard_normal(WIDTH) / math.sqrt(WIDTH)
        weights = [hidden, np.zeros(WIDTH), last, np.ones(1)]
        moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
        step = 0
        for _ in range(EPOCHS):
            order = draw.permutation(len(x))
            for start in range(0, len(x), BATCH):
                chosen, step = order[start : start + BATCH], step + 1
                slopes = beta_slopes(weights, x[chosen], y[chosen])
                for weight, slope, (mean, square) in zip(weights, slopes, moments, strict=True):
                    slope += DECAY * weight
                    mean += 0.1 * (slope - mean)
                    square += 0.001 * (slope * slope - square)
                    root = np.sqrt(square / (1 - 0.999**step)) + 1e-8
                    weight -= RATE / (1 - 0.9**step) * mean / root
        self.weights = weights

    def beta(self, state: JobState) -> tuple[float, float]:
        """Returns a and b of a job's progress; a job must have done an epoch."""
        a = max(state.epochs, 1e-3)
        if not self.trained:
            return a, 1.0 + a
        hidden, bias, last, end = self.weights
        seen = np.array(features(state, state.epochs))
        out = float((np.tanh(seen @ hidden + bias) @ last + end)[0])
        return a, 1.0 + max(0.0, out)

    def left_over_done(self, state: JobState) -> float:
        """Mean of what is left over what is done: b / (a - 1), where the Beta has one."""
        a, b = self.beta(state)
        return b / max(a - 1, 0.5)


# Estimates the samples that a job has left; announced samples are taken as they are.


# curves: posterior from losses. How far the loss of finished jobs had fallen at their end is known;
#   a job's own loss says which of these it has not passed yet. Falls back to `lengths` until
#   `LEAST` jobs are done and before a job's first epoch.
# lengths: posterior from durations only: seconds, on the slots asked for, of jobs that lasted
#   longer, and a tail that halves with every doubling for those that nobody has seen.
# progress: a network predicts the Beta distribution of a job's progress (`estimates.py`).
# history: mean of what finished jobs that lasted longer still had to do.
# none: as much again as is done; a job that has lasted long will last.
# perfect: the truth, to show what a better estimate would gain.
Way = Literal["curves", "lengths", "progress", "history", "none", "perfect"]
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
        seed: seed of the network.

    Raises:
        GulliverError: an unknown way.
    """

    def __init__(self, way: Way = "curves", seed: int = 0) -> None:
        if way not in get_args(Way):
            raise GulliverError(f"unknown estimate {way!r}: {nearest(way, get_args(Way))}")
        self.way, self.seed = way, seed
        self.begin()

    def begin(self) -> None:
        """Resets what it has learned."""
        self.totals, self.seconds, self.falls = np.zeros(0), np.zeros(0), np.zeros(0)
        self.predictor = ProgressPredictor(self.seed)

    def learn(self, finished: Sequence[JobState]) -> None:
        """Learns from finished jobs."""
        if len(finished) == len(self.totals):
            return
        if len(finished) < len(self.totals):
            self.begin()
        self.totals = np.array([state.done for state in finished])
        self.seconds = np.sort([state.done / _asked_rate(state) for state in finished])
        falls = [_fallen(state) for state in finished if not state.job.announced]
        self.falls = np.sort([fall for fall in falls if fall > FLAT])
        if self.way == "progress" and any(not s.job.announced for s in finished):
            self.predictor.learn(finished)

    def remaining(self, state: JobState) -> float:
        """Estimates the samples that a job has left, counted at its own batch size."""
        job = state.job
        if job.announced or self.way == "perfect":
            return job.samples - state.done
        if self.way in ("curves", "lengths"):
            return float(self._quantiles(state, QUANTILES).mean())
        # Nobody knows less than the part of an epoch that is left, nor of a new job than one epoch.
        least = job.epoch_samples * (1 - state.epochs % 1)
        if self.way == "progress" and state.epochs >= 1 and self.predictor.trained:
            return max(least, state.done * self.predictor.left_over_done(state))
        if self.way == "none" or not len(self.totals):
            return max(least, state.done)
        longer = self.totals[self.totals > state.done]
        guess = float(longer.mean()) - state.done if len(longer) else state.done
        return max(least, guess)

    def draws(self, state: JobState, count: int, draw: np.random.Generator) -> np.ndarray:
        """Draws what a job may have left, [count]: one of each part of its posterior, shuffled.

        Ways that have no posterior, and announced lengths, give the same `count` times.
        """
        if state.job.announced or self.way not in ("curves", "lengths"):
            return np.full(count, self.remaining(state))
        return self._quantiles(state, draw.permutation((np.arange(count) + 0.5) / count))

    def _quantiles(self, state: JobState, at: np.ndarray) -> np.ndarray:
        """Quantiles of the samples that a job has left."""
        least = state.job.epoch_samples * (1 - state.epochs % 1)
        fallen = _fallen(state)
        known = len(self.falls) >= LEAST and state.epochs >= 1 and fallen > FLAT
        if self.way == "curves" and known:
            ends = self.falls[self.falls > fallen]
            # Nobody's loss has fallen so far: it is at its end, as far as one can tell.
            ends = ends if len(ends) else np.array([fallen])
            ratios = np.quantile(ends, at) / fallen - 1
            return np.maximum(least, state.done * ratios)
        rate = _asked_rate(state)
        served = max(state.done, least) / rate
        longer = self.seconds[self.seconds > served]
        # One job that nobody has seen is counted among those that were.
        tail = 1 / (len(longer) + 1)
        unseen = served / np.maximum(np.minimum(at / tail, 1.0), 1e-3)
        if not len(longer):
            return np.maximum(least, unseen * rate - state.done)
        seen = np.quantile(longer, np.clip((at - tail) / (1 - tail), 0, 1))
        return np.maximum(least, np.where(at < tail, unseen, seen) * rate - state.done)


def _asked_rate(state: JobState) -> float:
    """Samples a second on the slots and with the batch size that its user asked for."""
    return state.job.scaling.throughput(state.job.slots, state.job.batch)


def _fallen(state: JobState) -> float:
    """Log of the relative fall of the loss, which every training script sees."""
    return state.job.curvature * state.done / state.job.samples
