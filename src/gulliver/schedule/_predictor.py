"""Progress of a job as a Beta distribution, learned from finished jobs (ONES, Bian et al. 2021).

Progress is ~ Beta(a, b) with a the epochs done and b = 1 + relu(network of five features).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gulliver.schedule._state import JobState

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
