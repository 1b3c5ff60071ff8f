"""Recomputes modules in backward, and offloads activations, by wrapping module calls.

A wrapper replaces a module's `forward`, or its compiled call. Copies of the module are not wrapped.
"""

from __future__ import annotations

import copy
import heapq
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gulliver._compat import (
    at_end_of_backward,
    backward_number,
    compiled_call,
    replace_compiled_call,
    storage_users,
)
from gulliver.errors import GulliverError
from gulliver.memory.buffers import ACTIVATIONS
from gulliver.memory.manager import Manager
from gulliver.memory.stores import ManagedTensor
from gulliver.solve.replacement import InsufficientMemory

Around = Callable[..., Any]
"""Called with a module's original call and its positional and keyword arguments."""


class AroundCall:
    """A wrapper of a module's call."""

    # [Note: copies] Copies of a module would share a function that replaces `forward`, and all
    # their calls would run the first module. So a copy, such as an average of the weights, gets the
    # wrapped forward, which is copied with it.

    def __init__(self, call: Callable[..., Any], around: Around) -> None:
        self._call, self.around = call, around
        update_wrapper(self, call)  # its signature is read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self._call, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._call, memo)


def wrap_call(module: nn.Module, around: Around) -> None:
    compiled = compiled_call(module)
    if compiled is not None:
        replace_compiled_call(module, AroundCall(compiled, around))
    else:
        module.forward = AroundCall(module.forward, around)


def recompute_modules(model: nn.Module, paths: Iterable[str]) -> None:
    """Recomputes modules in backward instead of keeping their activations."""
    # Random numbers are drawn as in the forward.
    for path in paths:
        wrap_call(model.get_submodule(path), _again)


def _again(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, **kwargs)


# Activations as managed tensors: tensors that forward saves for backward may be evicted.
#
# Around chosen blocks, tensors that autograd saves are copied into managed tensors, which the
# manager keeps or moves like chunks, and loads again in reverse order. Values, shapes, strides and
# sharing of memory are preserved.


LEAST_BYTES = 1 << 16
"""Minimum bytes of a tensor worth offloading."""


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


# [Note: saved tensors] The entire storage of a tensor is copied, once for all its saved views. Two
# saves share a copy while the storage is alive and unmodified. Parameters and their views, small
# tensors, and tensor subclasses are not copied. With saved-tensor hooks autograd does not compare
# versions, so this is done here, with autograd's error message.
#
# Nor does it call outer hooks; if these matter, such as hooks that reshard parameters between
# forward and backward, pass them as `outer`.
#
# [Note: lifetimes] A copy lives while autograd refers to it: until its node has run, or until the
# graph is freed without a backward. Its managed tensor is then discarded without I/O and reused for
# a copy of the same size. So every step uses the same tensors in the same order, from which the
# manager learns when to fetch them. A finalizer may run anywhere, even inside the manager, so it
# only records dead copies; they are discarded at the next save or use, and at the end of backward.
class ActivationManager(Protocol):
    """Methods of a manager that activation offloading needs."""

    device: torch.device

    def add(self, name: str, kind: str, numel: int, dtype: torch.dtype) -> ManagedTensor: ...

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor: ...

    def done(self, managed: ManagedTensor) -> None: ...

    def discard(self, managed: ManagedTensor) -> None: ...

    def remove(self, managed: ManagedTensor) -> None: ...

    def view(self, managed: ManagedTensor) -> Tensor: ...


class _ActivationCopy:
    """A managed copy of a saved tensor's storage."""

    __slots__ = ("__weakref__", "managed", "source", "version")

    def __init__(self, managed: ManagedTensor, source: weakref.ref[Any], version: int) -> None:
        self.managed, self.source, self.version = managed, source, version


@dataclass(frozen=True)
class _Saved:
    """A saved tensor that was offloaded, with its original layout."""

    copy: _ActivationCopy
    tensor: weakref.ref[Tensor]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


@dataclass(frozen=True)
class _KeptTensor:
    """A saved tensor that was not offloaded."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Outer:
    """A value packed by the user's outer saved-tensor hooks."""

    saved: Any


class ActivationOffload:
    """Offloads tensors that forward saves for backward."""

    def __init__(
        self, manager: ActivationManager, least: int = LEAST_BYTES, outer: Hooks | None = None
    ) -> None:
        self.manager, self.least, self._outer = manager, least, outer
        self.moved = self.kept = 0
        # Whether an operation is saving tensors: it still reads its parameters, which have to stay.
        self.saves = False
        self._copies: dict[int, weakref.ref[_ActivationCopy]] = {}
        self._free: dict[int, list[tuple[int, ManagedTensor]]] = {}
        self._dead: deque[ManagedTensor] = deque()
        self._used: dict[int, tuple[ManagedTensor, int]] = {}
        self._backward = -1

    @contextmanager
    def saving(self, module: nn.Module | None = None) -> Iterator[None]:
        self.sweep()
        buffers = set() if module is None else {_key(buffer) for buffer in module.buffers()}
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, buffers), self._unpack):
            yield

    def wrap(self, model: nn.Module, paths: Iterable[str]) -> None:
        # For a module that is compiled itself, the compiled call is wrapped.
        for path in paths:
            module = model.get_submodule(path)
            wrap_call(module, self._around(module))

    def sweep(self) -> None:
        """Discards copies that no graph needs, and makes others evictable if nothing uses them."""
        for managed, users in list(self._used.values()):
            if managed.tensor is not None and storage_users(managed.tensor) <= users:
                del self._used[managed.number]
                self.manager.done(managed)
        for _ in range(len(self._dead)):
            managed = self._dead.popleft()
            if managed.number in self._used:
                self._dead.append(managed)  # its node is gone, but a view of it is not
                continue
            self.manager.discard(managed)
            heapq.heappush(self._free[managed.nbytes], (managed.number, managed))

    def forget_unused(self) -> None:
        for unused in self._free.values():
            while unused:
                self.manager.remove(unused.pop()[1])

    def _around(self, module: nn.Module) -> Callable[..., Any]:
        def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            with self.saving(module):
                return call(*args, **kwargs)

        return run

    def _pack(self, tensor: Tensor, outside: set[int]) -> _Saved | _KeptTensor | _Outer:
        self.sweep()
        if self._outer is not None and (saved := self._outer[0](tensor)) is not tensor:
            return _Outer(saved)
        if _is_own(tensor):
            # Keep the leaf itself: its data may be replaced before backward.
            return _KeptTensor(tensor, tensor._version)
        self.saves = True
        try:
            copy = self._copy(tensor) if self._wanted(tensor, outside) else None
        finally:
            self.saves = False
        if copy is None:
            self.kept += tensor.nbytes
            # its own view, with the same version: the tensor would hold the graph that holds
            # it, if a node saves its output.
            return _KeptTensor(tensor.detach(), tensor._version)
        return _Saved(
            copy,
            weakref.ref(tensor),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor._version,
        )

    def _unpack(self, saved: _Saved | _KeptTensor | _Outer) -> Tensor:
        self.sweep()
        if isinstance(saved, _Outer):
            assert self._outer is not None
            return self._outer[1](saved.saved)
        tensor = saved.tensor if isinstance(saved, _KeptTensor) else saved.tensor()
        if tensor is not None and tensor._version != saved.version:
            raise RuntimeError(_modified(tensor, saved.version))
        if isinstance(saved, _KeptTensor):
            return saved.tensor
        number = backward_number()
        if number not in (-1, self._backward):
            self._backward = number
            at_end_of_backward(self.sweep)
        memory = self._brought(saved.copy.managed)
        whole = memory.numel() // saved.dtype.itemsize * saved.dtype.itemsize
        flat = memory[:whole].view(saved.dtype)
        return flat.as_strided(saved.size, saved.stride, saved.offset)

    def _brought(self, managed: ManagedTensor) -> Tensor:
        """Loads a saved activation, and keeps it on the device while autograd nodes use it."""
        if managed.number not in self._used:
            try:
                memory = self.manager.use(managed)
            except InsufficientMemory:
                # Backward has to continue, so this copy exceeds the budget, which measurements then
                # lower.
                return self.manager.view(managed).to(self.manager.device, copy=True)
            self._used[managed.number] = (managed, storage_users(memory))
        assert managed.tensor is not None
        return managed.tensor

    def _wanted(self, tensor: Tensor, outside: set[int]) -> bool:
        if not self._is_plain(tensor) or tensor.layout != torch.strided:
            return False
        if tensor.device != self.manager.device or tensor.is_conj() or tensor.is_neg():
            return False
        base = tensor._base
        if (base is not None and _is_own(base)) or _key(tensor) in outside:
            return False
        return tensor.untyped_storage().nbytes() >= self.least

    def _is_plain(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor

    def _fill(self, memory: Tensor, tensor: Tensor) -> None:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.copy_(source.set_(tensor.untyped_storage()))

    def _copy(self, tensor: Tensor) -> _ActivationCopy | None:
        storage = tensor.untyped_storage()
        known = self._copies.get(storage._cdata)
        copy = known() if known is not None else None
        # Freed memory may have been reused at the same address.
        if copy is not None and copy.source() is storage and copy.version == tensor._version:
            return copy
        try:
            managed = self._take(storage.nbytes())
        except GulliverError:  # the store has no room either
            return None
        try:
            memory = self.manager.use(managed, write=True, fresh=True)
        except GulliverError:
            heapq.heappush(self._free[managed.nbytes], (managed.number, managed))
            return None
        try:
            self._fill(memory, tensor)
        finally:
            self.manager.done(managed)
        self.moved += managed.nbytes
        copy = _ActivationCopy(managed, weakref.ref(storage), tensor._version)
        self._copies[storage._cdata] = weakref.ref(copy, self._forget(storage._cdata))
        weakref.finalize(copy, self._dead.append, managed).atexit = False
        return copy

    def _forget(self, key: int) -> Callable[[weakref.ref[_ActivationCopy]], None]:
        def forget(gone: weakref.ref[_ActivationCopy]) -> None:
            if self._copies.get(key) is gone:
                del self._copies[key]

        return forget

    def _take(self, nbytes: int) -> ManagedTensor:
        """Returns the oldest free tensor of this size, for the same order in every step."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return heapq.heappop(free)[1]
        new = f"activation of {nbytes} bytes", ACTIVATIONS, nbytes, torch.uint8
        try:
            return self.manager.add(*new)
        except GulliverError:
            # Unused tensors of a batch of another size take its room.
            self.forget_unused()
            return self.manager.add(*new)


@contextmanager
def offload_activations(manager: Manager, least: int = LEAST_BYTES) -> Iterator[ActivationOffload]:
    """Context in which tensors that forward saves for backward are offloaded.

    Args:
        manager: manager to offload to.
        least: minimum bytes of an offloaded tensor.

    Example:
        with offload_activations(manager):
            loss = model(batch)
        loss.backward()
    """
    # Kept by the manager, because each step reuses the tensors of the previous one.
    offload = vars(manager).setdefault("_activations", ActivationOffload(manager))
    offload.least = least
    with offload.saving():
        yield offload


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_own(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or another leaf, whose memory stays allocated anyway."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def _modified(tensor: Tensor, version: int) -> str:
    kind = tensor.type()
    return (
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind} {list(tensor.shape)}] is at version {tensor._version}; expected "
        f"version {version} instead. Hint: enable anomaly detection to find the operation that "
        "failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )
