"""Walking through batches: dicts, lists, tuples, named tuples and dataclasses, in one another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


def map_leaves(batch: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuilds a batch with every leaf replaced by what `visit` returns for it."""
    # A leaf is a tensor, an object with a method ``pin_memory`` (which knows its own tensors best),
    # or anything that is no container. Containers keep their type where it can be built again; a
    # sequence or mapping that cannot becomes a list or dict. Leaves are visited in their order.
    if isinstance(batch, Tensor | str | bytes | bytearray) or hasattr(batch, "pin_memory"):
        return visit(batch)
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: map_leaves(value, visit) for key, value in batch.items()})
    if isinstance(batch, tuple):
        parts = [map_leaves(part, visit) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else _sequence(batch, parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy, not a call: fields may be frozen, computed, or no arguments at all.
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(clone, field.name, map_leaves(getattr(batch, field.name), visit))
        return clone
    if isinstance(batch, Sequence) and not isinstance(batch, range | memoryview):
        return _sequence(batch, [map_leaves(part, visit) for part in batch])
    return visit(batch)


def move_tensors(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device."""
    return map_leaves(batch, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def _mapping(like: Mapping, values: dict) -> Any:
    if type(like) is dict:
        return values
    try:
        if isinstance(like, MutableMapping):
            # Not rebuilt: a defaultdict, say, has more to it than its items.
            clone = copy.copy(like)
            clone.update(values)
            return clone
        return type(like)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def _sequence(like: Sequence, parts: list) -> Any:
    if type(like) is list:
        return parts
    try:
        return type(like)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts
