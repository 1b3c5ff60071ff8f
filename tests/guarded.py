"""Tensors that a save copies after it has returned, as an optimizer steps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gulliver.memory.pending import add_writer


@contextmanager
def guarded(state: Any) -> Iterator[None]:
    """Lets an optimizer step all tensors of a nested state, for as long as the block runs."""
    optimizer = torch.optim.SGD([{"params": list(_tensors(state))}], lr=0.0)
    add_writer(optimizer)
    yield


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
