"""Dynamic loss scaling for float16 gradients, after Micikevicius et al. 2018."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """The factor that keeps small gradients from vanishing in float16.

    Attributes:
        scale: factor of the next loss.
        growth: factor of the scale after `interval` steps without overflow.
        backoff: factor of the scale after an overflow, whose step is skipped.
        interval: number of steps without overflow after which the scale grows.
        smallest: least value of the scale.
        largest: greatest value of the scale.
        good_steps: number of steps since the last overflow or growth.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 1000
    smallest: float = 1.0
    largest: float = 2.0**32
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapts the scale to a step whose gradients were finite or not."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.smallest, self.scale * self.backoff)
        elif self.good_steps >= self.interval:
            self.scale, self.good_steps = min(self.largest, self.scale * self.growth), 0
