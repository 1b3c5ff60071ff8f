"""Runs the calls of a forward pass as planned, on DTensors.

A function mode intercepts every torch function that the model calls, and rejects calls that were
not planned. Inputs are converted to the layout of the call, every rank calls the function on its
shards, and outputs become DTensors again. The model's code is unchanged and sees the shapes of full
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gulliver.errors import GulliverError
from gulliver.layout.conversion import convert
from gulliver.operators.recompute import SavedCalls
from gulliver.operators.rules import (
    FORK,
    Layout,
    first_index,
    gradient_placements,
    local_shape,
    placements,
    run_local,
)
from gulliver.operators.trace import OperatorCall, Ref, Trace, name_of

Placements = tuple[Placement, ...]
VALUE = "_gulliver_value"  # attribute of a DTensor with the number of its value
FORKED = "_gulliver_fork"  # attribute of a DTensor with the output of its fork


# [Note: two graphs in one] Autograd's graph consists of DTensors between calls, and of this rank's
# shards inside a call. `_Enter` and `_Leave` are the boundaries, where layouts of gradients are
# known and converted.
@dataclass(frozen=True)
class PlannedCall:
    """A call with its planned layouts."""

    # Call of the trace.
    call: OperatorCall
    # Number of the call.
    number: int
    # Layout of each input tensor.
    takes: tuple[Layout, ...]
    # Layout of each output tensor.
    gives: tuple[Layout, ...]
    # Placements of the gradients of inputs, as their producers expect them.
    homes: tuple[Placements, ...]
    # Choice for its saved tensors.
    choice: str = "keep"


class OperatorMode(TorchFunctionMode):
    """Runs the calls of one forward pass."""

    def __init__(
        self,
        calls: Sequence[PlannedCall],
        trace: Trace,
        mesh: DeviceMesh,
        again: SavedCalls | None,
    ) -> None:
        super().__init__()
        self._calls, self._trace, self._mesh = calls, trace, mesh
        self._again, self._at = again, 0
        self._sizes, self._here = tuple(mesh.shape), tuple(mesh.get_coordinate() or ())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function as planned; functions without tensor outputs run unchanged."""
        kwargs = kwargs or {}
        planned = self._calls[self._at] if self._at < len(self._calls) else None
        name = name_of(func)
        if planned is None or name != planned.call.name:
            out = func(*args, **kwargs)
            leaves = pytree.tree_leaves((args, kwargs))
            if _has_tensor(out) and any(isinstance(t, Tensor) for t in leaves):
                raise self._other(name, planned)
            return out
        leaves = pytree.tree_leaves((args, kwargs))
        taken = [t for t in leaves if isinstance(t, Tensor)]
        if len(taken) == len(planned.call.takes):
            taken = [_behind_fork(*pair) for pair in zip(taken, planned.call.takes, strict=True)]
        self._check(planned, name, leaves, taken)
        self._at += 1
        out = self._ran(planned, taken)
        while self._at < len(self._calls) and self._calls[self._at].call.name == FORK:
            self._fork(out)
        return out

    def end(self) -> None:
        """Rejects a forward pass with fewer calls than planned."""
        if self._at < len(self._calls):
            raise self._other("the end", self._calls[self._at])

    def left(self, tensor: Tensor, number: int, layout: Layout) -> Tensor:
        """Converts an output of the model to a plain full tensor."""
        if not isinstance(tensor, DTensor):
            return tensor
        whole = (Replicate(),) * len(self._sizes)
        return self._entered(tensor, whole, whole, gradient_placements(layout))

    def _other(self, name: str, planned: PlannedCall | None) -> GulliverError:
        wanted = "nothing more" if planned is None else _described(planned.call)
        return GulliverError(
            f"the forward differs from the one that was planned: {name} ran instead of {wanted} "
            f"(call {self._at}); plan again with a batch of this form, or pass the inputs that "
            "differ under tracing (transformers: a 4-dim attention_mask)"
        )

    def _check(
        self, planned: PlannedCall, name: str, leaves: list[Any], taken: list[Tensor]
    ) -> None:
        call = planned.call
        wanted, _ = pytree.tree_flatten((call.args, dict(call.kwargs)))
        plain = [x for x in leaves if not isinstance(x, Tensor)]
        shapes = tuple(tuple(t.shape) for t in taken)
        if shapes != call.shapes_taken:
            raise GulliverError(
                f"{_described(call)} was planned for {_shapes(call.shapes_taken)} but got "
                f"{_shapes(shapes)}: plan again with a batch of this form"
            )
        same = len(leaves) == len(wanted) and plain == [x for x in wanted if not isinstance(x, Ref)]
        pairs = zip(taken, call.takes, strict=True)
        if not same or any(getattr(t, VALUE, number) != number for t, number in pairs):
            raise self._other(f"{name} with other arguments", planned)

    def _ran(self, planned: PlannedCall, taken: list[Tensor]) -> Any:
        call, values = planned.call, self._trace.values
        again = self._again if torch.is_grad_enabled() else None
        parts = [self._part(planned, n, t) for n, t in enumerate(taken)]
        made = None if again is None else again.begin(planned, taken, parts)
        shapes = self._shapes(planned)
        first = self._first(planned)
        if made is None:
            out = run_local(call, parts, planned.takes, shapes, first)
        else:
            with made.saving():
                out = run_local(call, parts, planned.takes, shapes, first)
        leaves, spec = pytree.tree_flatten(out)
        numbers = iter(zip(call.gives, planned.gives, strict=True))
        given = [
            self._whole(leaf, *next(numbers), values) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        if made is not None:
            made.end_call([t for t in given if isinstance(t, DTensor)])
        return pytree.tree_unflatten(given, spec)

    def _fork(self, out: Any) -> None:
        planned = self._calls[self._at]
        (number,) = planned.call.takes
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, DTensor)]
        source = next(t for t in leaves if getattr(t, VALUE) == number)
        self._at += 1
        vars(source)[FORKED] = self._ran(planned, [source])

    def _shapes(self, planned: PlannedCall) -> list[tuple[int, ...]]:
        whole = (self._trace.values[v].shape for v in planned.call.gives)
        return [local_shape(s, g, self._sizes) for s, g in zip(whole, planned.gives, strict=True)]

    def _first(self, planned: PlannedCall) -> int:
        shape = planned.call.shapes_taken[0]
        if not shape:
            return 0
        return first_index(0, shape[0], planned.takes[0], self._sizes, self._here)

    def _part(self, planned: PlannedCall, number: int, tensor: Tensor) -> Tensor:
        layout = planned.takes[number]
        whole = (Replicate(),) * len(self._sizes)
        if not isinstance(tensor, DTensor):
            if all(one in "RT" for one in layout) or not tensor.ndim:
                return tensor
            tensor = spread(tensor, self._mesh, whole)
        grads = gradient_placements(layout)
        return self._entered(tensor, placements(layout), grads, planned.homes[number])

    def _entered(
        self, tensor: DTensor, wanted: Placements, grads: Placements, home: Placements
    ) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            entered: Any = _Enter.apply(tensor, wanted, grads, home)
            return entered
        return local_of(changed(tensor, wanted))

    def _whole(self, local: Tensor, number: int, layout: Layout, values: Any) -> DTensor:
        shape = values[number].shape
        if local.requires_grad:
            found: Any = _Leave.apply(local, self._mesh, placements(layout), shape)
        else:
            found = spread(local, self._mesh, placements(layout), shape)
        vars(found)[VALUE] = number
        return found

    def kept(self, tensor: Tensor) -> Tensor:
        return plain(tensor) if isinstance(tensor, DTensor) else tensor

    def replayed(self, planned: PlannedCall, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Converts inputs again; returns their shards and a function that repeats the call."""
        with torch.no_grad():
            parts = [self._part(planned, n, t) for n, t in enumerate(sources)]
        trains = [self._trace.values[v].trains for v in planned.call.takes]
        parts = [p.detach().requires_grad_(t) for p, t in zip(parts, trains, strict=True)]
        shapes, first = self._shapes(planned), self._first(planned)
        return parts, lambda: run_local(planned.call, parts, planned.takes, shapes, first)

    def spread_given(self, planned: PlannedCall, out: Any) -> list[DTensor]:
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        rows = zip(leaves, planned.call.gives, planned.gives, strict=True)
        values = self._trace.values
        return [
            spread(t.detach(), self._mesh, placements(layout), values[v].shape)
            for t, v, layout in rows
        ]


def spread(
    local: Tensor, mesh: DeviceMesh, wanted: Placements, shape: Sequence[int] | None = None
) -> DTensor:
    shape = torch.Size(local.shape if shape is None else shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, wanted, run_check=False, shape=shape, stride=stride)


def local_of(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()


def changed(tensor: DTensor, wanted: Placements) -> DTensor:
    if tuple(tensor.placements) == tuple(wanted):
        return tensor
    with torch.no_grad():
        return convert(tensor, wanted)


def plain(tensor: DTensor, mesh: DeviceMesh | None = None) -> DTensor:
    # `detach` would return the mesh of the first DTensor of that form in this process, which torch
    # caches and whose process groups may be destroyed.
    mesh = mesh or tensor.device_mesh
    return spread(local_of(tensor), mesh, tuple(tensor.placements), tensor.shape)


def whole_of(tensor: Any, mesh: DeviceMesh) -> Tensor:
    assert isinstance(tensor, DTensor), "parameters of a plan of operators are DTensors"
    wanted = (Replicate(),) * mesh.ndim
    return local_of(changed(plain(tensor, mesh), wanted))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        wanted: Placements,
        grads: Placements,
        home: Placements,
    ) -> Tensor:
        ctx.back = tensor.device_mesh, tensor.shape, grads, home
        ctx.set_materialize_grads(False)
        local = local_of(changed(tensor, wanted))
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, shape, placed, home = ctx.back
        if grads[0] is None:
            return (None,) * 4
        found = changed(spread(grads[0], mesh, placed, shape), home)
        return found, None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, mesh: DeviceMesh, placed: Placements, shape: Sequence[int]
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        return spread(local.view_as(local), mesh, placed, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        local = None if grads[0] is None else local_of(grads[0])
        return local, None, None, None


def _behind_fork(tensor: Tensor, number: int) -> Tensor:
    """Returns the output of a value's fork if the call reads it, otherwise the tensor."""
    if isinstance(tensor, DTensor) and getattr(tensor, VALUE, number) != number:
        return vars(tensor).get(FORKED, tensor)
    return tensor


def _has_tensor(out: Any) -> bool:
    return any(isinstance(t, Tensor) for t in pytree.tree_leaves(out))


def _described(call: OperatorCall) -> str:
    return f"{call.name} of {call.path or 'the model'}"


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
