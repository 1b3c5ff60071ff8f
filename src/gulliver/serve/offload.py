"""`StreamedWeights`: a model whose weights exceed the memory limit.

The memory engine (`gulliver.memory.manager.Manager`) keeps as many layers as fit, and prefetches
the others from a disk. Every forward uses the layers in the same order, so residency and
prefetching are planned for the cycle (`gulliver.solve`).

A *unit* is a block, or a module around the blocks. Its tensors form one object of the manager;
tensors shared by several units, such as tied embeddings, are separate objects. Hooks of a unit use
and release its objects.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory.buffers import PARAMETERS
from gulliver.memory.manager import Manager
from gulliver.memory.stores import (
    IN_MEMORY,
    DiskStore,
    ManagedTensor,
    check_disk_folder,
    file_system,
    whole_pages,
)
from gulliver.options import size_text
from gulliver.precision.int8.layers import QuantizedLayer
from gulliver.serve.options import disk_limit

ALIGNED = 64
"""Alignment of tensors in an object, in bytes."""


@dataclass(eq=False)
class ResidentTensor:
    """A tensor of a unit, the modules that use it, and its offset in its object."""

    shape: torch.Size
    dtype: torch.dtype
    users: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def put(self, memory: Tensor | None) -> None:
        """Sets the modules' tensor to the object's memory, or to NaN for None."""
        value = self.view(memory) if memory is not None else _absent(self.shape, self.dtype)
        for module, kind, name in self.users:
            if kind == "_parameters":
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[name] = value

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(eq=False)
class WeightObject:
    """Tensors that are loaded and evicted together."""

    name: str
    tensors: list[ResidentTensor]
    placed: ManagedTensor | None = None

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes, rounded up to whole pages."""
        return whole_pages(sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in self.tensors))


@dataclass(eq=False)
class WeightUnit:
    """A module and the objects that its forward uses."""

    path: str
    module: nn.Module
    objects: list[WeightObject]
    quantised: list[QuantizedLayer] = field(default_factory=list)


class StreamedWeights:
    """Weights of a model under a memory limit; those that exceed it are on a disk."""

    def __init__(
        self,
        units: Sequence[WeightUnit],
        fill: Callable[[WeightUnit], None],
        budget: int,
        disk: Path | str | None = None,
    ) -> None:
        self._units = list(units)
        objects = list({id(o): o for unit in units for o in unit.objects}.values())
        self.whole = sum(o.nbytes for o in objects)
        self.least = max(sum(o.nbytes for o in unit.objects) for unit in units)
        if budget < self.least:
            largest = max(units, key=lambda unit: sum(o.nbytes for o in unit.objects))
            raise GulliverError(
                f"{size_text(max(budget, 0))} of memory is left for weights, but {largest.path} "
                f"alone takes {size_text(self.least)}: raise memory_limit by "
                f"{size_text(self.least - budget)}, or use quantize="
            )
        given, most = disk_limit(disk)
        if most is not None and most < self.whole:
            raise GulliverError(f"disk={str(disk)!r} cannot fit {size_text(self.whole)} of weights")
        folder = disk_folder(given)
        self._sizes = [sum(o.nbytes for o in u.objects) for u in units]
        ahead, self._why = look_ahead(self._sizes, budget)
        store = DiskStore(folder, self.whole)
        self.manager = Manager(budget, "cpu", store, ahead=ahead * self.least)
        self.beside = self.peak = 0
        try:
            self._add(objects, fill)
        except BaseException:
            self.manager.close()
            raise
        self._hooks = [h for unit in self._units for h in self._hook(unit)]

    def _add(self, objects: Sequence[WeightObject], fill: Callable[[WeightUnit], None]) -> None:
        for one in objects:
            offset = 0
            for tensor in one.tensors:
                tensor.offset = offset
                offset += -(-tensor.nbytes // ALIGNED) * ALIGNED
            one.placed = self.manager.add(one.name, PARAMETERS, one.nbytes, torch.uint8)
        filled: set[int] = set()
        for unit in self._units:
            fresh = [o for o in unit.objects if id(o) not in filled]
            for one in unit.objects:
                memory = self.manager.use(_placed(one), write=True, fresh=one in fresh)
                for tensor in one.tensors:
                    tensor.put(memory)
            if fresh:
                fill(unit)
            filled |= {id(o) for o in fresh}
            self._leave(unit)
        self.manager.end_step()

    def _hook(self, unit: WeightUnit) -> Iterator[Any]:
        def enter(*_: object) -> None:
            for one in unit.objects:
                memory = self.manager.use(_placed(one))
                for tensor in one.tensors:
                    tensor.put(memory)
            self._moved(unit)
            self.peak = max(self.peak, self.manager.held + self.beside)

        def leave(*_: object) -> None:
            self._leave(unit)

        yield unit.module.register_forward_pre_hook(enter, prepend=True)
        yield unit.module.register_forward_hook(leave, always_call=True)

    def _leave(self, unit: WeightUnit) -> None:
        for one in unit.objects:
            for tensor in one.tensors:
                tensor.put(None)
        self._moved(unit)
        for one in unit.objects:
            self.manager.done(_placed(one))
        # Peak bytes over all uses so far, including keys and values.
        self.peak = max(self.peak, self.manager.held + self.beside)

    @staticmethod
    def _moved(unit: WeightUnit) -> None:
        for layer in unit.quantised:
            layer.moved()

    def set_budget(self, nbytes: int) -> None:
        """Assigns part of the memory to weights and the rest to the cache."""
        if nbytes < self.least:
            raise GulliverError(
                f"{size_text(max(nbytes, 0))} of memory is left for weights besides the KV cache, "
                f"but the largest layer takes {size_text(self.least)}: raise memory_limit by "
                f"{size_text(self.least - nbytes)}, or use a smaller cache or quantize="
            )
        ahead, self._why = look_ahead(self._sizes, nbytes)
        # Bytes of the initial budget that keys and values take.
        self.beside = self.manager.budget - nbytes
        self.manager.set_budget(nbytes, ahead * self.least)

    def end_step(self) -> None:
        self.manager.end_step()

    def __str__(self) -> str:
        return (
            f"{size_text(self.whole)} of weights in {size_text(self.manager.budget)}: {self._why}"
        )

    def close(self) -> None:
        """Frees memory and disk; afterwards the model's weights are NaN."""
        for hook in self._hooks:
            hook.remove()
        self.manager.close()


def unit_paths(model: nn.Module) -> list[str]:
    """Lists the paths of a model's blocks and the modules around them, in execution order."""
    from gulliver.parallel.pipeline.stack import stack_of, units_of

    stack = stack_of(model)
    around = units_of(model, stack)
    last = len(stack.blocks) - 1
    before = [unit.path for unit in around if unit.home != last or last == 0]
    after = [unit.path for unit in around if unit.path not in before]
    return [*before, *stack.blocks, *after]


def group_units(model: nn.Module, paths: Sequence[str]) -> list[WeightUnit]:
    """Groups tensors of modules; tensors shared by several modules are separate objects."""
    known = dict(model.named_modules(remove_duplicate=False))
    modules = [(path, known[path]) for path in paths]
    tensors: dict[int, ResidentTensor] = {}
    owners: dict[int, set[int]] = {}
    found: list[tuple[str, nn.Module, list[int], list[QuantizedLayer]]] = []
    for number, (path, module) in enumerate(modules):
        mine, quantised = [], []
        for inner in module.modules():
            if isinstance(inner, QuantizedLayer):
                quantised.append(inner)
            for kind, name, tensor in _tensors(inner):
                held = tensors.setdefault(id(tensor), ResidentTensor(tensor.shape, tensor.dtype))
                if (inner, kind, name) not in held.users:
                    held.users.append((inner, kind, name))
                owners.setdefault(id(tensor), set()).add(number)
                mine.append(id(tensor))
        if mine:
            found.append((path, module, list(dict.fromkeys(mine)), quantised))
    shared = {
        key: WeightObject("shared weights", [tensors[key]])
        for key in owners
        if len(owners[key]) > 1
    }
    made = []
    for path, module, keys, quantised in found:
        objects = [shared[key] for key in keys if key in shared]
        own = [tensors[key] for key in keys if key not in shared]
        if own:
            objects.append(WeightObject(path, own))
        made.append(WeightUnit(path, module, objects, quantised))
    inside = {id(inner) for _, module in modules for inner in module.modules()}
    for path, inner in model.named_modules():
        if id(inner) not in inside and any(True for _ in _tensors(inner)):
            raise GulliverError(
                f"{path or type(model).__name__} has weights outside the blocks and the modules "
                "around them, which cannot be streamed: omit memory_limit"
            )
    return made


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield "_parameters", name, parameter
    if isinstance(module, QuantizedLayer):
        for name in ("weight", "weight_scale"):
            value = module._buffers[name]
            assert value is not None
            yield "_buffers", name, value


def look_ahead(sizes: Sequence[int], budget: int) -> tuple[int, str]:
    """Returns how many layers to prefetch (0 or 1), and a line that describes the streaming."""
    # Prefetching overlaps with compute, but takes the memory of a layer that could stay. More than
    # one layer would take more memory without more overlap.
    whole, largest = sum(sizes), max(sizes)
    if whole <= budget:
        return 0, "all of them stay in memory"
    ahead = min(1, len(sizes) - 1, budget // largest - 1)
    moved = _streamed(sizes, budget - (1 + ahead) * largest)
    streamed = f"{size_text(moved)} of {size_text(whole)} come from the disk in each step"
    return ahead, f"{streamed}, {ahead} layers ahead"


def _streamed(sizes: Sequence[int], room: int) -> int:
    """Bytes of the units that do not fit into `room`."""
    kept = 0
    for size in sizes:
        kept += size if kept + size <= room else 0
    return sum(sizes) - kept


def disk_folder(given: Path | str | None) -> Path:
    folder = Path(tempfile.gettempdir() if given is None else given)
    check_disk_folder(folder)
    if given is None and file_system(folder) in IN_MEMORY:
        raise GulliverError(
            f"temporary files are in memory ({folder}): pass a folder on a local disk, disk=FOLDER"
        )
    return folder


def _absent(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns a tensor without memory: NaN, or zeros for integers, whose scales are NaN."""
    # If a model reads a weight outside of its unit's forward, its logits are NaN, which ends
    # requests with an error, never a wrong result.
    value = torch.zeros((), dtype=dtype)
    if dtype.is_floating_point:
        value.fill_(math.nan)
    return value.expand(shape)


def _placed(one: WeightObject) -> ManagedTensor:
    assert one.placed is not None
    return one.placed
