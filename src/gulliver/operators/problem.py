"""Computes the costs of operators on one device, from calls with a rank's local shapes.

Forward and backward run on fake tensors. Every operation below autograd is charged for its FLOPs
and bytes; memory counts as long as it is referenced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from gulliver._compat import fake_mode
from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster, Device
from gulliver.hardware.operators import operator_bytes, operator_flops, operator_seconds
from gulliver.layout.conversion import plan_conversion
from gulliver.memory.symbolic import StorageCounter
from gulliver.operators.graph import Graph, OperatorSharding
from gulliver.operators.rules import (
    FORK,
    Layout,
    gradient_placements,
    local_shape,
    placements,
    run_local,
)
from gulliver.operators.trace import OperatorCall, Value
from gulliver.plan.results import MemoryPlan
from gulliver.solve.joint import ENTRY, Block, EdgeSeconds, Operator, Strategy


@dataclass(frozen=True)
class OperatorCosts:
    """Costs of the calls of one operator on a device."""

    # Seconds of the forward.
    forward_s: float
    # Seconds of the backward.
    backward_s: float
    # Bytes that it saves, without its inputs and outputs.
    inner: int
    # Peak bytes of the forward, including its outputs.
    forward_peak: int
    # Peak bytes of the backward, including gradients, in addition to the saved bytes.
    backward_peak: int
    # Inputs that backward reads.
    takes_saved: frozenset[int]


class _Meter(StorageCounter):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.seconds = device, 0.0

    def ran(
        self, func: Any, call: tuple[Any, Any, Any], taken: list[Tensor], given: list[Tensor]
    ) -> None:
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
    shapes = [local_shape(values[v].shape, layouts[v], sizes) for v in call.gives]
    takes = [there[v] for v in call.takes]
    out = run_local(call, takes, [layouts[v] for v in call.takes], shapes)
    given = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    there.update(zip(call.gives, given, strict=True))


@cache
def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


# The joint search problem of a forward: strategies, conversions and bytes of every operator.


STEP_COPIES = 2  # maximum temporary copies of a parameter in a step: Adam's square root and divisor


# [Note: bytes on the safe side] A run must not exceed the predicted bytes. Temporaries that no
# backward reads (outputs until the next operator, local variables of a running module, gradients
# waiting for an earlier operator, copies for a change of layout) are charged to every operator that
# runs meanwhile, each in its largest possible layout. So a run stays below the prediction by a few
# such tensors. The optimizer's step, one parameter at a time, is charged to the operator that reads
# the parameter.
@dataclass
class Problem:
    """The joint search problem of a model."""

    graph: Graph
    cluster: Cluster
    # Number of tensors of optimizer state for each parameter.
    moments: int = 2
    _converted: dict[object, tuple[float, int]] = field(default_factory=dict)

    @cached_property
    def shardings(self) -> list[list[OperatorSharding]]:
        return [self.graph.shardings(n) for n in range(len(self.graph.nodes))]

    @cached_property
    def blocks(self) -> list[Block]:
        self._check()
        costs = Costs(self.cluster.device, self.graph.sizes)
        return [self._block(costs, numbers) for numbers in self.graph.blocks]

    def held(self, strategies: Sequence[int], activations: int) -> MemoryPlan:
        """Bytes of a rank for one strategy per operator, in graph order."""
        nodes = [node for numbers in self.graph.blocks for node in numbers]
        whole = trained = 0
        for node, number in zip(nodes, strategies, strict=True):
            way = self.shardings[node][number]
            for value in self.graph.takes(node):
                one = self.graph.trace.values[value]
                # As in `_strategy`: the first reader decides how a parameter is stored.
                if one.parameter and self.graph.users[value][0] == node:
                    count = self._bytes(value, stored_layout(way.layouts[value]))
                    whole += count
                    trained += count * one.trains
        return MemoryPlan(whole, trained, trained * self.moments, activations)

    def _check(self) -> None:
        block_of = {n: b for b, numbers in enumerate(self.graph.blocks) for n in numbers}
        for value, users in self.graph.users.items():
            if not self.graph.trace.values[value].flows:
                continue
            maker = self.graph.maker(value)
            for user in users:
                last = self.graph.blocks[block_of[maker]][-1]
                near = block_of[user] - block_of[maker]
                if near > 1 or (near == 1 and maker != last):
                    raise GulliverError(
                        f"{self.graph.nodes[user].name} reads the output of "
                        f"{self.graph.nodes[maker].name} across a block: choose other blocks"
                    )

    def _block(self, costs: Costs, numbers: range) -> Block:
        return Block(tuple(self._operator(costs, n, numbers) for n in numbers))

    def _operator(self, costs: Costs, node: int, block: range) -> Operator:
        measured = [self._measured(costs, node, way) for way in self.shardings[node]]
        sources = list[int]()
        conversions = list[EdgeSeconds | None]()
        for value in self.graph.takes(node):
            if not self.graph.trace.values[value].flows:
                continue
            maker = self.graph.maker(value)
            sources.append(maker - block[0] if maker in block else ENTRY)
            conversions.append(self._edge(value, maker, node, measured))
        own = [v for v in self.graph.gives(node) if v in self.graph.saved]
        readers = [u for v in own for u in self.graph.users.get(v, [])]
        inside = [u - block[0] for u in readers if u in block and u > node]
        strategies = (
            self._strategy(node, way, found, node == block[-1])
            for way, found in zip(self.shardings[node], measured, strict=True)
        )
        return Operator(
            self.graph.nodes[node].name.rpartition(".")[2],
            tuple(strategies),
            tuple(sources),
            tuple(conversions),
            max(inside, default=None),
            self._is_recomputable(node),
        )

    def _is_recomputable(self, node: int) -> bool:
        """Whether all inputs of an operator are available in backward; see [Note: what joins]."""
        values = self.graph.trace.values
        reads = (v for v in self.graph.takes(node) if values[v].flows)
        return self.graph.trains(node) and all(v in self.graph.saved for v in reads)

    def _measured(self, costs: Costs, node: int, way: OperatorSharding) -> OperatorCosts:
        calls = [self.graph.trace.calls[n] for n in self.graph.nodes[node].calls]
        return costs.of(calls, self.graph.trace.values, way.layouts, self.graph.gives(node))

    def _strategy(
        self, node: int, way: OperatorSharding, found: OperatorCosts, last: bool
    ) -> Strategy:
        values, saved = self.graph.trace.values, self.graph.saved
        forward_s = backward_s = 0.0
        state = inner = room = back_room = step = 0
        for value in self.graph.takes(node):
            layout, one = way.layouts[value], values[value]
            if one.flows:
                continue
            stored = stored_layout(layout) if one.parameter else ("R",) * len(layout)
            seconds, peak, copies = self._change(one, stored, layout, False)
            forward_s += seconds
            room += peak
            if copies and value in found.takes_saved:
                inner += self._bytes(value, layout)
            if one.parameter and one.trains:
                seconds, peak, _ = self._change(one, stored, layout, True)
                backward_s += seconds
                back_room += peak
                step = max(step, STEP_COPIES * self._bytes(value, stored))
            if one.parameter and self.graph.users[value][0] != node:
                # Another operator decides how it is stored: it may have to be gathered for this
                # one.
                inner += self._bytes(value, layout)
                room += 2 * self._bytes(value, ("R",) * len(layout))
            if one.parameter and self.graph.users[value][0] == node:
                state += self._bytes(value, stored) * ((2 + self.moments) if one.trains else 1)
            elif not one.parameter and self.graph.users[value][0] == node:
                state += self._bytes(value, stored)
        for value in self.graph.trace.outputs:
            if self.graph.maker(value) == node:
                whole = ("R",) * len(self.graph.sizes)
                seconds, peak, _ = self._change(values[value], way.layouts[value], whole, False)
                forward_s += seconds
                room += peak + self._bytes(value, whole)
                if values[value].trains:
                    seconds, peak, _ = self._change(values[value], way.layouts[value], whole, True)
                    backward_s += seconds
                    back_room += peak + self._bytes(value, whole)
        given = self._own(node)
        if not self.graph.trains(node):  # constants stay while the model runs
            state += sum(self._bytes(v, way.layouts[v]) for v in given)
            given, inner = [], 0
        output = 0
        if last:
            output = sum(self._bytes(v, way.layouts[v]) for v in given if v in saved)
            given = []
        kept = (
            found.inner + inner + sum(self._bytes(v, way.layouts[v]) for v in given if v in saved)
        )
        passing, pending = self._around(node)
        room += max(self._rooms(node, way, False))
        back_room += max(self._rooms(node, way, True))
        return Strategy(
            " ".join(way.words),
            *(found.forward_s, found.backward_s, forward_s, backward_s, state, kept, output),
            max(0, found.forward_peak - kept - output) + room + passing,
            max(found.backward_peak + back_room + pending, step),
        )

    def _own(self, node: int) -> list[int]:
        """Outputs of an operator, one per storage that it allocates."""
        calls, found = self.graph.trace.calls, dict[int, int]()
        for value in self.graph.gives(node):
            root = value
            while (call := calls[self.graph.trace.values[root].maker]).view:
                root = call.takes[0]
                if self.graph.trace.values[root].maker < 0:
                    break
            if self.graph.maker(root) == node:
                found.setdefault(root, value)
        return list(found.values())

    def _edge(
        self, value: int, maker: int, node: int, measured: Sequence[OperatorCosts]
    ) -> EdgeSeconds:
        """Costs of changing a value's layout, by the shardings of producer and consumer."""
        one = self.graph.trace.values[value]
        rows: list[list[tuple[float, float, int]]] = []
        for before in self.shardings[maker]:
            row = []
            for way, found in zip(self.shardings[node], measured, strict=True):
                change = before.layouts[value], way.layouts[value]
                seconds, _, copies = self._change(one, *change, False)
                back, _, _ = self._change(one, *change, True)
                kept = value in found.takes_saved or self._is_fork(node)
                size = self._bytes(value, change[1]) if copies and kept else 0
                row.append((seconds, back, size))
            rows.append(row)
        parts = (tuple(tuple(cell[n] for cell in row) for row in rows) for n in range(3))
        return EdgeSeconds(*parts)  # type: ignore[arg-type]

    def _is_fork(self, node: int) -> bool:
        return self.graph.trace.calls[self.graph.nodes[node].calls[0]].name == FORK

    def _rooms(self, node: int, way: OperatorSharding, backward: bool) -> list[int]:
        found = [0]
        for value in self.graph.takes(node):
            one = self.graph.trace.values[value]
            if one.flows:
                for before in self.shardings[self.graph.maker(value)]:
                    change = before.layouts[value], way.layouts[value]
                    found.append(self._change(one, *change, backward)[1])
        return found

    def _change(
        self, value: Value, before: Layout, after: Layout, backward: bool
    ) -> tuple[float, int, bool]:
        """Seconds and bytes of a layout conversion, forward or backward, and whether it copies."""
        ends = placements(before), placements(after)
        if backward:
            ends = gradient_placements(after), gradient_placements(before)
        if ends[0] == ends[1]:
            return 0.0, 0, False
        key = value.shape, value.dtype, ends
        if key not in self._converted:
            plan = plan_conversion(
                value.shape, value.dtype.itemsize, self.graph.sizes, *ends, self.cluster
            )
            # Messages need buffers in addition to their inputs and outputs.
            self._converted[key] = plan.total, 2 * plan.peak_bytes
        return *self._converted[key], True

    def _bytes(self, value: int, layout: Layout) -> int:
        one = self.graph.trace.values[value]
        return nbytes(local_shape(one.shape, layout, self.graph.sizes), one.dtype)

    def _most(self, value: int) -> int:
        node = self.graph.maker(value)
        return max(self._bytes(value, way.layouts[value]) for way in self.shardings[node])

    @cached_property
    def _lives(self) -> list[tuple[int, int, int, int, bool, bool]]:
        """Per value: maker, last reader, last referrer, maximum bytes, if saved, if trained."""
        found = []
        trace = self.graph.trace
        for number, value in enumerate(trace.values):
            if value.maker < 0:
                continue
            if trace.calls[value.maker].view and not value.trains:
                continue
            maker = self.graph.maker(number)
            last = max(self.graph.users.get(number, [maker]), default=maker)
            dies = min(trace.dies.get(number, len(trace.calls)), len(trace.calls)) - 1
            frame = max(last, self.graph.node_of[max(0, dies)])
            if self.graph.users.get(number):
                most = self._most(number)
                found.append((maker, last, frame, most, number in self.graph.saved, value.trains))
        return found

    def _around(self, node: int) -> tuple[int, int]:
        """Bytes of other live values while an operator runs, in forward and in backward."""
        block = next(b for b in self.graph.blocks if node in b)
        passing = pending = 0
        for maker, last, frame, most, saved, trained in self._lives:
            if maker < block[0] and maker not in (block[0] - 1,):
                continue
            if maker < node <= frame and (not saved or node > last):
                passing += most
            if trained and maker < node < last:
                pending += most
        return passing, pending


def stored_layout(layout: Layout) -> Layout:
    """Layout in which a parameter is stored, given the layout in which an operator reads it."""
    return tuple(one if one[0] == "S" else "R" for one in layout)
