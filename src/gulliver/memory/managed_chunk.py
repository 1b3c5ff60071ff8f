"""A chunk whose bytes a `Manager` moves between memory tiers.

The parameter shard, each moment and the reduced gradient are managed tensors; the manager also
allocates temporary full buffers. While a tensor is in another tier, a meta tensor represents it,
so that its content cannot be read by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gulliver._compat import without_torch_functions
from gulliver.errors import GulliverError
from gulliver.memory.buffers import (
    GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    BufferPool,
    ByteCounter,
    ChunkLayout,
    Moment,
    first_elements,
    moment_size,
)
from gulliver.memory.chunk import Chunk, ChunkGradients, ReducedGradient
from gulliver.memory.manager import Manager
from gulliver.memory.pending import before_write
from gulliver.memory.stores import ManagedTensor


# [Note: in place] If nothing is sharded and there are no master weights, the parameter buffer is
# the shard itself, held while it is in use, so there is no second copy. Likewise, gradients are
# collected in the managed tensor of the reduced gradient.
#
# [Note: writes to parameters] Without a second copy to compare with, a write to a loaded parameter
# is detected by its version counter. Between passes ``weight.data`` shares it (see `Gatherer`);
# inside a forward, a write through ``.data`` is not detected.
#
# [Note: copies] If ranks have unequal work, none can wait for another to use a chunk. So during
# such a step, a full copy of the parameters is another managed tensor, which serves as the buffer
# and is held while it is in use.
class ManagedBufferPool(BufferPool):
    """Allocates flat buffers from a manager, within its budget."""

    def __init__(self, manager: Manager) -> None:
        super().__init__()
        self.manager = manager
        self.counter: ByteCounter = manager.counter

    def take(self, size: int, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
        return self.manager.allocate_buffer(size, dtype, kind)

    def give(self, buffer: Tensor, kind: str, keeps: bool = False) -> None:
        self.manager.free_buffer(buffer, kind, keeps)


@dataclass(eq=False)
class ManagedMoment(Moment):
    """Optimizer state in a managed tensor."""

    managed: ManagedTensor


class ManagedGradients(ChunkGradients):
    """Gradients of a chunk in managed tensors."""

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        pool: ManagedBufferPool,
        named_views: Callable[[Tensor], dict[str, Tensor]],
    ) -> None:
        super().__init__(layout, parameters, pool, named_views)
        self._manager = pool.manager
        self._in_place = False
        # The reduced gradient, while it is computed.
        self._filled: Tensor | None = None
        self._kept = False

    # Frozen parameters have no gradients, so managed tensors are created on first use.

    @cached_property
    def _reduced(self) -> ManagedTensor:
        name = f"gradients from {self.layout.slots[0].name}"
        return self._manager.add(name, GRADIENTS, self.layout.part_size, self.reduced_dtype)

    @cached_property
    def _whole(self) -> ManagedTensor:
        """Full gradients, used unless they share the gradient shard's memory."""
        name = f"gradients of this rank from {self.layout.slots[0].name}"
        return self._manager.add(name, GRADIENTS, self.layout.size, self.dtype, brief=True)

    def follow_shard(self, dtype: torch.dtype, in_place: bool = False) -> None:
        super().follow_shard(dtype)
        self._in_place = in_place

    def discard(self) -> None:
        self.free()
        for made in {"_reduced", "_whole"} & vars(self).keys():
            self._manager.remove(vars(self).pop(made))

    def _take_buffer(self) -> Tensor:
        if self._in_place and not self._kept:
            return self._fill()
        return self._manager.use(self._whole, fresh=True)

    def rest(self) -> None:
        """Makes gradients evictable until more arrive; no reduction may be in flight."""
        if not self.begun:
            return
        assert self.buffer is not None, "something is being collected"
        filled = self.buffer is self._filled
        self.resting = self._reduced if filled else self._whole
        with without_torch_functions():
            for parameter, name, stand_in in zip(
                self._members, self.parameters, self._stand_ins, strict=True
            ):
                if name in self.placed and parameter.grad is self.placed[name]:
                    parameter.grad = stand_in  # nothing may refer to evicted memory
        self.placed = dict.fromkeys(self.placed, self._stand_ins[0])
        self._views = {}
        self.buffer = _on_meta(self.resting)
        self._filled = self.buffer if filled else self._filled
        self._manager.done(self.resting)

    def wake(self) -> None:
        if self.resting is None:
            return
        buffer = self._manager.use(self.resting, write=True)
        self._filled = buffer if self.buffer is self._filled else self._filled
        self.buffer, self.resting = buffer, None
        self._views = self._named_views(buffer)
        with without_torch_functions():
            for parameter, name in zip(self._members, self.parameters, strict=True):
                if name in self.placed and type(parameter.grad) is ReducedGradient:
                    parameter.grad = self.placed[name] = self._views[name]

    def park(self) -> None:
        self.buffer, self.parked = _on_meta(self._whole), True
        self._manager.done(self._whole)

    def fetch(self) -> None:
        if self.parked:
            self.buffer, self.parked = self._manager.use(self._whole, write=True), False

    def free(self) -> None:
        if self.resting is not None:
            managed, self.resting, self.buffer = self.resting, None, None
            self._manager.discard(managed)
            if managed is self._reduced:
                self._filled, self._kept = None, False
        elif self._in_place:
            super().free()
        elif self.buffer is not None:
            if not self.parked:
                self._manager.done(self._whole)
            self._manager.discard(self._whole)
            self.buffer, self.parked = None, False

    def take_reduced(self) -> Tensor:
        return super().take_reduced() if self._kept else self._fill()

    def _fill(self) -> Tensor:
        self._kept = True
        self._filled = self._manager.use(self._reduced, fresh=True)
        return self._filled

    def keep_reduced(self, gradient: Tensor) -> Tensor:
        assert gradient is self._filled, "the first gradient is made in its object"
        self._filled = None
        self._manager.done(self._reduced)
        return _on_meta(self._reduced)

    @contextmanager
    def reduced(self, kept: Tensor, write: bool = False) -> Iterator[Tensor]:
        with self._manager.using(self._reduced, write) as gradient:
            yield gradient

    @contextmanager
    def scaled(self, kept: Tensor, factor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        # In place only if the store has no copy; a copy there stays unscaled and is used later.
        behind = self._reduced.offset is not None
        try:
            with self._manager.using(self._reduced, write=not behind) as gradient:
                yield gradient.mul_(factor.to(gradient.dtype)), not behind
        finally:
            if behind:
                self._manager.revert(self._reduced)

    def give_reduced(self, gradient: Tensor) -> None:
        if "_whole" in vars(self) and gradient is self._whole.tensor:
            self._manager.done(self._whole)
            self._manager.discard(self._whole)
            return
        if gradient is not self._filled and not gradient.is_meta:
            self.pool.give(gradient, GRADIENTS)
            return
        if self._filled is not None:
            self.keep_reduced(gradient)
        self._manager.discard(self._reduced)
        self._kept = False


class ManagedChunk(Chunk):
    """A chunk whose shard, moments and reduced gradient are managed tensors."""

    moments: dict[str, ManagedMoment]  # type: ignore[assignment]
    gradients: ManagedGradients

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        part: int,
        pool: ManagedBufferPool,
        read: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._manager = pool.manager
        self._in_place = False
        self._stack: ExitStack | None = None
        self._leaving: list[ManagedTensor] = []
        self.has_copy = False
        self._managed_pool = pool
        super().__init__(layout, parameters, part, pool, read)

    def _make_gradients(self) -> ManagedGradients:
        return ManagedGradients(self.layout, self.parameters, self._managed_pool, self._cuts.views)

    # The shard of the parameters.

    def set_master_shard(self, dtype: torch.dtype, separate: bool) -> None:
        self._separate = True
        self._place_master(dtype, self.shard)
        self.release()
        self._in_place = self.layout.parts == 1 and dtype == self.dtype
        self.gradients.follow_shard(dtype, self._in_place)

    def _place_master(self, dtype: torch.dtype, values: Tensor) -> None:
        name, size = self.layout.slots[0].name, self.layout.part_size
        kind = PARAMETERS if dtype == self.dtype else OPTIMIZER_STATE
        self._shard = self._manager.add(f"parameters from {name}", kind, size, dtype)
        with self._manager.using(self._shard, fresh=True) as master:
            master.copy_(values)
        self.master_shard = self._elsewhere = _on_meta(self._shard)

    def widen_master_shard(self, dtype: torch.dtype) -> None:
        narrow = self._shard
        if dtype == narrow.dtype:
            return
        with self._manager.using(narrow) as values:
            self._place_master(dtype, values)
        self._manager.remove(narrow)
        self._in_place = False
        self.gradients.follow_shard(dtype)

    def _take_buffer(self) -> Tensor:
        if self.has_copy:
            return self._manager.use(self._copy)
        if not self._in_place:
            return super()._take_buffer()
        self.master_shard = self._manager.use(self._shard)
        before_write([self.master_shard])  # parameters may be written without notice
        return self.master_shard

    def _give_buffer(self, buffer: Tensor, viewed: bool = False, keeps: bool = False) -> None:
        if not self.has_copy and not self._in_place:
            self._managed_pool.give(buffer, PARAMETERS, keeps)
            return
        placed = self._copy if self.has_copy else self._shard
        self.master_shard = self.master_shard if self.has_copy else self._elsewhere
        placed.viewed, placed.given = placed.viewed or viewed, placed.given or keeps
        self._manager.done(placed)

    def publish(self) -> None:
        if not self._in_place and not self.has_copy:
            with self.opened():
                self.shard.copy_(self.master_shard)

    @property
    def _watches_versions(self) -> bool:
        return True

    def take_writes(self) -> None:
        if not self.may_be_written():
            return
        self._seen = self.versions()
        if self.has_copy:
            self._refuse_write()
        with self.opened(write=True):  # which marks tensors in place as written
            if not self._in_place:
                self.merge(self.master_shard, self.shard, self._as_sent())

    @contextmanager
    def opened(self, write: bool = False, moments: bool = False) -> Iterator[None]:
        before, outer = self.master_shard, self._stack
        try:
            with ExitStack() as self._stack:
                self.master_shard = self._stack.enter_context(
                    self._manager.using(self._shard, write)
                )
                for moment in self.moments.values() if moments else ():
                    moment.buffer = self._stack.enter_context(
                        self._manager.using(moment.managed, write)
                    )
                yield
        finally:
            self._stack = outer
            self._set(before, moments)
            for placed in self._leaving:
                self._manager.remove(placed)
            self._leaving = []

    @contextmanager
    def shown(self, fill: bool = False) -> Iterator[None]:
        before = self.master_shard
        try:
            self.master_shard = self._manager.view(self._shard, write=fill)
            for moment in self.moments.values():
                moment.buffer = self._manager.view(moment.managed, write=fill)
            yield
        finally:
            self._set(before, True)

    def _set(self, master: Tensor, moments: bool) -> None:
        self.master_shard = master
        for moment in self.moments.values() if moments else ():
            moment.buffer = _on_meta(moment.managed)

    def discard(self) -> None:
        if self.buffer is not None:
            self._give_buffer(self.buffer)
            self.buffer = None
        self.gradients.discard()
        self.drop_moments()
        self._manager.remove(self._shard)
        if "_copy" in vars(self):
            self._manager.remove(self._copy)
            del self._copy

    # A full copy of the parameters, for steps in which other ranks do not take part.

    @cached_property
    def _copy(self) -> ManagedTensor:
        name = f"copy of parameters from {self.layout.slots[0].name}"
        return self._manager.add(name, PARAMETERS, self.layout.size, self.dtype, brief=True)

    @contextmanager
    def making_copy(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields a full copy of the parameters to fill; this rank's part of it is filled."""
        with self._manager.using(self._copy, fresh=True) as whole:
            size = self.layout.part_size
            part = whole[self.part * size : (self.part + 1) * size]
            with self.opened():
                part.copy_(self.master_shard)
            yield whole, part
        self.has_copy = True

    def end_copy(self) -> None:
        self.has_copy = False
        self._manager.discard(self._copy)

    def _refuse_write(self) -> None:
        raise GulliverError(
            f"a parameter of the chunk of {self.layout.slots[0].name!r} was written inside a step "
            "with unequal work per rank: under a memory limit, write parameters on all ranks, "
            "before the step's loop or after optimizer.step()"
        )

    # Optimizer state.

    def _take_moment(self, key: str, sizes: Mapping[str, int], dtype: torch.dtype) -> ManagedMoment:
        assert self._stack is not None, "state is placed while the chunk is open"
        size, name = moment_size(sizes.values()), self.layout.slots[0].name
        placed = self._manager.add(f"{key} from {name}", OPTIMIZER_STATE, size, dtype)
        buffer = self._stack.enter_context(self._manager.using(placed, fresh=True))
        return ManagedMoment(buffer, first_elements(sizes), placed)

    def _give_moment(self, moment: Moment) -> None:
        assert isinstance(moment, ManagedMoment)
        if self._stack is not None:
            self._leaving.append(moment.managed)  # it is in use until the chunk is closed
        else:
            self._manager.remove(moment.managed)


def _on_meta(placed: ManagedTensor) -> Tensor:
    return torch.empty(placed.numel, dtype=placed.dtype, device="meta")
