"""How many samples a job has left, as a policy may know it.

Where a job's samples are announced, that is no estimate. Else there are three ways:

- ``progress``: a network predicts the Beta distribution of a job's progress from what is seen
  of it, and the mean of what is left follows; trained anew as jobs end (`_predictor.py`);
- ``history``: the mean of what finished jobs that lasted longer still had to do;
- ``none``: as much again as it has done, which needs no history (a job that has lasted long will).

``perfect`` looks at the truth, to show what a better estimate would gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.schedule._predictor import ProgressPredictor
from gulliver.schedule._state import JobState

Way = Literal["progress", "history", "none", "perfect"]


class Estimator:
    """Estimates samples that are left.

    Args:
        way: one of the ways above, for jobs whose samples are not announced.
        seed: seed of the network.

    Raises:
        GulliverError: an unknown way.
    """

    def __init__(self, way: Way = "progress", seed: int = 0) -> None:
        if way not in get_args(Way):
            raise GulliverError(f"unknown estimate {way!r}: {nearest(way, get_args(Way))}")
        self.way, self.seed = way, seed
        self.begin()

    def begin(self) -> None:
        """Forgets what it has learned."""
        self.totals = np.zeros(0)
        self.predictor = ProgressPredictor(self.seed)

    def learn(self, finished: Sequence[JobState]) -> None:
        """Learns from jobs that are done."""
        if len(finished) == len(self.totals):
            return
        if len(finished) < len(self.totals):
            self.begin()
        self.totals = np.array([state.done for state in finished])
        if self.way == "progress" and any(not s.job.announced for s in finished):
            self.predictor.learn(finished)

    def remaining(self, state: JobState) -> float:
        """Estimates the samples that a job has left, counted at its own batch size."""
        job = state.job
        if job.announced or self.way == "perfect":
            return job.samples - state.done
        # Nobody knows less than the part of an epoch that is left, nor of a new job than one epoch.
        least = job.epoch_samples * (1 - state.epochs % 1)
        if self.way == "progress" and state.epochs >= 1 and self.predictor.trained:
            return max(least, state.done * self.predictor.left_over_done(state))
        if self.way == "none" or not len(self.totals):
            return max(least, state.done)
        longer = self.totals[self.totals > state.done]
        guess = float(longer.mean()) - state.done if len(longer) else state.done
        return max(least, guess)
