"""Chunks, their gradients, and the placeholder in ``parameter.grad`` for a reduced gradient.

If ``parameter.grad`` were None, `torch.nn.utils.clip_grad_norm_` would silently clip nothing, and
``model.zero_grad()`` could not be detected. So a placeholder has the gradient's shape and the
memory of one element. It reads as NaN, and rejects norms and in-place changes with an error
that names the alternative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import without_torch_functions
from gulliver.errors import GulliverError
from gulliver.memory.buffers import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    BufferPool,
    ChunkLayout,
    Moment,
    first_elements,
    moment_size,
)
from gulliver.memory.pending import INSTEAD, any_read_lock, before_write, mark_ready
from gulliver.memory.stores import ManagedTensor
from gulliver.precision.wire.formats import IDENTITY, WireFormat
from gulliver.precision.wire.packing import pack, unpack

ADVICE = (
    "gradients were reduced to the ranks' shards and are no longer in the parameters: use "
    "optimizer.clip_grad_by_norm, clip_grad_by_value, zero_grad, step and full_gradients of the "
    "optimizer that boost returned (accelerate, Trainer: accelerator.clip_grad_norm_, "
    "clip_grad_value_, and optimizer.full_gradients)"
)


class ReducedGradient(Tensor):
    """Placeholder of a gradient that was reduced to the ranks' shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        # Some functions are allowed, because torch.compile inspects gradients when it traces.
        if in_place or "norm" in name:
            raise GulliverError(ADVICE)
        return super().__torch_function__(func, types, args, kwargs or {})


def reduced_gradient(parameter: Tensor) -> ReducedGradient:
    nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape).as_subclass(ReducedGradient)


# The gradients of a chunk: accumulated in one flat buffer, which is then reduced.


# A parameter's first gradient is copied to its place in the buffer, which costs less than adding it
# to zeros; autograd adds later ones in place. When the buffer is reduced, `ReducedGradient`s
# replace the parameters' gradients. Ranks on one host need no buffer: they read each other's
# gradients where backward has put them (`direct`).
class ChunkGradients:
    """Accumulates the gradients of a chunk's parameters, and keeps the reduced gradient."""

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        pool: BufferPool,
        named_views: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        self.layout, self.parameters, self.pool = layout, parameters, pool
        self._members, self._named_views = list(parameters.values()), named_views
        first = self._members[0]
        self.dtype = self.reduced_dtype = first.dtype
        self._device, self._gaps = first.device, layout.gaps()
        self.buffer: Tensor | None = None
        # Whether gradients are reduced from where backward has put them, without a buffer.
        self.direct = False
        # Gradients of that kind that other ranks may still read.
        self.lent: list[Tensor] = []
        # Whether the memory of such gradients is counted.
        self._counted = False
        # Whether the collected gradients are evictable until they are reduced.
        self.parked = False
        # The buffer being filled, while it is evictable until more gradients arrive.
        self.resting: ManagedTensor | None = None
        # The collected gradients.
        self.placed: dict[str, Tensor] = {}
        # Parameters without a gradient when collection began.
        self.blank: frozenset[str] = frozenset()
        self._views: dict[str, Tensor] = {}
        self._stand_ins = [reduced_gradient(p) for p in self._members]

    def follow_shard(self, dtype: torch.dtype, in_place: bool = False) -> None:
        self.reduced_dtype = dtype

    # Collecting.

    @property
    def begun(self) -> bool:
        return bool(self._views) or (self.direct and bool(self.placed))

    def begin(self) -> None:
        if self.direct:
            self._count()
        else:
            if self.buffer is None:
                self.buffer = self._take_buffer()
            for start, end in self._gaps:
                self.buffer[start:end].zero_()  # padding is also reduced and measured
            self._views = self._named_views(self.buffer)
        self.placed = {}
        self.blank = frozenset(self.cleared_names())

    def _take_buffer(self) -> Tensor:
        return self.pool.take(self.layout.size, self.dtype, self._device, GRADIENTS)

    def rest(self) -> None:
        """Makes the buffer evictable until more gradients arrive."""

    def wake(self) -> None:
        """Loads a managed buffer, before gradients are added."""

    def park(self) -> None:
        """Makes the buffer evictable until it is reduced."""

    def fetch(self) -> None:
        """Loads a managed buffer, to reduce it."""

    def place(self, name: str) -> None:
        # Runs for every parameter in every backward, so it checks only what is necessary.
        parameter, placed = self.parameters[name], self.placed
        gradient = parameter.grad
        if self.direct:
            if gradient is None or placed.setdefault(name, gradient) is not gradient:
                raise _left(name)
            if gradient.is_sparse:
                parameter.grad = placed[name] = gradient.to_dense()
            return
        if name in placed and gradient is placed[name]:
            return
        if name in placed or gradient is None or gradient.requires_grad:
            raise _left(name)
        view = self._views[name]
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = placed[name] = view

    def complete(self) -> None:
        placed = self.placed
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if name in placed:
                if gradient is None or gradient is not placed[name] or gradient.requires_grad:
                    raise _left(name)
                if self.direct:
                    placed[name] = gradient.to(self.dtype).contiguous()
            elif gradient is None or type(gradient) is ReducedGradient:
                if not self.direct:
                    self._views[name].zero_()
            else:
                raise _left(name)

    def mark_reduced(self) -> None:
        for parameter, stand_in in zip(self._members, self._stand_ins, strict=True):
            parameter.grad = stand_in
        self._views = {}
        if not self.direct:
            self.placed = {}

    def take(self) -> Tensor:
        """Detaches and returns the buffer; the next gradient gets a new one."""
        assert self.buffer is not None
        buffer, self.buffer = self.buffer, None
        return buffer

    def lend(self) -> dict[str, Tensor]:
        """Returns the gradients, which other ranks read until `free`."""
        placed, self.placed = self.placed, {}
        self.lent = [*placed.values()]
        return placed

    def free(self) -> None:
        self.lent = []
        if self._counted:
            self._count(-1)
        if self.buffer is not None:
            self.give_reduced(self.take())

    def _count(self, sign: int = 1) -> None:
        self._counted = sign > 0
        self.pool.counter.add(GRADIENTS, sign * self.layout.size * self.dtype.itemsize)

    @property
    def collected(self) -> list[Tensor]:
        return [*self.placed.values(), *self.lent] if self.buffer is None else [self.buffer]

    # What users do to ``parameter.grad``.

    def clear(self) -> None:
        with without_torch_functions():
            for parameter in self._members:
                parameter.grad = None
        self._views, self.placed = {}, {}

    def cleared_names(self) -> list[str]:
        """Returns names of parameters without a gradient, as after ``model.zero_grad()``."""
        with without_torch_functions():
            return [name for name, p in self.parameters.items() if p.grad is None]

    def note_cleared(self, cleared: Sequence[str]) -> None:
        self.placed = {name: g for name, g in self.placed.items() if name not in cleared}
        self.blank = frozenset(cleared)

    def foreign_names(self) -> list[str]:
        with without_torch_functions():
            gradients = [p.grad for p in self._members]
        if all(map(is_, gradients, self._stand_ins)):
            return []
        return [
            name
            for name, gradient, stand_in in zip(
                self.parameters, gradients, self._stand_ins, strict=True
            )
            if gradient is not None
            and gradient is not stand_in
            and gradient is not self.placed.get(name)
        ]

    # The reduced gradient: a shard of the collected ones, or the buffer itself.

    def take_reduced(self) -> Tensor:
        return self.pool.take(self.layout.part_size, self.reduced_dtype, self._device, GRADIENTS)

    def give_reduced(self, gradient: Tensor) -> None:
        self.pool.give(gradient, GRADIENTS)

    def keep_reduced(self, gradient: Tensor) -> Tensor:
        """Keeps a reduced gradient; returns a tensor that represents it."""
        return gradient

    @contextmanager
    def reduced(self, kept: Tensor, write: bool = False) -> Iterator[Tensor]:
        yield kept

    @contextmanager
    def scaled(self, kept: Tensor, factor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Yields a kept gradient times a factor, and whether it was scaled in place."""
        yield kept.mul_(factor.to(kept.dtype)), True


def _left(name: str) -> GulliverError:
    return GulliverError(
        f"the gradient of {name!r} left its chunk: backward(create_graph=True) and setting "
        ".grad are not supported with ZeRO, use TorchDDPPlugin for them"
    )


# A chunk in memory: parameters, gradients and optimizer state are views of a few flat buffers.


_form = attrgetter("shape", "dtype")
_ALWAYS = nullcontext()


# [Note: the buffers of a chunk] All data of a chunk's parameters is in buffers that the chunk owns
# by name, so that it can be counted and moved as a unit:
#
# - ``parameter``: the full chunk, which may be freed and gathered again.
# - `master_shard`: this rank's shard of the parameters, which the optimizer steps. A view of the
#   parameter buffer if nothing is sharded and there are no float32 master weights.
# - `gradients`: see `ChunkGradients`.
# - one for each moment of an element-wise optimizer, such as ``exp_avg``, by the optimizer's key.
#   The optimizer creates its state in its first step; the tensors are then moved here once, and the
#   optimizer continues with views of the same values.
#
# Without the parameter buffer, every parameter is one expanded NaN. A buffer is not emptied while a
# graph refers to it; it is freed with its last reference.
class Chunk:
    """Parameters of one dtype and device in one buffer, which is sharded over ranks."""

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        part: int,
        pool: BufferPool | None = None,
        read: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self.layout, self.part, self.pool = layout, part, pool or BufferPool()
        self.parameters = {slot.name: parameters[slot.name] for slot in layout.slots}
        self.members = list(self.parameters.values())
        first = self.members[0]
        self.dtype, self.device = first.dtype, first.device
        whole = self.pool.take(layout.size, self.dtype, self.device, PARAMETERS)
        self.buffer: Tensor | None = whole
        self.master_shard = self.shard
        self._separate = False
        # Wire format of the parameters; `master_shard` keeps the full precision.
        self.wire = IDENTITY
        # This rank's part as all ranks have it, if they received it in changes.
        self.shown_part: Tensor | None = None
        # Whether the last gather sent exact, unpacked values.
        self.sent_exact = False
        self._seen: list[int] = []
        self.moments: dict[str, Moment] = {}
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self._cuts = _Cuts(layout, self.shapes)
        for start, end in layout.gaps():
            whole[start:end].zero_()
        views = self.named_views(whole)
        for name, parameter in self.parameters.items():
            views[name].copy_(read(parameter))
            mark_ready([parameter])
            parameter.data = views[name]
            parameter.grad = None  # an earlier one is outside of the chunk
        self._forms = [_form(p) for p in self.members]
        for name, parameter in self.parameters.items():
            vars(parameter)["_chunk_name"] = name  # for tensors whose memory cannot be replaced
        self.gradients = self._make_gradients()
        self._absent = [_one_nan(p) for p in self.members]
        self._nowhere = [nan.data_ptr() for nan in self._absent]
        self._addresses = [view.data_ptr() for view in views.values()]

    def _make_gradients(self) -> ChunkGradients:
        return ChunkGradients(self.layout, self.parameters, self.pool, self._cuts.views)

    @property
    def data(self) -> Tensor:
        assert self.buffer is not None, "the chunk has been released"
        return self.buffer

    @property
    def nbytes(self) -> int:
        return self.layout.size * self.dtype.itemsize

    @property
    def has_master(self) -> bool:
        return self.master_shard.dtype != self.dtype

    @property
    def shard(self) -> Tensor:
        size = self.layout.part_size
        return self.data[self.part * size : (self.part + 1) * size]

    def set_master_shard(self, dtype: torch.dtype, separate: bool) -> None:
        """Creates the master shard: a view of the buffer, or a separate tensor."""
        self._separate = separate or dtype != self.dtype
        self.master_shard = self.shard.to(dtype, copy=True) if self._separate else self.shard
        if self._separate:
            self._count_master(self.master_shard.nbytes)
        self.gradients.follow_shard(dtype)

    def pack_parameters(self, wire: WireFormat, kept: bool) -> None:
        """Sets the wire format of parameters; if the buffer is `kept`, only changes are sent."""
        self.wire = wire
        if kept:
            self.shown_part = self.shard.clone()
            self.pool.counter.add(PARAMETERS, self.shown_part.nbytes)

    def change(self) -> Tensor:
        return self.master_shard - self.shard.to(self.master_shard.dtype)

    def note_gathered(self) -> None:
        """Records that all ranks have gathered the current value of this rank's shard."""
        if self.shown_part is not None:
            self.shown_part.copy_(self.shard)

    def widen_master_shard(self, dtype: torch.dtype) -> None:
        self._count_master(-self.master_shard.nbytes)
        self.master_shard = self.master_shard.to(dtype)
        self._count_master(self.master_shard.nbytes)
        self.gradients.follow_shard(dtype)

    def _count_master(self, nbytes: int) -> None:
        self.pool.counter.add(OPTIMIZER_STATE if self.has_master else PARAMETERS, nbytes)

    def opened(self, write: bool = False, moments: bool = False) -> AbstractContextManager[None]:
        """Context in which the master shard, and with `moments` all state, is in memory."""
        return _ALWAYS

    def shown(self, fill: bool = False) -> AbstractContextManager[None]:
        """Context in which shard and optimizer state are readable, or writable with `fill`."""
        return _ALWAYS

    @property
    def master_is_view(self) -> bool:
        return not self._separate and self.buffer is not None

    def publish(self) -> None:
        if not self.master_is_view:
            self.shard.copy_(self.master_shard)

    def release(self, viewed: bool = False, keeps: bool = False) -> None:
        """Frees the full buffer; with `keeps`, views of it stay valid."""
        with without_torch_functions():
            for parameter, nan in zip(self.members, self._absent, strict=True):
                parameter.data = nan
        buffer, self.buffer, self._addresses = self.buffer, None, self._nowhere
        if buffer is not None:
            self._give_buffer(buffer, viewed, keeps)

    def _give_buffer(self, buffer: Tensor, viewed: bool = False, keeps: bool = False) -> None:
        self.pool.give(buffer, PARAMETERS)

    def _take_buffer(self) -> Tensor:
        return self.pool.take(self.layout.size, self.dtype, self.device, PARAMETERS)

    def materialise(self) -> None:
        """Allocates the full buffer; only this rank's shard is filled."""
        self.buffer = self._take_buffer()
        views = self.named_views(self.buffer).values()
        with without_torch_functions():
            for parameter, view in zip(self.members, views, strict=True):
                parameter.data = view
        self._addresses = list(map(Tensor.data_ptr, views))
        self.publish()
        self._seen = self.versions() if self._watches_versions else []

    def discard(self) -> None:
        """Counts the buffers as freed; called when another chunk replaces this one."""
        if self.buffer is not None:
            self.pool.counter.add(PARAMETERS, -self.nbytes)
        if self._separate:
            self._count_master(-self.master_shard.nbytes)
        if self.shown_part is not None:
            self.pool.counter.add(PARAMETERS, -self.shown_part.nbytes)
        self.gradients.free()
        self.drop_moments()

    def take_writes(self) -> None:
        """Copies values that the user wrote to parameters, equal on all ranks, to the shard."""
        # Values are compared, because a write through ``.data`` does not increment version
        # counters. If `master_shard` is a view, nothing is compared.
        if not self.master_is_view and self.may_be_written():
            self.merge(self.master_shard, self.shard, self._as_sent())
            self.note_gathered()

    @property
    def _watches_versions(self) -> bool:
        """Whether version counters detect writes; they are cheaper than compressing again."""
        return self.wire is not IDENTITY and self.shown_part is None

    def versions(self) -> list[int]:
        with without_torch_functions():
            return [parameter._version for parameter in self.members]

    def may_be_written(self) -> bool:
        return not self._watches_versions or self.versions() != self._seen

    def _as_sent(self) -> Tensor | None:
        """Returns this rank's shard as other ranks received it; None if packing is exact."""
        if self.shown_part is not None or self.wire is IDENTITY or self.sent_exact:
            return self.shown_part
        rounded = self.master_shard.to(self.dtype)
        return unpack(pack(rounded, self.wire), self.wire, rounded.numel(), self.dtype)

    def merge(self, master: Tensor, values: Tensor, rounded: Tensor | None = None) -> None:
        """Copies to `master` the elements of `values` that differ from `rounded`."""
        rounded = master.to(values.dtype) if rounded is None else rounded
        # On a device, a comparison would synchronize; writing equal values again costs less.
        if (self.device.type == "cpu" or any_read_lock()) and torch.equal(rounded, values):
            return
        before_write([self.master_shard])
        master.copy_(torch.where(rounded == values, master, values.to(master.dtype)))

    # Optimizer state.

    def place_moment(
        self, key: str, values: Mapping[str, Tensor], sizes: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Moves one kind of optimizer state into a buffer of this chunk; returns its views."""
        dtype = next(iter(values.values())).dtype
        old = self.moments.get(key)
        if old is not None and old.starts.keys() >= sizes.keys() and old.buffer.dtype == dtype:
            return {name: old.filled(name, value) for name, value in values.items()}
        moment = self._take_moment(key, sizes, dtype)
        # A torch optimizer keeps its state of other parameters meanwhile.
        found = {name: moment.filled(name, value) for name, value in values.items()}
        if old is not None:
            self._give_moment(old)
        self.moments[key] = moment
        return found

    def _take_moment(self, key: str, sizes: Mapping[str, int], dtype: torch.dtype) -> Moment:
        size = moment_size(sizes.values())
        self.pool.counter.add(OPTIMIZER_STATE, size * dtype.itemsize)
        return Moment(torch.empty(size, dtype=dtype, device=self.device), first_elements(sizes))

    def _give_moment(self, moment: Moment) -> None:
        self.pool.counter.add(OPTIMIZER_STATE, -moment.buffer.nbytes)

    def drop_moments(self) -> None:
        for moment in self.moments.values():
            self._give_moment(moment)
        self.moments = {}

    def check_parameters(self) -> None:
        with without_torch_functions():
            addresses = list(map(Tensor.data_ptr, self.members))
            forms = list(map(_form, self.members))
        if addresses == self._addresses and forms == self._forms:
            return
        known = zip(self._addresses, self._forms, addresses, forms, strict=True)
        for name, (address, form, address_now, form_now) in zip(
            self.parameters, known, strict=True
        ):
            device = self.parameters[name].device
            if form == form_now and device == self.device and address != address_now:
                raise GulliverError(
                    f"parameter {name!r} got new memory (p.data = ...) after boost; {INSTEAD}"
                )
            if (address, form) != (address_now, form_now):
                raise GulliverError(
                    f"parameter {name!r} was moved, converted or reshaped after boost "
                    f"({tuple(form[0])} {form[1]} on {self.device} then, {tuple(form_now[0])} "
                    f"{form_now[1]} on {device} now); make such changes before boost"
                )

    def named_views(self, buffer: Tensor) -> dict[str, Tensor]:
        return self._cuts.views(buffer)


class _Cuts:
    def __init__(self, layout: ChunkLayout, shapes: Mapping[str, torch.Size]) -> None:
        self._sizes = layout.cuts()
        runs = {slot.name: number for number, slot in enumerate(layout.by_address)}
        self._shaped = [(n, None if len(s) == 1 else s, runs[n]) for n, s in shapes.items()]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        # A single torch call, because this runs for every chunk in every step.
        runs = buffer.split_with_sizes(self._sizes)[1::2]
        return {
            name: runs[number] if shape is None else runs[number].view(shape)
            for name, shape, number in self._shaped
        }


def _one_nan(parameter: Tensor) -> Tensor:
    # Created in inference mode, it would turn the parameter that it represents into an inference
    # tensor.
    with torch.inference_mode(False):
        nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)
