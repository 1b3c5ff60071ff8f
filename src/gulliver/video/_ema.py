"""The averaged weights that generation uses."""

from __future__ import annotations

import torch
from torch import nn

from gulliver.memory import before_write


class ExponentialAverage:
    """An exponential moving average of a model's parameters and buffers, in their own dtype.

    The decay warms up as (1 + k) / (10 + k) over steps k, so that the random start is forgotten
    soon. Every rank holds the same parameters after a step, so every rank keeps the same average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Moves the average towards the model's present values."""
        before_write(self.shadow.values())
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        values = model.state_dict()
        averaged = [name for name, value in values.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.shadow[name] for name in averaged],
            [values[name].detach() for name in averaged],
            1 - decay,
        )
        for name, value in values.items():
            if not value.is_floating_point():
                self.shadow[name].copy_(value)
