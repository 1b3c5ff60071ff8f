"""Tells which optimizers may step shards, slices of tensors, or whole parameters only.

Torch's element-wise optimizers step anything. Others are right where they get what they would get
in one process: every parameter whole, all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError

Group = Mapping[str, Any]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
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
    "Muon": "it orthogonalises whole matrices: use AdamW",
}
NEVER = {
    "LBFGS": "it needs closures and a history of whole gradients: use AdamW",
    "SparseAdam": "it needs sparse gradients: use AdamW",
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known to update every element by that element alone."""
    return _is_torchs(optimizer) and type(optimizer).__name__ in ELEMENTWISE


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    stage: int,
    assume_elementwise: bool = False,
    tp_size: int = 1,
    pp_size: int = 1,
) -> None:
    """Refuses an optimizer that would be given less than it needs.

    Args:
        optimizer: optimizer of the user.
        stage: stage of ZeRO; from 1 on each rank steps shards.
        assume_elementwise: take the user's word for an optimizer that is not known.
        tp_size: ranks that share each tensor, of which each steps slices.
        pp_size: stages, of which each steps its own parameters only.

    Raises:
        GulliverError: the optimizer would be given less than it needs; it says what to use.
    """
    name = type(optimizer).__name__
    if _is_torchs(optimizer) and name in NEVER:
        raise GulliverError(f"ZeRO cannot run {name}: {NEVER[name]}, or {name} without gulliver")
    if is_elementwise(optimizer) or assume_elementwise:
        return
    known = _is_torchs(optimizer) and name in WHOLE_TENSOR
    if stage > 0 and known:
        raise GulliverError(
            f"ZeRO cannot shard {name}: {WHOLE_TENSOR[name]}, or {name} with stage 0, which gives "
            "it whole parameters"
        )
    if tp_size > 1 and known:
        raise GulliverError(
            f"tp_size={tp_size} gives {name} slices of tensors: {WHOLE_TENSOR[name]}, or {name} "
            "with tp_size=1"
        )
    if max(stage, tp_size - 1) > 0 or (pp_size > 1 and not known):
        whole = "stage 0" if tp_size * pp_size == 1 else "stage 0, tp_size=1 and pp_size=1"
        raise GulliverError(
            f"ZeRO does not know whether {name} updates each element by itself: if it does, say "
            f"assume_elementwise=True to the plugin; {whole} gives it all parameters whole; "
            f"known: {', '.join(ELEMENTWISE)}"
        )


def check_by_chunk(
    optimizer: torch.optim.Optimizer, stage: int, tiered: bool, step_in_backward: bool
) -> None:
    """Refuses an optimizer that may not be stepped chunk by chunk, where that is asked for.

    Args:
        optimizer: optimizer of the user.
        stage: stage of ZeRO.
        tiered: whether a memory manager keeps chunks in tiers.
        step_in_backward: whether chunks are stepped during backward.

    Raises:
        GulliverError: it may look at all parameters at once; the stage has no tiers.
    """
    if tiered and stage != 3:
        raise GulliverError(f"tiers of memory need stage 3, which shards parameters, not {stage}")
    if (tiered or step_in_backward) and not is_elementwise(optimizer):
        what = "a memory limit" if tiered else "step_in_backward"
        raise GulliverError(
            f"{what} steps chunk by chunk, which {type(optimizer).__name__} may not allow: use one "
            f"of {', '.join(ELEMENTWISE)}"
        )


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def state_tensors(optimizer: torch.optim.Optimizer, group: Group) -> int:
    """State tensors of a parameter's size that a group will keep; 2 where it is unknown."""
    count = ELEMENTWISE.get(type(optimizer).__name__)
    return 2 if count is None else count(group)


def is_boosted(parameter: Tensor) -> bool:
    """Whether a boosted optimizer trains a parameter."""
    return "_boosted" in vars(parameter)


def check_trainable(names: Mapping[nn.Parameter, str]) -> None:
    """Refuses parameters that ZeRO cannot train.

    Raises:
        GulliverError: one is of another dtype, or trained by another boosted optimizer.
    """
    for parameter, name in names.items():
        if parameter.dtype not in DTYPES:
            raise GulliverError(
                f"parameter {name!r} is {parameter.dtype}: ZeRO trains "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
            )
        if is_boosted(parameter):
            raise GulliverError(
                f"parameter {name!r} is trained by another boosted optimizer: give it to one"
            )
