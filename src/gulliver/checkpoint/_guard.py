"""Hooks that make the steps of torch's optimizers wait for what a checkpoint is still copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gulliver.checkpoint._dtensors import is_dtensor
from gulliver.memory import (
    ASKS,
    PendingParameter,
    add_writer,
    any_read_lock,
    before_any_write,
    before_write_at,
    storage_of,
    writers,
)

_hooked: list[Callable[[], None]] = []


def install_hooks() -> None:
    """Makes the step of every torch optimizer wait for what it changes; once per process."""
    if _hooked:
        return

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        add_writer(optimizer)
        # An optimizer that updates part by part (ZeRO chunk by chunk) asks before each itself.
        if any_read_lock() and not getattr(optimizer, ASKS, False):
            before_write_at(_storages(optimizer))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # What follows a step changes the rest: averages of weights, statistics, counters.
        before_any_write()

    _hooked.append(register_optimizer_step_pre_hook(before).remove)
    _hooked.append(register_optimizer_step_post_hook(after).remove)


def guarded_storages() -> set[int]:
    """Storages that only optimizers change whose steps wait for a snapshot."""
    return set().union(*(_storages(optimizer) for optimizer in writers()))


def _storages(optimizer: torch.optim.Optimizer) -> set[int]:
    """Storages that a step changes."""
    found = set[int]()
    for tensor in _changed_by(optimizer):
        with suppress(NotImplementedError, RuntimeError):  # sparse and fake tensors have none
            found.add(storage_of(tensor))
    return found - {0}


def _changed_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields what a step changes."""
    if changed := getattr(optimizer, ASKS, None):
        yield from changed()
        return
    for group in optimizer.param_groups:
        # A pending parameter has no memory yet, and asking for it would gather its shards.
        params = (p for p in group["params"] if type(p) is not PendingParameter)
        yield from (_local(parameter) for parameter in params)
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors in a state: some optimizers keep lists of them."""
    if isinstance(value, torch.Tensor):
        yield _local(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _local(tensor: Any) -> torch.Tensor:
    """Returns what this rank has of a DTensor, which has no memory itself; others as they are."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
