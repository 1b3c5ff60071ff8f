"""Classifies optimizers by the slices of parameters that they can update.

Torch's element-wise optimizers can step any slice. Muon and Adafactor need full parameters, so
chunks do not split them. An unknown optimizer gets all full parameters in one call, unless the user
declares it element-wise or per-parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError

Group = Mapping[str, Any]
Shape = Sequence[int]
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
"""Torch optimizers that may step any slice, and their numbers of state tensors per parameter."""


def _factors(shape: Shape) -> list[int]:
    """Returns element counts of Adafactor's second moment: two factors, or one full vector."""
    return [prod(shape[:-1]), prod((*shape[:-2], shape[-1]))] if len(shape) > 1 else [prod(shape)]


PER_PARAMETER: dict[str, tuple[str, Callable[[Group, Shape], list[int]]]] = {
    "torch.optim.Adafactor": ("factors", lambda group, shape: _factors(shape)),
    "torch.optim.Muon": ("orthogonalises", lambda group, shape: [prod(shape)]),
    "transformers.optimization.Adafactor": (
        "factors",
        lambda group, shape: [prod(shape)] * (group["beta1"] is not None) + _factors(shape),
    ),
}
"""Optimizers that update one full parameter at a time: how they use matrices, and the elements of
each state tensor for a parameter's shape. They write state in place.
"""
NEVER = {
    "LBFGS": "it needs closures and a history of full gradients; use AdamW",
    "SparseAdam": "it needs sparse gradients; use AdamW",
}


OPTIMIZERS = ("optimizers", "zero_stage 1 and up cuts", "tp_size", "pp_size")


def optimizer_table() -> list[tuple[str, ...]]:
    """Returns the rows of the table of supported optimizers; `OPTIMIZERS` is its header."""
    packages = [(name.split(".")[0], name.rpartition(".")[2]) for name in PER_PARAMETER]
    return [
        (", ".join(ELEMENTWISE), "anywhere", "any", "any"),
        (
            ", ".join(f"{name} of {package}" for package, name in packages),
            "between parameters",
            "1",
            "any",
        ),
        ("others, with assume_elementwise=True", "anywhere", "any", "any"),
        ("others, with assume_per_parameter=True", "between parameters", "1", "any"),
        ("others", "refused", "1", "1"),
    ]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    return _is_torchs(optimizer) and type(optimizer).__name__ in ELEMENTWISE


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    return _full_name(optimizer) in PER_PARAMETER


def steps_by_chunk(optimizer: torch.optim.Optimizer) -> bool:
    return is_elementwise(optimizer) or is_per_parameter(optimizer)


def needs_whole(optimizer: torch.optim.Optimizer, assume_elementwise: bool) -> bool:
    known = is_elementwise(optimizer) or assume_elementwise
    return is_per_parameter(optimizer) or not known


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    stage: int,
    assume_elementwise: bool = False,
    assume_per_parameter: bool = False,
    tp_size: int = 1,
    pp_size: int = 1,
) -> None:
    name = type(optimizer).__name__
    if _is_torchs(optimizer) and name in NEVER:
        raise GulliverError(f"ZeRO cannot run {name}: {NEVER[name]}, or {name} without Gulliver")
    if assume_elementwise and assume_per_parameter:
        raise GulliverError(
            "assume_elementwise=True and assume_per_parameter=True cannot be combined: set only one"
        )
    if not needs_whole(optimizer, assume_elementwise):
        return
    if is_per_parameter(optimizer) or assume_per_parameter:
        if tp_size > 1:
            verb, _ = PER_PARAMETER.get(_full_name(optimizer), ("may need", None))
            raise GulliverError(
                f"tp_size={tp_size} splits tensors, but {name} {verb} full matrices: use "
                f"AdamW, or {name} with tp_size=1"
            )
        return
    if stage > 0 or tp_size * pp_size > 1:
        whole = "stage 0" if tp_size * pp_size == 1 else "stage 0, tp_size=1 and pp_size=1"
        raise GulliverError(
            f"ZeRO does not know whether {name} updates elements independently: if it does, pass "
            "assume_elementwise=True to the plugin, or assume_per_parameter=True if it updates "
            f"parameters independently; {whole} gives it all parameters unsplit; "
            f"known: {', '.join(ELEMENTWISE)}, Adafactor, Muon"
        )


def check_by_chunk(
    optimizer: torch.optim.Optimizer, stage: int, tiered: bool, step_in_backward: bool
) -> None:
    if tiered and stage != 3:
        raise GulliverError(f"memory tiers need stage 3 (sharded parameters), not stage {stage}")
    if (tiered or step_in_backward) and not steps_by_chunk(optimizer):
        what = "a memory limit" if tiered else "step_in_backward"
        raise GulliverError(
            f"{what} steps chunks separately, which {type(optimizer).__name__} may not support: "
            f"use one of {', '.join(ELEMENTWISE)}, Muon, Adafactor"
        )


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _full_name(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return ".".join([*kind.__module__.split(".")[:2], kind.__name__])


def state_sizes(optimizer: torch.optim.Optimizer, group: Group, shape: Shape) -> tuple[int, ...]:
    # If unknown, two tensors of the parameter's size are assumed.
    if is_per_parameter(optimizer):
        return tuple(PER_PARAMETER[_full_name(optimizer)][1](group, shape))
    count = ELEMENTWISE.get(type(optimizer).__name__)
    return (prod(shape),) * (2 if count is None else count(group))


def makes_beside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the first step allocates all new state before it can be moved to chunks."""
    # Others create constants one parameter at a time; SGD copies all gradients, and the state sizes
    # of optimizers of full parameters are not known in advance.
    return not is_elementwise(optimizer) or type(optimizer).__name__ == "SGD"


def is_boosted(parameter: Tensor) -> bool:
    return "_boosted" in vars(parameter)


def check_trainable(names: Mapping[nn.Parameter, str]) -> None:
    for parameter, name in names.items():
        if parameter.dtype not in DTYPES:
            raise GulliverError(
                f"parameter {name!r} is {parameter.dtype}: ZeRO supports only "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}"
            )
        if is_boosted(parameter):
            raise GulliverError(
                f"parameter {name!r} is trained by another boosted optimizer: use one optimizer "
                "per parameter"
            )
