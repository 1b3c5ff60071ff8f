"""Which optimizers may step a shard: those that update an element by that element alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gulliver.errors import GulliverError

Group = Mapping[str, Any]
ELEMENTWISE: dict[str, Callable[[Group], int]] = {
    "ASGD": lambda group: 1,
    "Adadelta": lambda group: 2,
    "Adagrad": lambda group: 1,
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adamax": lambda group: 2,
    "NAdam": lambda group: 2,
    "RAdam": lambda group: 2,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Rprop": lambda group: 2,
    "SGD": lambda group: int(bool(group.get("momentum"))),
}
"""Optimizers of torch that may be sharded, and their state tensors per parameter of a group."""

WHOLE_TENSOR = {
    "Adafactor": "it factors whole matrices: use AdamW",
    "LBFGS": "it needs closures and a history of whole gradients: use AdamW",
    "Muon": "it orthogonalises whole matrices: use AdamW",
    "SparseAdam": "it needs sparse gradients: use AdamW",
}


def check_elementwise(optimizer: torch.optim.Optimizer, assume: bool) -> None:
    """Refuses an optimizer that a shard alone could not step.

    Raises:
        GulliverError: naming the optimizer and what to use.
    """
    name = type(optimizer).__name__
    ours = type(optimizer).__module__.startswith("torch.optim")
    if ours and name in WHOLE_TENSOR:
        raise GulliverError(
            f"ZeRO cannot shard {name}: {WHOLE_TENSOR[name]}, or {name} with TorchDDPPlugin"
        )
    if not (ours and name in ELEMENTWISE) and not assume:
        raise GulliverError(
            f"ZeRO does not know whether {name} updates each element by itself: if it does, say "
            f"LowLevelZeroPlugin(assume_elementwise=True); known: {', '.join(ELEMENTWISE)}"
        )


def state_tensors(optimizer: torch.optim.Optimizer, group: Group) -> int:
    """State tensors of a parameter's size that a group will keep; 2 where it is unknown."""
    count = ELEMENTWISE.get(type(optimizer).__name__)
    return 2 if count is None else count(group)
