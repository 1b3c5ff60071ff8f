"""Predicts a step's activation memory by running it with fake tensors."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils import _pytree as pytree

from gulliver._compat import (
    DispatchMode,
    fake_kind,
    fake_mode,
    private_tables,
    replace_tensors,
    without_modes,
)
from gulliver.errors import GulliverError
from gulliver.memory.activations import ActivationOffload
from gulliver.memory.stores import ManagedTensor
from gulliver.solve.activations import BlockActivations


@contextmanager
def without_traces(model: nn.Module, hooks: bool) -> Iterator[None]:
    """Context that restores attributes of modules, their hooks, and random states."""
    gradients = [(p, p.grad) for p in model.parameters()]
    numbers, arrays = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in list(model.modules()):
                stack.enter_context(private_tables(module, hooks))
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(arrays)
        for parameter, gradient in gradients:
            parameter.grad = gradient


class FakeTensors:
    """Converts tensors to fake tensors of one mode; tied tensors stay tied."""

    def __init__(self, device: str | None = None) -> None:
        self._made: dict[Tensor, Tensor] = {}
        self._device = device

    def of(self, tensor: Tensor) -> Tensor:
        made = self._made.get(tensor)
        if made is not None:
            return made
        device = self._device or ("cpu" if tensor.is_meta else tensor.device)
        # A parameter whose data is elsewhere is one expanded element; only its shape matters.
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._made[tensor] = made.requires_grad_(tensor.requires_grad)
        return made


# Activation memory of a step before it runs, traced with fake tensors.
#
# `activation_peak` runs forward and backward with tensors that have shapes but no memory, under a
# dispatch mode that sees every operation (`StorageCounter`). A storage counts from the operation
# that creates it until its last reference ends, including references of autograd: allocations and
# frees happen as in a real step, only without bytes. Operations that are recomputed in backward run
# and count again there.
#
# Parameters and buffers are not counted, nor gradients once they are accumulated, nor the
# workspaces of kernels, which are not visible from Python. Offloading of activations runs the
# actual code with a manager that only counts.


FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"


@dataclass(frozen=True)
class MemoryPoint:
    """Memory between two events of a step."""

    # "forward", "recompute" (a forward inside backward) or "backward".
    phase: str
    # Path of the running module; in backward, of the one whose output gradient was computed last.
    path: str
    live: int
    peak: int


@dataclass(frozen=True)
class ModuleResidue:
    """Memory that remains after a module's forward."""

    # Bytes that exist after the call but not before, without its output.
    saved: int
    output: int


@dataclass(frozen=True)
class ActivationPeak:
    """Peak memory of a step, besides model state."""

    # Peak bytes, including the batch; None if the step cannot be traced.
    bytes: int | None
    inputs: int = 0
    curve: tuple[MemoryPoint, ...] = ()
    # Bytes that each module's last forward call left for backward, by path.
    kept: Mapping[str, ModuleResidue] = field(default_factory=dict)
    # Reason why the step cannot be traced; empty if it can.
    reason: str = ""
    # Sizes of offloaded storages, by the path of their module.
    taken: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        if not self.curve:
            return "a step"
        at = max(self.curve, key=lambda point: point.peak)
        return f"{at.phase} of {at.path or 'the model'}"


def activation_peak(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    criterion: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    hooks: bool = False,
    prepare: Callable[[nn.Module], None] = lambda _: None,
    offloaded: Sequence[str] = (),
) -> ActivationPeak:
    """Predicts a step's peak memory besides parameters, gradients and optimizer state.

    The step runs with fake tensors; model and random states are restored. A model on meta is traced
    as if on the CPU, a compiled one as if not compiled.

    Args:
        model: model in the training or evaluation mode of the step.
        args: positional arguments of the model; tensors may be on meta.
        kwargs: keyword arguments of the model.
        criterion: function that returns the loss of the output; None for the output's ``loss``, or
            else the cross-entropy of its float tensors, the common loss that needs the most
            memory.
        autocast: autocast dtype; None disables autocast.
        hooks: whether to run the modules' hooks; must be False if they move chunks.
        prepare: function called with the model before it runs; its changes to modules are undone.
        offloaded: paths of modules whose activations are offloaded, and therefore not counted.

    Returns:
        The peak, or the reason why it cannot be predicted (data-dependent control flow).
    """
    try:
        with without_traces(model, hooks), fake_mode():
            fakes = FakeTensors()
            for module in model.modules():
                replace_tensors(module, fakes.of)
            prepare(model)
            batch = pytree.tree_map_only(Tensor, fakes.of, (tuple(args), dict(kwargs or {})))
            return follow_step(
                model, *batch, criterion=criterion, autocast=autocast, offloaded=offloaded
            )
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        return ActivationPeak(None, reason=f"{type(error).__name__}: {line}")


def follow_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    criterion: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    offloaded: Sequence[str] = (),
) -> ActivationPeak:
    """Runs forward and backward, accumulating gradients, and counts their memory."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    context = torch.autocast(device.type, autocast) if autocast is not None else nullcontext()
    with StorageCounter() as counter, _Watch(model, counter) as watch:
        takers = {path: _CountingManager(device, counter) for path in offloaded}
        for path, taker in takers.items():
            _FakeOffload(taker).wrap(model, [path])
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        inputs = counter.add(leaves)
        with context:
            output = model(*args, **kwargs)
            loss = (criterion or stand_in_loss)(output)
        watch.phase = BACKWARD
        watch.begin("")
        if loss.requires_grad:
            loss.backward()
        del output, loss
    taken = {path: tuple(taker.taken) for path, taker in takers.items()}
    return ActivationPeak(counter.peak, inputs, tuple(watch.curve()), watch.kept, taken=taken)


class _CountingManager:
    """Stand-in for the manager; fake activations are counted elsewhere."""

    def __init__(self, device: torch.device, counter: StorageCounter) -> None:
        self.device, self.taken, self._counter = device, list[int](), counter

    def add(self, name: str, kind: str, numel: int, dtype: torch.dtype) -> ManagedTensor:
        return ManagedTensor(name, kind, numel, dtype, number=len(self.taken))

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor:
        if fresh:
            self.taken.append(managed.nbytes)
        managed.tensor = torch.empty(managed.numel, dtype=managed.dtype, device=self.device)
        self._counter.drop_tensor(managed.tensor)
        return managed.tensor

    def done(self, managed: ManagedTensor) -> None:
        managed.tensor = None

    discard = remove = done

    def view(self, managed: ManagedTensor) -> Tensor:
        raise AssertionError(f"{managed.name} was evicted although there is room for everything")


class _FakeOffload(ActivationOffload):
    """Offloads fake tensors, without copies."""

    def _is_plain(self, tensor: Tensor) -> bool:
        return isinstance(tensor, fake_kind())

    def _fill(self, memory: Tensor, tensor: Tensor) -> None:
        pass


def stand_in_loss(output: Any) -> Tensor:
    """Returns a loss with typical memory needs, for an output without a criterion."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    # A model that computes its loss may return the loss alone, or as the first output.
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor) and isinstance(first, Tensor) and not first.ndim:
        found = first if first.requires_grad else None
    if isinstance(found, Tensor):
        return found
    loss = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            rows = leaf.float().reshape(-1, leaf.shape[-1] if leaf.ndim else 1)
            target = torch.zeros(len(rows), dtype=torch.int64, device=leaf.device)
            loss = loss.to(leaf.device) + F.cross_entropy(rows, target)
    return loss


RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
"""CPU LSTM layer, whose saved workspace fake tensors lack."""
GROUPED = "aten::_grouped_mm"
"""Grouped matmul, whose fake kernel supports only bfloat16."""
ALIGNED = 16
"""Alignment in bytes that grouped matmuls require of rows."""


class StorageCounter(DispatchMode):
    """Counts the bytes of storages that operations create, while they are referenced."""

    # [Note: lifetimes] PyTorch keeps the Python object of a storage as long as the storage itself,
    # so a weak reference to it dies when the memory is freed, whether Python, autograd's graph or a
    # view held it last. Existing memory is recognized by being only an argument of operations.

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.recent = 0
        self._held: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = _leaves((args, kwargs))
        outside = {_key(t) for t in taken} - self._held.keys()
        self.begins(func)
        shapeless = bool(taken) and (isinstance(taken[0], fake_kind()) or taken[0].is_meta)
        if func.name() == GROUPED and shapeless:
            output = _grouped_products(*args, **kwargs)
        elif func is RECURRENT and shapeless:
            output = _recurrent_layer(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        given = _leaves(output)
        self.add([t for t in given if _key(t) not in outside])
        self.ran(func, (args, kwargs, output), taken, given)
        return output

    def begins(self, func: Any) -> None: ...

    def ran(
        self, func: Any, call: tuple[Any, Any, Any], taken: list[Tensor], given: list[Tensor]
    ) -> None: ...

    def add(self, tensors: Sequence[Tensor]) -> int:
        before = self.live
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            known = self._held.get(key)
            if known is None:
                gone = weakref.ref(storage, lambda _, key=key: self.drop(key))
                self._held[key] = (gone, nbytes)
            elif known[1] != nbytes:  # it was resized
                self._held[key] = (known[0], nbytes)
            self.live += nbytes - (known[1] if known else 0)
        self.recent, self.peak = max(self.recent, self.live), max(self.peak, self.live)
        return self.live - before

    def drop(self, key: int) -> None:
        _, nbytes = self._held.pop(key, (None, 0))
        self.live -= nbytes

    def drop_tensor(self, tensor: Tensor) -> None:
        self.drop(_key(tensor))

    def mark(self) -> int:
        """Returns the peak bytes since the last call, and resets the peak."""
        most, self.recent = self.recent, self.live
        return most


def _grouped_products(
    one: Tensor,
    other: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    for factor in (one, other):
        rows = max(factor.stride()[-2:]) * factor.element_size()
        if rows % ALIGNED:
            sizes = " x ".join(map(str, factor.shape[-2:]))
            raise GulliverError(
                f"expert matmuls ({sizes}, {factor.dtype}) have rows of {rows} bytes, but torch "
                f"needs multiples of {ALIGNED}: use sizes that are multiples of "
                f"{ALIGNED // factor.element_size()}, or build the model with "
                "experts_implementation='eager'"
            )
    shape = [one.shape[-2], other.shape[-1]]
    if one.ndim == other.ndim:  # both grouped: one product per group
        shape.insert(0, len(offsets) if offsets is not None else one.shape[0])
    return one.new_empty(shape, dtype=out_dtype or one.dtype)


def _recurrent_layer(*args: Any, **kwargs: Any) -> Any:
    # oneDNN determines the size, which depends on the processor: run the layer on zeros to get it.
    *outputs, _ = RECURRENT(*args, **kwargs)
    if not torch.is_grad_enabled():  # then there is none
        return *outputs, outputs[0].new_empty(0, dtype=torch.uint8)
    like = tuple(
        (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else repr(a) for a in args
    )
    if like not in _WORKSPACES:
        with without_modes():
            real = [
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype).zero_()
                if isinstance(a, Tensor)
                else a
                for a in args
            ]
            _WORKSPACES[like] = RECURRENT(*real, **kwargs)[-1].untyped_storage().nbytes()
    return *outputs, outputs[0].new_empty(_WORKSPACES[like], dtype=torch.uint8)


_WORKSPACES: dict[Any, int] = {}
"""Bytes of LSTM workspaces, by the arguments of the call."""


class _Watch:
    """Tracks memory over module calls; in backward, by hooks on outputs."""

    def __init__(self, model: nn.Module, counter: StorageCounter) -> None:
        self.phase, self.kept = FORWARD, dict[str, ModuleResidue]()
        self._model, self._counter = model, counter
        self._paths = {module: path for path, module in model.named_modules()}
        self._events: list[tuple[str, str, int, int]] = []
        self._entered: list[tuple[str, int]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ]
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
                self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, path: str) -> None:
        again = self.phase == BACKWARD and bool(self._entered)
        phase = RECOMPUTE if again else self.phase
        self._events.append((phase, path, self._counter.live, self._counter.mark()))

    def curve(self) -> Iterator[MemoryPoint]:
        peaks = [most for *_, most in self._events[1:]] + [self._counter.mark()]
        for (phase, path, live, _), peak in zip(self._events, peaks, strict=True):
            yield MemoryPoint(phase, path, live, peak)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module in self._paths:
            self._entered.append((self._paths[module], self._counter.live))
            self.begin(self._paths[module])

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if module not in self._paths:
            return
        path = self._paths[module]
        while self._entered:  # calls that an exception ended are not popped otherwise
            name, before = self._entered.pop()
            if name == path:
                break
        else:
            return
        if self.phase == FORWARD:
            own = {_key(t): t.untyped_storage().nbytes() for t in _leaves(output)}
            left = self._counter.live - before
            self.kept[path] = ModuleResidue(max(0, left - sum(own.values())), sum(own.values()))
            for tensor in _leaves(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _, path=path: self._back(path))
        # The enclosing module continues after it.
        self.begin(self._entered[-1][0] if self._entered else "")

    def _back(self, path: str) -> None:
        at = self._events[-1][1] if self._events[-1][0] == BACKWARD else None
        # The output of a module's last submodule is often also the module's own.
        if self.phase == BACKWARD and not (at and at.startswith(f"{path}." if path else "")):
            self.begin(path)

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._counter.drop_tensor(parameter.grad)


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def block_activations(
    found: ActivationPeak, paths: Sequence[str], recompute_s: float = 0.0
) -> list[BlockActivations]:
    kept = [found.kept[path] for path in paths]
    seconds = recompute_s / max(1, len(paths))
    blocks, below = list[BlockActivations](), 0
    for path, one in zip(paths, kept, strict=True):
        most = max(point.peak for point in found.curve if _inside(point.path, path))
        working = max(0, most - below - one.saved)
        blocks.append(BlockActivations(one.saved, one.output, working, one.saved, seconds))
        below += one.saved + one.output
    assert found.bytes is not None, found.reason
    rest = [p.peak for p in found.curve if not any(_inside(p.path, path) for path in paths)]
    blocks.append(BlockActivations(0, 0, max(0, max(rest, default=0) - below), 0, math.inf))
    return blocks


def _inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")
