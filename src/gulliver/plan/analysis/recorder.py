"""Records every operator of a running step, with real or fake tensors.

A `Recorder` is a `StorageCounter` that also records inputs, outputs and saved tensors of each
operator, its module, and the forward operator whose gradient it computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree

from gulliver._compat import newest_node, running_node, saving_hooks
from gulliver.hardware.operators import operator_bytes, operator_flops
from gulliver.memory.symbolic import StorageCounter
from gulliver.plan.analysis.known import ASKED, Known
from gulliver.plan.analysis.records import BACKWARD, FORWARD, RECOMPUTE, Operator, Value


# [Note: nodes] Autograd creates and numbers the node of an operation before the operation runs. So
# below autograd, the newest number belongs to the running operator: tensors packed while that
# number is the newest are saved by it, and a backward under the node of that number is its own.
#
# [Note: saved tensors] `pack` replaces a tensor by another one on the same memory. Otherwise an
# output saved by its own node would refer to itself, and tensors kept alive by the model could not
# be distinguished from those kept by autograd.
@dataclass
class Moment:
    """Memory before and after an event of the step."""

    # Bytes in use when it began.
    before: int
    # Bytes in use when it ended.
    after: int
    # Bytes of parameter gradients at that time.
    gradients: int
    # Index of the operator; -1 for none.
    operator: int = -1
    # The replayed template, and whether this is its backward; None for an operator.
    replayed: tuple[Any, bool] | None = None


@dataclass
class ModuleCall:
    """A recorded call of a module."""

    # Path of the module.
    path: str
    # Enclosing call.
    parent: ModuleCall | None
    # Phase of the call.
    phase: str
    # Number of moments when it began.
    begun: int
    # Bytes in use at its beginning.
    before: int
    # Bytes saved before it.
    saved: int
    # Number of moments when it ended.
    ended: int = -1
    # Bytes that it saved and that were not saved before.
    kept: int = 0
    # Bytes of its output.
    output: int = 0
    # Bytes of its outputs with the form of an input.
    handed: int = 0
    # Forms of its inputs.
    taken: frozenset[Any] = frozenset()
    # First and last moment of its backward.
    span: list[int] = field(default_factory=list)
    # Whether it was called outside of recomputation.
    open: bool = True


@dataclass
class Packed:
    """A storage that autograd saved."""

    # Number of the storage.
    serial: int
    # Size of the storage.
    nbytes: int
    # Name of its tensor, if that existed before the step.
    name: str


class Recorder(StorageCounter):
    """Records the operators of a step."""

    def __init__(self, model: nn.Module, inputs: list[Tensor], known: Known | None = None) -> None:
        super().__init__()
        self.known = known
        self.operators: list[Operator] = []
        # Memory before and after each event, in order.
        self.moments: list[Moment] = []
        # Calls of modules.
        self.calls: list[ModuleCall] = []
        # Saved storages in order, with repetitions.
        self.packed: list[Packed] = []
        # The same by number, without repetitions.
        self.kept: dict[int, Packed] = {}
        # Bytes that an operator is the first to save, by its index.
        self.claims: dict[int, int] = {}
        # Bytes of the gradients of parameters.
        self.gradients = 0
        self.path, self.backward, self.quiet = "", False, False
        # Weak references to new tensors, while a repeated call is being traced.
        self.made: list[weakref.ref[Tensor]] | None = None
        self.saved = 0
        self._model = model
        self._paths = {module: path for path, module in model.named_modules()}
        self._running: list[ModuleCall] = []
        self._serials: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._next = 0
        self._writers: dict[int, int] = {}
        self._views: dict[int, dict[tuple[Any, ...], int]] = {}
        self._first_calls: dict[str, ModuleCall] = {}
        self._nodes: dict[int, int] = {}
        self._node = newest_node()
        self._operator_calls: list[ModuleCall | None] = []
        self._before = 0
        self._replayed = False
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._names.setdefault(self.serial(tensor), name)
        self.inputs = self.add(inputs)
        self._names |= {self.serial(tensor): "input" for tensor in inputs}

    @contextmanager
    def following(self) -> Iterator[None]:
        handles: list[Any] = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ]
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated))
        try:
            with self, saved_tensors_hooks(self.pack, lambda value: value):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def phase(self) -> str:
        if not self.backward:
            return FORWARD
        # Backward runs without recording; recomputation enables it and installs its own hooks.
        again = torch.is_grad_enabled() or not self.saves
        return RECOMPUTE if again else BACKWARD

    @property
    def saves(self) -> bool:
        """Whether this recorder's hooks receive the tensors that autograd saves now."""
        hooks = saving_hooks()
        return hooks is not None and hooks[0] == self.pack

    @property
    def running(self) -> ModuleCall | None:
        return self._running[-1] if self._running else None

    # Storages.

    def add(self, tensors: Any) -> int:
        """Starts counting storages; returns the bytes of new ones."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._held:
                self._serials[key] = self._next
                self._next += 1
        return super().add(tensors)

    def serial(self, tensor: Tensor) -> int:
        key = tensor.untyped_storage()._cdata
        if key not in self._serials:
            self._serials[key] = self._next
            self._next += 1
        return self._serials[key]

    def drop(self, key: int) -> None:
        if key in self._held:
            serial = self._serials.pop(key)
            self._names.pop(serial, None)
        super().drop(key)

    def name(self, serial: int) -> str:
        """Name of the tensor that owned a storage before the step; empty for new storages."""
        return self._names.get(serial, "")

    def existed_before(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._held

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, or returns its known value."""
        if func in ASKED and self.known is not None:
            value = self.known.number(args[0])
            if value is not None:
                return bool(value) if func is torch.ops.aten.is_nonzero.default else value
        return super().__torch_dispatch__(func, types, args, kwargs)

    def begins(self, func: Any) -> None:
        self._before = self.live

    def ran(
        self, func: Any, call: tuple[Any, Any, Any], taken: list[Tensor], given: list[Tensor]
    ) -> None:
        if self.known is not None and not self.backward and not self.quiet:
            self.known.ran(func, call, taken)
        if self.quiet or not (given or _changed(func)):
            return
        if self.made is not None:
            self.made += [
                weakref.ref(tensor) for tensor in given if not self.existed_before(tensor)
            ]
        node, phase = self._node_of()
        if phase == BACKWARD:
            # Checkpoints stop recomputing early, without running the exit hooks of modules.
            self._running = [call for call in self._running if call.phase == FORWARD]
        # Accumulations right after a replay belong to the replayed call.
        self._replayed = self._replayed and phase == BACKWARD and node < 0
        # Autograd detaches saved tensors when it unpacks them, which is not an operator of the
        # model.
        if self._replayed or (phase == BACKWARD and func is torch.ops.aten.detach.default):
            return
        index = len(self.operators)
        forward = self._nodes.get(node, -1) if phase == BACKWARD else -1
        if phase != BACKWARD and node != self._node:
            self._nodes[node] = index
            self._node = node
        operator = self._operator(func, call, taken, given, phase)
        operator.forward = forward
        owner = self.running or self._region(phase)
        if phase == RECOMPUTE and owner is not None:
            operator.path = owner.path
        if phase == BACKWARD:
            operator.path = self.operators[forward].path if forward >= 0 else self._last_path()
            owner = self._operator_calls[forward] if forward >= 0 else None
        self._operator_calls.append(owner)
        self.operators.append(operator)
        self.moment(index)
        self._spans(owner, phase)

    def _node_of(self) -> tuple[int, str]:
        phase = self.phase
        return (running_node() if phase == BACKWARD else newest_node()), phase

    def _last_path(self) -> str:
        return (
            self.operators[-1].path
            if self.operators and self.operators[-1].phase == BACKWARD
            else ""
        )

    def _region(self, phase: str) -> ModuleCall | None:
        if phase != RECOMPUTE:
            return None
        forward = self._nodes.get(running_node(), -1)
        owner = self._operator_calls[forward] if forward >= 0 else None
        while owner is not None and not owner.open:
            owner = owner.parent
        return owner

    def _spans(self, owner: ModuleCall | None, phase: str) -> None:
        """Extends the backward span of a call and its parents to the current moment."""
        if phase == FORWARD:
            return
        at = len(self.moments) - 1
        while owner is not None:
            first = self._first_calls.get(owner.path, owner) if phase == RECOMPUTE else owner
            first.span = [first.span[0] if first.span else at, at]
            owner = owner.parent

    def moment(self, operator: int = -1, replayed: tuple[Any, bool] | None = None) -> None:
        before = self._before if operator >= 0 else self.live
        self.moments.append(Moment(before, self.live, self.gradients, operator, replayed))

    def _operator(
        self,
        func: Any,
        call: tuple[Any, Any, Any],
        taken: list[Tensor],
        given: list[Tensor],
        phase: str,
    ) -> Operator:
        args, kwargs, output = call
        index = len(self.operators)
        changed = _changed(func)
        inputs = tuple(self._value(tensor) for tensor in taken)
        storages = {value.storage for value in inputs}
        for tensor in given:
            self._written(tensor, index, changed and self.serial(tensor) in storages)
        outputs = tuple(self._value(tensor) for tensor in given)
        view = not changed and bool(given) and all(v.storage in storages for v in outputs)
        read, written = (0, 0) if view else operator_bytes(func, taken, given)
        numbers = iter(range(len(taken)))
        plain = pytree.tree_map_only(Tensor, lambda _: f"%{next(numbers)}", (args, kwargs))
        return Operator(
            *(func.name(), phase, self.path, inputs, outputs),
            *(tuple(plain[0]), tuple(plain[1].items())),
            operator_flops(func, args, kwargs, output),
            *(read, written),
            in_place=changed,
            view=view,
            live=self.live,
        )

    def _value(self, tensor: Tensor) -> Value:
        storage = self.serial(tensor)
        writer = self._writers.get(storage, -1)
        producer = self._views.get(storage, {}).get(_view_of(tensor), writer)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Value(tuple(tensor.shape), dtype, storage, producer, self.name(storage))

    def _written(self, tensor: Tensor, index: int, changed: bool) -> None:
        """Records the producer of a tensor, or the last writer of its storage."""
        storage = self.serial(tensor)
        if changed or storage not in self._writers:
            # Existing views see the new values.
            self._writers[storage], self._views[storage] = index, {}
        self._views[storage][_view_of(tensor)] = index

    def given_by(self, tensor: Tensor, index: int) -> None:
        self._written(tensor, index, False)

    def values(self, tensors: list[Tensor]) -> tuple[Value, ...]:
        return tuple(self._value(tensor) for tensor in tensors)

    def producer(self, tensor: Tensor) -> int:
        return self._value(tensor).producer

    # Saved tensors.

    def pack(self, value: Tensor) -> Tensor:
        serial, nbytes = self.serial(value), value.untyped_storage().nbytes()
        if not self.backward:
            self._saved(value, serial, nbytes)
        if value.is_leaf and value.requires_grad:
            return value
        quiet, self.quiet = self.quiet, True
        made, self.made = self.made, None
        try:
            return value.detach()
        finally:
            self.quiet, self.made = quiet, made

    def keep(self, tensor: Tensor) -> None:
        self._saved(tensor, self.serial(tensor), tensor.untyped_storage().nbytes())

    def _saved(self, value: Tensor, serial: int, nbytes: int) -> None:
        outside = self.existed_before(value)
        name = self.name(serial) or ("outside" if outside else "")
        self.packed.append(Packed(serial, nbytes, name))
        if serial in self.kept:
            return
        self.kept[serial] = self.packed[-1]
        if name:
            return
        self.saved += nbytes
        # Inputs are saved before the operator runs.
        if not self.quiet:
            owner = self._nodes.get(newest_node(), len(self.operators))
            self.claims[owner] = self.claims.get(owner, 0) + nbytes

    # Modules.

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module in self._paths:
            call = self.enter(self._paths[module])
            call.taken = frozenset((t.shape, t.dtype) for t in args if isinstance(t, Tensor))

    def enter(self, path: str) -> ModuleCall:
        call = ModuleCall(path, self.running, self.phase, len(self.moments), self.live, self.saved)
        call.open = torch.is_grad_enabled() and self.saves
        if call.parent is None:
            call.parent = self._region(call.phase)
        self._running.append(call)
        if call.phase == FORWARD:
            self._first_calls[path] = call
        self.calls.append(call)
        # Path of the running module.
        self.path = path
        return call

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if module in self._paths:
            self.leave(self._paths[module], output)

    def leave(self, path: str, output: Any) -> None:
        while self._running:  # calls that an exception ended are not popped otherwise
            call = self._running.pop()
            if call.path == path:
                leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
                own = {self.serial(t): t.untyped_storage().nbytes() for t in leaves}
                like = {self.serial(t) for t in leaves if (t.shape, t.dtype) in call.taken}
                call.output = sum(own.values())
                call.handed = sum(own[serial] for serial in like) or call.output
                call.ended, call.kept = len(self.moments), self.saved - call.saved
                break
        self.path = self._running[-1].path if self._running else ""

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None and not self.existed_before(parameter.grad):
            self.gradients += parameter.grad.untyped_storage().nbytes()
            self.drop_tensor(parameter.grad)

    def replayed(self, what: Any, backward: bool, owner: ModuleCall | None = None) -> None:
        self._replayed = backward
        self.moment(replayed=(what, backward))
        self._spans(owner, BACKWARD if backward else FORWARD)

    def record_placeholder(self, operator: Operator) -> None:
        operator.live, self._before = self.live, self.live
        self._operator_calls.append(self.running)
        self.operators.append(operator)
        self.moment(len(self.operators) - 1)


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


@cache
def _changed(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
