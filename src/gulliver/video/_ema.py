"""Averaged weights, which generation uses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gulliver.checkpoint import as_leaf
from gulliver.comm import ALONE, RankGroup
from gulliver.memory import Part, before_write, part_of, region_of, set_region


class ExponentialAverage:
    """An exponential moving average of a model's parameters and buffers, in their own dtype."""

    # The decay warms up as (1 + k) / (10 + k) over steps k, so that the random start is forgotten
    # soon. Every rank that holds the same parameters after a step keeps the same average; of a
    # parameter that is cut between ranks each keeps that of its region.

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        values = model.state_dict(keep_vars=True)
        self.shadow: dict[str, Tensor] = {n: v.detach().clone() for n, v in values.items()}
        for name, value in values.items():
            region = region_of(value)
            if region is not None:
                set_region(self.shadow[name], region)

    def leaves(
        self, replicas: RankGroup = ALONE, writes: Callable[[str, Tensor], bool] | None = None
    ) -> dict[str, Tensor | Part]:
        """Returns the average by name, regions as parts of their whole."""
        if writes is not None:
            own = [name for name, value in self.shadow.items() if writes(name, value)]
            mine = own[replicas.rank :: replicas.size]
            return {name: part_of(self.shadow[name]) for name in mine}
        cut = [name for name, value in self.shadow.items() if region_of(value) is not None]
        others = set(cut) - set(cut[replicas.rank :: replicas.size])
        return {n: as_leaf(v) for n, v in self.shadow.items() if n not in others}

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
