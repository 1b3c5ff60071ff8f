"""Nested values of a step before its tensors are read: a `Ref` stands for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint._manifest import TensorEntry
from gulliver.checkpoint._tree import join_state, names_in


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor that has not been read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def with_refs(skeleton: Any, saved: Mapping[str, TensorEntry]) -> Any:
    """Joins a skeleton as `join_state` does, with a `Ref` in place of each tensor."""
    names = [name for name in names_in(skeleton) if name in saved]
    return join_state({n: Ref(n, saved[n].shape, saved[n].dtype) for n in names}, skeleton)


def refs_in(value: Any) -> list[Ref]:
    """Lists all `Ref`s in nested values."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, Mapping):
        return [ref for item in value.values() for ref in refs_in(item)]
    return [ref for item in value for ref in refs_in(item)] if _is_row(value) else []


def replace_refs(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Replaces the `Ref`s in nested values by tensors of their names."""
    if isinstance(value, Ref):
        return tensors[value.name]
    if isinstance(value, Mapping):
        return {key: replace_refs(item, tensors) for key, item in value.items()}
    return type(value)(replace_refs(v, tensors) for v in value) if _is_row(value) else value


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple)
