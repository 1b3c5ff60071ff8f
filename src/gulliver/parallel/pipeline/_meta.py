"""Shape inference: tensors and modules on meta, which have shapes and no storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError


def to_meta(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors have shapes and no storage; the original stays."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def run_on_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a module on meta for tensors of these shapes."""
    with torch.no_grad():
        return module(*map_tensors(args, _empty), **map_tensors(kwargs, _empty))


def run_filled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a copy of a module on meta with some values; they are dropped afterwards."""
    device = device_of(args, kwargs)
    real = copy.deepcopy(module).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*real.parameters(), *real.buffers()]:
            # Not all equal, so that a router has a top-k; no draw from the random state.
            ramp = torch.arange(tensor.numel(), device=device).view(tensor.shape)
            tensor.copy_(ramp % 7 / 64 if tensor.is_floating_point() else torch.zeros_like(ramp))
        return real(*map_tensors(args, _finite), **map_tensors(kwargs, _finite))


def find_form(module: nn.Module, path: str, args: Any, kwargs: Any) -> int | None:
    """Finds how many entries a block returns after its hidden state; None for a plain tensor."""
    try:
        found = run_on_meta(module, args, kwargs)
    except Exception:
        # Experts, whose shapes depend on values: run it once with some.
        try:
            found = run_filled(module, args, kwargs)
        except Exception as error:
            raise GulliverError(
                f"what block {path!r} returns cannot be found without its values ({error}): pass "
                "extra=... (of the plugin, or of stack_of)"
            ) from error
    if isinstance(found, Tensor):
        return None
    if not isinstance(found, tuple | list) or any(map(_read_later, found[1:])):
        raise GulliverError(
            f"block {path!r} returns more than its hidden state, which other stages cannot make: "
            "if nothing reads it, pass extra=... (of the plugin, or of stack_of)"
        )
    return len(found) - 1


def _read_later(entry: Any) -> bool:
    """Whether a later block may read an entry; attention weights are only collected.

    One that reads nevertheless finds None there and fails, as nothing computes with None.
    """
    if isinstance(entry, tuple | list):
        return any(map(_read_later, entry))
    return isinstance(entry, Tensor) and entry.dim() != SCORES


SCORES = 4
"""Dims of attention's weights: batch, heads, queries, keys."""


def fill(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the same shape and dtype, of NaN, or of zeros where there is no NaN."""
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def device_of(*values: Any) -> torch.device:
    """Returns the device of the first tensor in nested values; the CPU without one."""
    found: list[Tensor] = []
    map_tensors(values, found.append)
    return found[0].device if found else torch.device("cpu")


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Applies a function to the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: map_tensors(entry, function) for key, entry in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, tuple | list):
        entries = [map_tensors(entry, function) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def _like(value: Mapping[str, Any], made: dict[str, Any]) -> Any:
    """Makes a mapping of the same class, as the outputs of Hugging Face models are."""
    try:
        return type(value)(**made)
    except TypeError:
        return made


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
