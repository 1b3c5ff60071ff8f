"""State that optimizers such as Adagrad make before their first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has state of steps; some, such as Adagrad, make theirs before."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state)


def take_new_state(
    optimizer: torch.optim.Optimizer, exchanged: Mapping[nn.Parameter, nn.Parameter | None]
) -> None:
    """Gives new parameters the state, from before the first step, of those that they replace."""
    # It is one value for each parameter, so a share has it in its own shape.
    for old, new in exchanged.items():
        state = optimizer.state.pop(old, None)
        if state and new is not None:
            optimizer.state[new] = {
                key: torch.full_like(new.detach(), value.flatten()[0].item())
                if isinstance(value, Tensor) and value.ndim > 0
                else value
                for key, value in state.items()
            }
