"""Dynamic loss scaling for float16 gradients, after Micikevicius et al. 2018."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """The factor that keeps small gradients from vanishing in float16."""

    scale: float = 2.0**16
    # Factor of the scale after `interval` steps without overflow.
    growth: float = 2.0
    # Factor of the scale after an overflow, whose step is skipped.
    backoff: float = 0.5
    # Number of steps without overflow after which the scale grows.
    interval: int = 1000
    smallest: float = 1.0
    largest: float = 2.0**32
    # Number of steps since the last overflow or growth.
    good_steps: int = 0

    def update(self, finite: bool) -> None:
        """Adapts the scale to a step whose gradients were finite or not."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.smallest, self.scale * self.backoff)
        elif self.good_steps >= self.interval:
            self.scale, self.good_steps = min(self.largest, self.scale * self.growth), 0
