"""Reads the state of an optimizer, and checks that it belongs to the one that is to be filled.

A torch optimizer numbers its parameters and takes whatever it is given; what does not fit shows in
a step much later, or never. So kind, groups and shapes are compared before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint._dtensors import is_dtensor, like_local, local_leaf
from gulliver.checkpoint._fits import misfit
from gulliver.checkpoint._reader import StepReader
from gulliver.checkpoint._refs import Ref, refs_in, replace_refs, with_refs
from gulliver.checkpoint._tree import Leaf, names_in
from gulliver.errors import GulliverError
from gulliver.memory import state_shape


def optimizer_state(
    reader: StepReader,
    entry: str,
    skeleton: Any,
    optimizer: torch.optim.Optimizer,
    shapes: Sequence[Any] | None,
) -> Callable[[], None]:
    """Reads the state of an optimizer, of DTensors only what this rank has."""
    where = f"{reader.folder}, entry {entry!r}"
    content = with_refs(skeleton, reader.tensors(entry))
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        if isinstance(content, dict) and {"optimizer", "groups", "state"} <= content.keys():
            raise GulliverError(
                f"{where}, was saved by a Booster, by the names of parameters: boost model and "
                "optimizer (TorchDDPPlugin shards nothing) and use booster.load, or leave it out"
            )
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            raise GulliverError(f"{where}, is not the state of an optimizer: give what was saved")
        whole = replace_refs(content, reader.whole(entry, names_in(skeleton)))
        return lambda: optimizer.load_state_dict(whole)
    groups = content["param_groups"]
    _check_groups(where, groups, optimizer, shapes)
    numbers = [number for group in groups for number in group["params"]]
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = dict(zip(numbers, stepped, strict=True))
    made, leaves = dict[str, Tensor](), dict[str, Leaf]()
    for number, state in content["state"].items():
        for ref in refs_in(state):
            made[ref.name], leaves[ref.name] = _new(where, ref, parameters.get(number))
    for ref in refs_in(groups):
        made[ref.name], leaves[ref.name] = _new(where, ref, None)
    reader.read_into(entry, leaves)
    for number, state in content["state"].items():
        _check_values(where, number, state, made, parameters.get(number))
    ready = replace_refs(content, made)
    return lambda: optimizer.load_state_dict(ready)


def _new(where: str, ref: Ref, parameter: Any) -> tuple[Tensor, Leaf]:
    """Makes a tensor to be given to the optimizer; returns it and what of it is read."""
    if parameter is None or not is_dtensor(parameter) or not ref.shape:
        tensor = torch.empty(ref.shape, dtype=ref.dtype)
        return tensor, tensor
    if ref.shape != tuple(parameter.shape):
        raise GulliverError(
            f"{where}: tensor {ref.name!r} is {ref.shape}, its parameter a DTensor of "
            f"{tuple(parameter.shape)}: only state of the parameter's shape is spread over ranks"
        )
    local = torch.empty_like(parameter.to_local(), dtype=ref.dtype, requires_grad=False)
    tensor = like_local(parameter, local)
    return tensor, local_leaf(f"{where}: tensor {ref.name!r}", tensor, saving=False)


def _check_groups(
    where: str,
    saved: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    shapes: Sequence[Any] | None,
) -> None:
    ours = optimizer.param_groups
    if len(saved) != len(ours):
        raise GulliverError(f"{where}, has {len(saved)} parameter groups, not {len(ours)}")
    for number, (theirs, group) in enumerate(zip(saved, ours, strict=True)):
        count = len(group["params"])
        if len(theirs["params"]) != count:
            raise GulliverError(
                f"{where}: group {number} has {len(theirs['params'])} parameters, not {count}"
            )
        # A newer torch may add options; only another optimizer lacks some and has others.
        odd = sorted(theirs.keys() - group.keys())
        lacking = sorted(optimizer.defaults.keys() - theirs.keys())
        if odd and lacking and shapes is None:
            raise GulliverError(
                f"{where}, is of another optimizer: group {number} has {', '.join(odd)} where "
                f"{type(optimizer).__name__} has {', '.join(lacking)}"
            )
        names = theirs.get("param_names"), group.get("param_names")
        if None not in names and list(names[0]) != list(names[1]):  # type: ignore[arg-type]
            first = next(pair for pair in zip(*names, strict=True) if pair[0] != pair[1])  # type: ignore[arg-type]
            raise GulliverError(
                f"{where}: group {number} has {first[0]!r} where the optimizer has {first[1]!r}"
            )
        for place, parameter in enumerate(group["params"] if shapes is not None else ()):
            there, here = tuple(shapes[number][place]), state_shape(parameter)  # type: ignore[index]
            if there != here:
                raise GulliverError(
                    f"{where}: parameter {place} of group {number} is {there} there, {here} here"
                )


def _check_values(
    where: str, number: Any, state: Any, made: Mapping[str, Tensor], parameter: Any
) -> None:
    """Refuses values that do not fit the parameter's dtype, to which torch converts the state."""
    if parameter is None or not parameter.is_floating_point() or not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key == "step" or not isinstance(value, Ref) or not value.dtype.is_floating_point:
            continue
        tensor: Any = made[value.name]
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        problem = misfit(local.cpu(), parameter.dtype)
        if problem is not None:
            raise GulliverError(f"{where}: {key} of parameter {number}: {problem}")
