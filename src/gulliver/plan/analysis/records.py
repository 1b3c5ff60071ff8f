"""Results of an analysis: operators, module calls, and sums over them.

For example:

    found = analyse(model, batch)
    found.flops, found.saved, found.peak
    found.module("model.layers.7").backward.flops
    found.graph("model.layers.7")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.hardware.cluster import Device
from gulliver.hardware.operators import operator_seconds

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
OPAQUE = "opaque"
"""Name of the operator that represents a module that could not be traced."""


# [Note: repeated modules] Equal calls of equal modules are traced once. The operators of that call
# represent all of them (`Operator.count`); paths of the others refer to it (`Analysis.alike`).
#
# Bytes and FLOPs do not depend on a device. Seconds do, and need a device of a cluster.
@dataclass(frozen=True, slots=True)
class Value:
    """An input or output tensor of an operator.

    Attributes:
        shape: sizes of its dimensions.
        dtype: name of its element type, such as ``bfloat16``.
        storage: number of its storage, which views share.
        producer: index of the operator that wrote it last; -1 if it existed before.
        name: path of a parameter or buffer, ``input`` for the batch; empty if computed.
    """

    shape: tuple[int, ...]
    dtype: str
    storage: int
    producer: int = -1
    name: str = ""


@dataclass(slots=True)
class Operator:
    """An operation below autograd, as torch ran it.

    Attributes:
        name: name with its overload, such as ``aten::addmm``.
        phase: "forward", "recompute" (a forward inside backward) or "backward".
        path: path of its module.
        inputs: input tensors.
        outputs: output tensors.
        arguments: positional arguments, with input number n in place of a tensor: ``("%0", "%1",
            -1)``.
        options: keyword arguments, in the same form.
        flops: FLOPs of matrix products, convolutions and attention.
        read: bytes read.
        written: bytes written; 0 for a view.
        saved: bytes newly saved by its autograd node.
        forward: index of the forward operator whose gradient it computes; -1 for none.
        in_place: whether it writes to an input.
        view: whether its output is a view of an input.
        live: bytes allocated by the step and alive after it, without gradients.
        count: number of runs in the step, including the calls that it represents.
    """

    name: str
    phase: str
    path: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    flops: int = 0
    read: int = 0
    written: int = 0
    saved: int = 0
    forward: int = -1
    in_place: bool = False
    view: bool = False
    live: int = 0
    count: int = 1

    def seconds_on(self, device: Device) -> float:
        """Returns the seconds of one call on a device.

        Raises:
            GulliverError: the device has no rate for the operator's dtype.
        """
        if self.view:
            return 0.0
        dtype = next((v.dtype for v in self.inputs if v.dtype.startswith(("float", "bf"))), "")
        return operator_seconds(
            device, self.flops, self.read, self.written, not self.in_place, dtype
        )


@dataclass(frozen=True)
class Cost:
    """Work of one phase of a step."""

    # FLOPs of products of matrices, convolutions and attention.
    flops: int = 0
    # Bytes that operators read.
    read: int = 0
    # Bytes that operators write.
    written: int = 0
    # Number of operators, without views.
    operators: int = 0

    def plus(self, operator: Operator, times: int) -> Cost:
        return Cost(
            self.flops + times * operator.flops,
            self.read + times * operator.read,
            self.written + times * operator.written,
            self.operators + times * (not operator.view),
        )


@dataclass(frozen=True)
class ModuleCosts:
    """Costs of a module in a step, summed over its calls."""

    # Path of the module.
    path: str
    # Name of its class.
    kind: str
    # Number of calls in the forward.
    calls: int = 0
    # Work of the forward.
    forward: Cost = Cost()
    # Work of recomputation in backward.
    recompute: Cost = Cost()
    # Work of the backward.
    backward: Cost = Cost()
    # Bytes that the forward saves for backward, unless they were saved before.
    saved: int = 0
    # Bytes of the output of a call.
    output: int = 0
    # Bytes of the outputs shaped like an input (hidden states), or of all outputs.
    handed: int = 0
    # Peak bytes of a forward, relative to its start.
    forward_peak: int = 0
    # Peak bytes of its backward, relative to its start, including recomputation, without parameter
    # gradients.
    backward_peak: int = 0
    # Path of the module traced instead of this one; empty for none.
    alike: str = ""

    @property
    def flops(self) -> int:
        return self.forward.flops + self.recompute.flops + self.backward.flops


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd saves for backward; each storage counts once."""

    # Bytes that the step computes.
    activations: int = 0
    # Bytes of the batch.
    inputs: int = 0
    # Bytes of parameters, buffers and other tensors that existed before the step.
    parameters: int = 0


@dataclass(frozen=True)
class UntracedModule:
    """A module that could not be traced."""

    # Path of the module; empty for the model.
    path: str
    # Name of its class.
    kind: str
    # File and line that need values.
    where: str
    # Message of torch's error.
    reason: str

    def __str__(self) -> str:
        name = f"{self.path} ({self.kind})" if self.path else self.kind
        return (
            f"{name} cannot be traced ({self.where}: {self.reason}): it is not sharded, and its "
            "cost is estimated from its parameters and input"
        )


@dataclass(frozen=True)
class Analysis:
    """FLOPs, bytes and memory of a step."""

    # Operators in the order in which they ran, each standing for `count` of them.
    operators: tuple[Operator, ...]
    # Costs by path of traced modules; `module` also finds those of the others.
    modules: Mapping[str, ModuleCosts]
    # Paths of modules, and of those traced instead.
    alike: Mapping[str, str] = field(default_factory=dict)
    # Bytes that autograd keeps for the backward.
    saved: Saved = Saved()
    # Bytes of the batch.
    inputs: int = 0
    # Peak bytes of everything that the step allocates and the batch, without gradients of
    # parameters, which are model state.
    peak: int = 0
    # The same with the gradients, from when they are computed.
    peak_with_gradients: int = 0
    # Bytes of the gradients of parameters.
    gradients: int = 0
    # Bytes of the parameters.
    parameters: int = 0
    # Bytes of each storage that the step computes and autograd keeps, by its number.
    kept: Mapping[int, int] = field(default_factory=dict)
    # Modules that could not be traced.
    opaque: tuple[UntracedModule, ...] = ()
    # Remarks about unexpected behaviour.
    notes: tuple[str, ...] = ()

    def cost(self, phase: str) -> Cost:
        """Returns the work of a phase: "forward", "recompute" or "backward"."""
        found = Cost()
        for operator in self.operators:
            if operator.phase == phase:
                found = found.plus(operator, operator.count)
        return found

    @cached_property
    def flops(self) -> int:
        return sum(o.flops * o.count for o in self.operators)

    def seconds(self, device: Device, phase: str | None = None, path: str = "") -> float:
        """Seconds of the step, or a part of it, on a device, running one operator at a time."""
        chosen = self.operators if not path else self.graph(path)
        every = ((o, 1 if path else o.count) for o in chosen if phase in (None, o.phase))
        return sum(count * o.seconds_on(device) for o, count in every)

    def module(self, path: str) -> ModuleCosts:
        """Returns the costs of a module, or of the equal module traced instead of it."""
        stands = self.followed(path)
        found = self.modules.get(stands)
        if found is None:
            # Only the outermost modules, because a list of all would fill a screen.
            high = {p for p in self.modules if p and p.count(".") <= 1} or set(self.modules)
            near = get_close_matches(path, self.modules, n=1, cutoff=0.5)
            known = self.modules if near else high
            raise GulliverError(f"no module {path!r} was called: {nearest(path, known)}")
        return found if stands == path else replace(found, path=path, alike=stands)

    def followed(self, path: str) -> str:
        """Returns the path of the module that was traced instead of another."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            head = ".".join(parts[:end])
            if head in self.alike:
                return ".".join([self.alike[head], *parts[end:]])
        return path

    def graph(self, path: str, phase: str | None = None) -> tuple[Operator, ...]:
        """Returns the operators of a module, or of the module traced instead of it, in order."""
        own = self.module(path).alike or path
        inside = (o for o in self.operators if not own or f"{o.path}.".startswith(f"{own}."))
        return tuple(o for o in inside if phase in (None, o.phase))

    def stacks(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yields each traced module with the equal modules that it represents."""
        found: dict[str, list[str]] = {}
        for path, stands in self.alike.items():
            found.setdefault(stands, []).append(path)
        yield from found.items()
