"""Does a trained model show what the sentence says?

Two judges, trained or defined on real clips only, look at generated ones. Their own success on real
held-out clips, the ceiling, is measured first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.data import DIGITS, DIRECTIONS, Bucket, MovingDigits
from gulliver.errors import GulliverError
from gulliver.video._config import SENTENCES_NEVER_TRAINED, TrainConfig
from gulliver.video._display import console
from gulliver.video._generate import Request, SamplingConfig, VideoModel
from gulliver.video._judges import Judges, Scores, train_judges
from gulliver.video._sources import parse_held_out


@dataclass(frozen=True)
class Sentence:
    """What a prompt of the moving digits asks for."""

    digit: int
    direction: int

    @property
    def prompt(self) -> str:
        """The words."""
        return f"the digit {DIGITS[self.digit]} moving {DIRECTIONS[self.direction]}"
