"""Read locks on memory that a snapshot still has to copy, and parameters that are not ready.

A snapshot is copied while training continues, under a `ReadLock` on memory that is not copied yet.
Code that writes in place to such memory calls `before_write` first, which waits until the memory is
copied. Autograd's version counters would detect a write too late.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError

ASKS = "asks_before_write"
"""Attribute of an optimizer that calls `before_write` itself; yields the tensors a step writes."""


class ReadLock(Protocol):
    """A read lock on storages."""

    def release(self, storages: set[int] | None) -> None:
        """Waits until these storages may be written; None for all."""
        ...


_read_locks: list[ReadLock] = []
_writers: weakref.WeakSet[Any] = weakref.WeakSet()
# A forked child has its own memory, and no threads that would release a read lock.
os.register_at_fork(after_in_child=_read_locks.clear)


def add_read_lock(lock: ReadLock) -> None:
    _read_locks.append(lock)


def drop_read_lock(lock: ReadLock) -> None:
    if lock in _read_locks:
        _read_locks.remove(lock)


def add_writer(optimizer: Any) -> None:
    """Registers an optimizer that calls `before_write` for all tensors that its steps write."""
    _writers.add(optimizer)


def writers() -> tuple[Any, ...]:
    return tuple(_writers)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def any_read_lock() -> bool:
    return bool(_read_locks)


def before_write(tensors: Iterable[Tensor]) -> None:
    """Waits until no snapshot reads the memory of `tensors`, before an in-place write."""
    if _read_locks:
        before_write_at({storage_of(tensor) for tensor in tensors})


def before_write_at(storages: set[int]) -> None:
    for lock in tuple(_read_locks):
        lock.release(storages)


def before_any_write() -> None:
    for lock in tuple(_read_locks):
        lock.release(None)


# Pending parameters, whose values are elsewhere or in flight; using one waits for them.
#
# While it is pending, its class is `PendingParameter` and every operation on it calls its handler.
# Once it is ready it is an ordinary parameter again, without further cost. Any reader works,
# through any reference: a module's forward, an average of the weights, a state dict, or a list that
# was kept.


Handler = Callable[[list[nn.Parameter], Callable[..., Any], tuple, dict[str, Any]], Any]
"""Called with the pending parameters of an operation, the operation and its arguments."""

_METADATA = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "_version",
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "output_nr",
        "requires_grad",
        "retains_grad",
        "shape",
    )
) | {
    Tensor.grad.__set__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.data_ptr,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.numel,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.__len__,
}
INSTEAD = "do that before boost, and change values in place (copy_, mul_ under torch.no_grad())"
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class PendingParameter(nn.Parameter):
    """A parameter whose values are not ready; operations are dispatched to its handler."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        # A copy of a pending parameter has its values, and is not pending.
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if func == _SET_DATA and isinstance(args[0], cls):
            name = vars(args[0]).get("_chunk_name")
            told = "a parameter" if name is None else f"parameter {name!r}"
            raise GulliverError(
                f"{told} was moved, converted, reshaped or given new memory (p.data = ...) after "
                f"boost: {INSTEAD}"
            )
        if func is Tensor.is_contiguous:
            # The actual values are contiguous; its representation here is one expanded element.
            return Tensor.is_contiguous(torch.empty(args[0].shape, device="meta"), **kwargs)
        waiting = list(_pending(args)) + list(_pending(kwargs.values()))
        return waiting[0].__dict__["_handler"](waiting, func, args, kwargs)


def hide_from_compilers() -> None:
    found = vars(PendingParameter)["__torch_function__"].__func__
    hidden = classmethod(torch.compiler.disable(found))
    setattr(PendingParameter, "__torch_function__", hidden)  # noqa: B010


# Both run for every parameter in every step, so their loops make no calls.


def mark_pending(parameters: Iterable[nn.Parameter], handler: Handler) -> None:
    for parameter in parameters:
        if type(parameter) is not PendingParameter:
            parameter._ready_class = type(parameter)  # type: ignore[attr-defined]
            parameter.__class__ = PendingParameter
        parameter._handler = handler  # type: ignore[attr-defined]


def mark_ready(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if type(parameter) is PendingParameter:
            parameter.__class__ = parameter.__dict__["_ready_class"]
            del parameter._ready_class, parameter._handler  # type: ignore[attr-defined]


def _pending(values: Any) -> Iterator[nn.Parameter]:
    for value in values:
        if type(value) is PendingParameter:
            yield value
        elif isinstance(value, list | tuple):
            yield from _pending(value)
        elif isinstance(value, dict):
            yield from _pending(value.values())
