"""Traces the torch functions that a model's forward calls, with fake tensors.

An `OperatorCall` is a call above autograd, such as ``F.linear(x, w)``. Values are numbered in
order; each call lists its inputs, outputs and saved values, and the trace records each value's
lifetime.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gulliver._compat import fake_mode, replace_tensors
from gulliver.errors import GulliverError
from gulliver.memory.symbolic import FakeTensors, without_traces

RANDOM = frozenset(
    (
        *("alpha_dropout", "bernoulli", "dropout1d", "dropout2d", "dropout3d"),
        *(
            "feature_alpha_dropout",
            "gumbel_softmax",
            "multinomial",
            "normal",
            "poisson",
            "rand",
            "rand_like",
            "randint",
        ),
        *("randint_like", "randn", "randn_like", "randperm", "rrelu"),
    )
)
ALIASES = {"radd": "add", "rmul": "mul", "rtruediv": "rdiv", "iadd": "add_", "imul": "mul_"}


@dataclass(frozen=True)
class Ref:
    """Placeholder for a tensor in the arguments of a call: its index among the inputs."""

    index: int


@dataclass(frozen=True)
class Value:
    """A tensor of the forward pass.

    Attributes:
        shape: sizes of its dims.
        dtype: data type.
        trains: whether it has a gradient.
        maker: number of the call that produces it; -1 if it existed before the forward pass.
        parameter: name of the parameter; empty for other values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    maker: int = -1
    parameter: str = ""

    @property
    def flows(self) -> bool:
        return self.trains and self.maker >= 0


@dataclass(frozen=True)
class OperatorCall:
    """A call of a torch function."""

    # Name of the function.
    name: str
    # Path of the module that makes the call.
    path: str
    func: Callable[..., Any]
    # Positional arguments, with a `Ref` for each tensor.
    args: tuple[Any, ...]
    # Keyword arguments, in the same form.
    kwargs: Mapping[str, Any]
    # Numbers of its input values.
    takes: tuple[int, ...]
    # Numbers of its output values.
    gives: tuple[int, ...]
    # Shapes of the inputs.
    shapes_taken: tuple[tuple[int, ...], ...]
    # Shapes of the outputs.
    shapes_given: tuple[tuple[int, ...], ...]
    # Values that its backward reads.
    saves: frozenset[int] = frozenset()
    # Whether its outputs share the memory of its inputs.
    view: bool = False

    def argument(self, position: int, name: str, default: Any) -> Any:
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def constants_besides(self) -> bool:
        return bool(self.kwargs) or any(not isinstance(a, Ref) for a in self.args)

    def filled(self, tensors: Any) -> tuple[Any, Any]:
        return pytree.tree_map_only(Ref, lambda r: tensors[r.index], (self.args, dict(self.kwargs)))


@dataclass
class Trace:
    """The calls of a forward pass."""

    # Calls in their order.
    calls: list[OperatorCall] = field(default_factory=list)
    # Values by their number.
    values: list[Value] = field(default_factory=list)
    # Numbers of the model's output values.
    outputs: tuple[int, ...] = ()
    # Number of the first call at which a value is no longer referenced.
    dies: dict[int, int] = field(default_factory=dict)

    def users(self, value: int) -> list[int]:
        return [n for n, call in enumerate(self.calls) if value in call.takes]


def name_of(func: Any) -> str:
    """Name of a torch function; an operator's double underscores are removed."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(func.__self__, "__name__", name)
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    return ALIASES.get(name, name)


def trace_calls(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Trace:
    with without_traces(model, hooks=False), fake_mode():
        fakes = FakeTensors("cpu")
        for module in model.modules():
            replace_tensors(module, fakes.of)
        args, kwargs = pytree.tree_map_only(Tensor, fakes.of, batch)
        tracer = Tracer(model)
        try:
            with tracer.following():
                output = model(*args, **kwargs)
        except GulliverError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())
            raise GulliverError(
                f"the forward depends on data in {tracer.path or 'the model'}: {said}; use a "
                "plugin that shards modules"
            ) from error
        leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        tracer.trace.outputs = tuple(tracer.number(t) for t in leaves)
        return tracer.trace


class Tracer(TorchFunctionMode):
    """Records calls of torch functions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace, self.path = Trace(), ""
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[str] = []
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._saving: list[Tensor] = []
        for name, parameter in model.named_parameters():
            number = self.number(parameter)
            self.trace.values[number] = replace(self.trace.values[number], parameter=name)

    @contextmanager
    def following(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave),
        ]
        try:
            with saved_tensors_hooks(self.pack, _unpack), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def number(self, tensor: Tensor, maker: int = -1) -> int:
        """Returns the number of a value, assigning a new one if necessary."""
        known = self._numbers.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        number = len(self.trace.values)
        value = Value(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, maker)
        self.trace.values.append(value)

        def storage_freed(_: Any) -> None:
            self.trace.dies[number] = len(self.trace.calls)

        self._numbers[id(tensor)] = weakref.ref(tensor, storage_freed), number
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        self._saving = []
        out = func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        leaves = pytree.tree_leaves((args, kwargs))
        taken = [t for t in leaves if isinstance(t, Tensor)]
        if not given or not taken:
            return out
        self._check(name, kwargs, args)
        if any(one is other for one in given for other in taken):
            if len(given) > 1:
                raise GulliverError(
                    f"{name} in {self.path!r} returns its input, which is not supported"
                )
            given = [given[0].view_as(given[0])]
            out = given[0]
        self._write(name, func, (args, kwargs), taken, given)
        return out

    def _check(self, name: str, kwargs: Mapping[str, Any], args: Any) -> None:
        where = f"{name} in {repr(self.path) if self.path else 'the model'}"
        if name in RANDOM or kwargs.get("dropout_p"):
            raise GulliverError(f"{where} draws random numbers, which is not supported")
        if name == "dropout":
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            on = kwargs.get("training", args[2] if len(args) > 2 else True)
            if share and on:
                raise GulliverError(
                    f"{where} draws random numbers, which is not supported; set p to 0"
                )
        if (name.endswith("_") and not name.startswith("_")) or kwargs.get("inplace"):
            raise GulliverError(f"{where} writes to its input: use the out-of-place function")
        if name == "setitem" or "out" in kwargs:
            raise GulliverError(f"{where} writes to a tensor: create a new one instead")

    def _write(
        self, name: str, func: Any, call: Any, taken: list[Tensor], given: list[Tensor]
    ) -> None:
        at, numbers = len(self.trace.calls), iter(range(len(taken)))
        args, kwargs = pytree.tree_map_only(Tensor, lambda _: Ref(next(numbers)), call)
        takes = tuple(self.number(t) for t in taken)
        storages = {_storage(t): number for t, number in zip(taken, takes, strict=True)}
        saves = frozenset(storages[s] for s in map(_storage, self._saving) if s in storages)
        self._saving = []
        self.trace.calls.append(
            OperatorCall(
                *(name, self.path, func, tuple(args), kwargs, takes),
                tuple(self.number(t, at) for t in given),
                tuple(tuple(t.shape) for t in taken),
                tuple(tuple(t.shape) for t in given),
                saves,
                all(_storage(t) in storages for t in given),
            )
        )

    def pack(self, tensor: Tensor) -> None:
        """Records that a tensor is saved, without keeping it alive."""
        self._saving.append(tensor.detach())

    def enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self.path)
        # Path of the module that runs.
        self.path = self._paths.get(module, self.path)

    def leave(self, module: nn.Module, _: Any, __: Any) -> None:
        self.path = self._stack.pop()


def _unpack(_: Any) -> Any:
    raise AssertionError("backward must not run while a forward is traced")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
