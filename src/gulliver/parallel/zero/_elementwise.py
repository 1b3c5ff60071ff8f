"""Which optimizers may step a shard: those whose update of an element looks at that element only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError

ELEMENTWISE: dict[str, Callable[[dict[str, Any]], int]] = {
    "ASGD": lambda d: 1,
    "Adadelta": lambda d: 2,
    "Adagrad": lambda d: 1,
    "Adam": lambda d: 2 + bool(d.get("amsgrad")),
    "AdamW": lambda d: 2 + bool(d.get("amsgrad")),
    "Adamax": lambda d: 2,
    "NAdam": lambda d: 2,
    "RAdam": lambda d: 2,
    "RMSprop": lambda d: 1 + bool(d.get("momentum")) + bool(d.get("centered")),
    "Rprop": lambda d: 2,
    "SGD": lambda d: int(bool(d.get("momentum"))),
}
"""Optimizers of torch that may be sharded, and their state tensors per parameter."""

WHOLE_TENSOR = {
    "Adafactor": "it factors whole matrices: use AdamW",
    "LBFGS": "it needs closures and a history of whole gradients: use AdamW",
    "Muon": "it orthogonalises whole matrices: use AdamW",
    "SparseAdam": "it needs sparse gradients: use AdamW",
}


COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch's optimizers keep once per parameter, not per element."""


def is_counter(key: str, value: Tensor) -> bool:
    """Whether a state tensor belongs to a parameter as a whole."""
    return key in COUNTERS and value.ndim == 0


def check_elementwise(optimizer: torch.optim.Optimizer, assume: bool) -> None:
    """Refuses an optimizer that a shard alone could not step.

    Raises:
        GulliverError: naming the optimizer and what to use.
    """
    name = type(optimizer).__name__
    ours = type(optimizer).__module__.startswith("torch.optim")
    if ours and name in WHOLE_TENSOR:
        raise GulliverError(f"ZeRO cannot shard {name}: {WHOLE_TENSOR[name]}")
    if not (ours and name in ELEMENTWISE) and not assume:
        raise GulliverError(
            f"ZeRO does not know whether {name} updates each element by itself: if it does, say "
            f"LowLevelZeroPlugin(assume_elementwise=True); known: {', '.join(ELEMENTWISE)}"
        )


def state_tensors(optimizer: torch.optim.Optimizer) -> int:
    """State tensors of a parameter's size that the optimizer will keep; 2 where it is unknown."""
    count = ELEMENTWISE.get(type(optimizer).__name__, lambda d: 2)
    return count(optimizer.defaults)
