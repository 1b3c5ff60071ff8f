"""Samples of a step: which pictures, how they weigh, and what their random numbers come of.

All of it follows from the options and the number of the step, so that a run on other ranks, in
other micro-batches, or resumed, sees the same samples with the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gulliver.dreambooth._config import DreamboothConfig
from gulliver.jobs import derive


@dataclass(frozen=True)
class StepSample:
    """A sample of a step."""

    # Number of its picture among the subject's, and after them the prior ones.
    number: int
    # Weight of its loss in that of the step.
    weight: float
    # Seed of all that is random about it.
    seed: int


class SampleOrder:
    """The samples of every step."""

    def __init__(self, config: DreamboothConfig, subjects: int, priors: int) -> None:
        self.config, self.subjects, self.priors = config, subjects, priors

    def samples(self, step: int) -> list[StepSample]:
        """Samples of a step: the mean loss of the subject's, and of the prior ones by a weight."""
        config, size = self.config, self.config.batch
        found = [(self._picture(0, step, n), 1 / size) for n in range(size)]
        if self.priors:
            share = config.prior_weight / size
            found += [(self.subjects + self._picture(1, step, n), share) for n in range(size)]
        return [
            StepSample(picture, weight, derive(config.seed, 3, step, number))
            for number, (picture, weight) in enumerate(found)
        ]

    def _picture(self, kind: int, step: int, number: int) -> int:
        """A picture: each is shown once before one is shown again."""
        count = (self.subjects, self.priors)[kind]
        epoch, place = divmod(step * self.config.batch + number, count)
        seed = derive(self.config.seed, 4 + kind, epoch)
        return int(np.random.default_rng(seed).permutation(count)[place])


def shares(
    samples: Sequence[StepSample], place: int, places: int, micro: int | None
) -> list[list[StepSample]]:
    """Micro-batches of a rank; all ranks have as many, of the same sizes."""
    # What does not divide is filled up with samples that weigh nothing.
    each = math.ceil(len(samples) / places)
    size = min(micro or each, each)
    each = math.ceil(each / size) * size
    padding = [replace(samples[0], weight=0.0)] * (each * places - len(samples))
    own = [*samples, *padding][place * each : (place + 1) * each]
    return [own[start : start + size] for start in range(0, each, size)]
