"""Costs of an operator on one device, from its calls with a rank's shapes.

Forward and backward run with fake tensors. Every operation below autograd is charged by its FLOPs
and bytes; memory counts for as long as something refers to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from gulliver._compat import fake_mode
from gulliver.booster.operators._layouts import Layout, local_shape
from gulliver.booster.operators._rules import run_local
from gulliver.booster.operators._trace import OperatorCall, Value
from gulliver.hardware import (
    Device,
    operator_bytes,
    operator_flops,
    operator_seconds,
)
from gulliver.memory import StorageCounter


@dataclass(frozen=True)
class OperatorCosts:
    """Costs of the calls of an operator on a device."""

    # Seconds of the forward.
    forward_s: float
    # Seconds of the backward.
    backward_s: float
    # Bytes that it saves, without its inputs and outputs.
    inner: int
    # Most bytes of the forward, what it gives included.
    forward_peak: int
    # Most bytes of the backward above those that were saved, gradients included.
    backward_peak: int
    # Those of what it takes that backward reads.
    takes_saved: frozenset[int]


class _Meter(StorageCounter):
    """Adds up seconds of operations, and bytes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.seconds = device, 0.0

    def ran(
        self, func: Any, call: tuple[Any, Any, Any], taken: list[Tensor], given: list[Tensor]
    ) -> None:
        """Charges an operation; views are free."""
        storages = {_storage(t) for t in taken}
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if not given or (not writes and all(_storage(t) in storages for t in given)):
            return
        args, kwargs, out = call
        read, written = operator_bytes(func, taken, given)
        dtype = next((str(t.dtype)[6:] for t in taken if t.is_floating_point()), "float32")
        flops = operator_flops(func, args, kwargs, out)
        self.seconds += operator_seconds(self.device, flops, read, written, not writes, dtype)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Costs:
    """Costs of operators on a device, cached by calls and shapes."""

    def __init__(self, device: Device, sizes: tuple[int, ...]) -> None:
        self.device, self.sizes = device, sizes
        self._known: dict[Any, tuple[OperatorCosts, tuple[int, ...]]] = {}

    def of(
        self,
        calls: Sequence[OperatorCall],
        values: Sequence[Value],
        layouts: Mapping[int, Layout],
        gives: Sequence[int],
    ) -> OperatorCosts:
        """Costs of some calls."""
        order = list(dict.fromkeys(v for c in calls for v in (*c.takes, *c.gives)))
        short = {v: n for n, v in enumerate(order)}
        key = (
            tuple(_form(call, short) for call in calls),
            tuple((values[v].shape, values[v].dtype, values[v].trains, layouts[v]) for v in order),
            tuple(short[v] for v in gives),
        )
        if key not in self._known:
            found = self._follow(calls, values, layouts, gives)
            self._known[key] = found, tuple(short[v] for v in found.takes_saved)
        found, saved = self._known[key]
        takes = frozenset(order[n] for n in saved)
        return replace(found, takes_saved=takes)

    def _follow(
        self,
        calls: Sequence[OperatorCall],
        values: Sequence[Value],
        layouts: Mapping[int, Layout],
        gives: Sequence[int],
    ) -> OperatorCosts:
        with fake_mode(), torch.enable_grad():
            there = dict[int, Tensor]()
            for value in dict.fromkeys(v for call in calls for v in call.takes):
                if values[value].maker < 0 or not any(value in c.gives for c in calls):
                    there[value] = self._part(values[value], layouts[value])
            taken = {_storage(t): v for v, t in there.items()}
            packed = dict[int, int]()
            keep = dict[int, Tensor]()

            def pack(tensor: Tensor) -> Tensor:
                packed[_storage(tensor)] = tensor.untyped_storage().nbytes()
                keep.setdefault(_storage(tensor), tensor.detach())
                return tensor.detach()

            meter = _Meter(self.device)
            with meter, saved_tensors_hooks(pack, lambda t: t):
                for call in calls:
                    _run(call, there, values, layouts, self.sizes)
            outs = [there[v] for v in gives if there[v].requires_grad]
            own = {_storage(there[v]) for v in gives}
            roots = own | taken.keys()
            inner = sum(size for s, size in packed.items() if s not in roots)
            forward_s, forward_peak = meter.seconds, meter.peak
            sources = {v: t for v, t in there.items() if _storage(t) in taken}
            saved = frozenset(taken[s] for s in packed if s in taken)
            there.clear()
            keep.clear()
            meter.seconds, start = 0.0, meter.live
            meter.mark()
            with meter:
                grads = [torch.empty_like(t) for t in outs]
                if outs:
                    torch.autograd.backward(outs, grads)
            del sources
            return OperatorCosts(
                *(forward_s, meter.seconds, inner, forward_peak), meter.recent - start, saved
            )

    def _part(self, value: Value, layout: Layout) -> Tensor:
        shape = local_shape(value.shape, layout, self.sizes)
        return torch.empty(shape, dtype=value.dtype, requires_grad=value.trains)


def _form(call: OperatorCall, short: Mapping[int, int]) -> Any:
    numbers = tuple(short[v] for v in call.takes), tuple(short[v] for v in call.gives)
    return call.name, repr((call.args, dict(call.kwargs))), numbers


def _run(
    call: OperatorCall,
    there: dict[int, Tensor],
    values: Sequence[Value],
    layouts: Mapping[int, Layout],
    sizes: tuple[int, ...],
) -> None:
    """Runs a call on a rank's parts and stores its outputs."""
    shapes = [local_shape(values[v].shape, layouts[v], sizes) for v in call.gives]
    takes = [there[v] for v in call.takes]
    out = run_local(call, takes, [layouts[v] for v in call.takes], shapes)
    given = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    there.update(zip(call.gives, given, strict=True))


@cache
def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
