"""A chunk whose bytes a `Manager` moves between tiers of memory.

The shard of the parameters, every moment and the reduced gradient are objects of the manager; whole
buffers that come and go are lent by it. While an object is elsewhere, a tensor on meta stands for
it: dtype and size can be asked for, the content cannot be read by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gulliver._compat import without_torch_functions
from gulliver.errors import GulliverError
from gulliver.memory._buffers import BufferPool
from gulliver.memory._bytes import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, ByteCounter
from gulliver.memory._chunk import Chunk
from gulliver.memory._layout import ChunkLayout
from gulliver.memory._manager import Manager
from gulliver.memory._moments import Moment, first_elements, moment_size
from gulliver.memory._placed import Placed
from gulliver.memory._read_locks import before_write
from gulliver.memory._reduced import ReducedGradient
from gulliver.memory._sums import column_sums


# [Note: in place] Where nothing is sharded and no wider copy is kept, the parameter buffer is the
# shard itself, pinned while it is in use: there is no second copy, and what is trained takes what
# the optimizer needs and no more. The same holds for the gradient: it is collected in the object.
#
# [Note: writes to parameters] A user may write to a parameter while it is here, as in
# ``weight.data.clamp_()``. Nothing tells (see `Chunk.take_writes`), and there is no second copy to
# compare with. So the sum of every column of the buffer, seen as rows of 64-bit words, is taken
# when it comes and when it goes. The number of columns is prime: rows that change places are
# noticed too. What has changed already since it was last written behind is not summed: it will be
# written anyway.
#
# [Note: copies] Where ranks do unequal work, none can wait for another to use a chunk. So for the
# length of such a step a whole copy of the parameters is an object of the manager, too, and the
# buffer is that object, pinned while it is in use.
#
# It does not know when any of that happens, nor what an optimizer is.
class LentBuffers(BufferPool):
    """Lends flat buffers of a manager, which makes room for them and counts them."""

    def __init__(self, manager: Manager) -> None:
        super().__init__(0)
        self.manager = manager
        self.counter: ByteCounter = manager.counter

    def take(self, size: int, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
        """A buffer of `size` elements with any content, counted as of a kind."""
        return self.manager.lend(size, dtype, kind)

    def give(self, buffer: Tensor, kind: str) -> None:
        """Gives a buffer back."""
        self.manager.give(buffer, kind)


@dataclass(eq=False)
class PlacedMoment(Moment):
    """A buffer of state that is an object of a manager."""

    placed: Placed


class PlacedChunk(Chunk):
    """A chunk whose shard, moments and reduced gradient are objects of a manager."""

    moments: dict[str, PlacedMoment]  # type: ignore[assignment]

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        part: int,
        pool: LentBuffers,
    ) -> None:
        self._manager = pool.manager
        self._in_place = False
        self._stack: ExitStack | None = None
        self._leaving: list[Placed] = []
        self._filled: Tensor | None = None  # the reduced gradient, while it is being made
        self._kept = False
        self._copy_sums: Tensor | None = None
        self.has_copy = False
        super().__init__(layout, parameters, part, pool)

    # The shard of the parameters.

    def settle_home(self, dtype: torch.dtype, separate: bool, trained: bool = True) -> None:
        """Makes `home` an object of the manager."""
        self._separate = True
        self._place_home(dtype, self.shard)
        self.release()
        self._in_place = self.layout.parts == 1 and dtype == self.dtype

    def _place_home(self, dtype: torch.dtype, values: Tensor) -> None:
        name, size = self.layout.slots[0].name, self.layout.part_size
        kind = PARAMETERS if dtype == self.dtype else OPTIMIZER_STATE
        self._shard = self._manager.add(f"parameters from {name}", kind, size, dtype)
        with self._manager.using(self._shard, fresh=True) as home:
            home.copy_(values)
        self.home = self._elsewhere = _on_meta(self._shard)

    def widen_home(self, dtype: torch.dtype) -> None:
        """Keeps `home` in another dtype from here on."""
        narrow = self._shard
        if dtype == narrow.dtype:
            return
        with self._manager.using(narrow) as values:
            self._place_home(dtype, values)
        self._manager.remove(narrow)
        self._in_place, self._sums = False, None

    def _take_buffer(self) -> Tensor:
        if self.has_copy:
            return self._manager.use(self._copy)
        if not self._in_place:
            return super()._take_buffer()
        self.home = self._manager.use(self._shard)
        before_write([self.home])  # parameters may be written without asking
        return self.home

    def _give_buffer(self, buffer: Tensor, viewed: bool = False) -> None:
        if not self.has_copy and not self._in_place:
            super()._give_buffer(buffer)
            return
        placed = self._copy if self.has_copy else self._shard
        self.home = self.home if self.has_copy else self._elsewhere
        placed.viewed = placed.viewed or viewed
        self._manager.done(placed)

    def publish(self) -> None:
        """Writes `home` to this rank's part of the buffer."""
        if self.has_copy:
            if self._copy_sums is None:
                self._copy_sums = column_sums(self.data)
            return
        if not self._in_place:
            with self.opened():
                self.shard.copy_(self.home)
        if self._in_place and self._is_written():
            self._sums = None
        elif self._sums is None:
            self._sums = column_sums(self.shard)

    def _is_written(self) -> bool:
        """Whether the shard's content lies in the fast tier only."""
        return self._shard.offset is None

    def take_writes(self) -> None:
        """Brings what the user has written to parameters, on every rank alike, to `home`."""
        if self.has_copy:
            before, self._copy_sums = self._copy_sums, column_sums(self.data)
            if before is not None and not torch.equal(before, self._copy_sums):
                self.refuse_write()
            return
        if self._sums is None or torch.equal(self._sums, column_sums(self.shard)):
            return
        with self.opened(write=True):
            if self._in_place:
                self.writes += 1
            else:
                self.merge(self.home, self.shard, self._as_sent())

    @contextmanager
    def opened(self, write: bool = False, moments: bool = False) -> Iterator[None]:
        """Brings `home`, and with `moments` all state, into the fast tier for a block."""
        before, outer = self.home, self._stack
        try:
            with ExitStack() as self._stack:
                self.home = self._stack.enter_context(self._manager.using(self._shard, write))
                for moment in self.moments.values() if moments else ():
                    moment.buffer = self._stack.enter_context(
                        self._manager.using(moment.placed, write)
                    )
                yield
        finally:
            self._stack = outer
            self._set(before, moments)
            if write:
                self._sums = None
            for placed in self._leaving:
                self._manager.remove(placed)
            self._leaving = []

    @contextmanager
    def shown(self, fill: bool = False) -> Iterator[None]:
        """Shows `home` and all state wherever they lie, without moving them, for a block."""
        before = self.home
        if fill:
            self._sums = None
        try:
            self.home = self._manager.view(self._shard, write=fill)
            for moment in self.moments.values():
                moment.buffer = self._manager.view(moment.placed, write=fill)
            yield
        finally:
            self._set(before, True)

    def _set(self, home: Tensor, moments: bool) -> None:
        """Lets go of what was shown."""
        self.home = home
        for moment in self.moments.values() if moments else ():
            moment.buffer = _on_meta(moment.placed)

    def discard(self) -> None:
        """Gives everything up: its parameters have another chunk."""
        if self.buffer is not None:
            self._give_buffer(self.buffer)
            self.buffer = None
        self.free_gradient()
        self.drop_moments()
        self._manager.remove(self._shard)
        for made in {"_gradient", "_whole", "_copy"} & vars(self).keys():
            self._manager.remove(vars(self).pop(made))

    # A whole copy of the parameters, as long as no other rank takes part.

    @cached_property
    def _copy(self) -> Placed:
        name = f"copy of parameters from {self.layout.slots[0].name}"
        return self._manager.add(name, PARAMETERS, self.layout.size, self.dtype, brief=True)

    @contextmanager
    def making_copy(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Block in which the copy is to be filled: all of it, and this rank's part, which is."""
        with self._manager.using(self._copy, fresh=True) as whole:
            size = self.layout.part_size
            part = whole[self.part * size : (self.part + 1) * size]
            with self.opened():
                part.copy_(self.home)
            yield whole, part
        self.has_copy, self._copy_sums = True, None

    def end_copy(self) -> None:
        """Forgets the copy: from here on a buffer is gathered."""
        self.has_copy = False
        self._manager.discard(self._copy)

    def copied(self) -> Tensor:
        """A tensor of its own with what the copy has."""
        with self._manager.using(self._copy) as whole:
            return whole.clone()

    def refuse_write(self) -> None:
        """Says that parameters cannot be written now."""
        raise GulliverError(
            f"a parameter of the chunk of {self.layout.slots[0].name!r} was written inside a step "
            "whose ranks have unequal work: under a memory limit write parameters on all ranks, "
            "before the loop over the step or after optimizer.step()"
        )

    # Optimizer state.

    def _take_moment(self, key: str, sizes: Mapping[str, int], dtype: torch.dtype) -> PlacedMoment:
        assert self._stack is not None, "state is placed while the chunk is open"
        size, name = moment_size(sizes.values()), self.layout.slots[0].name
        placed = self._manager.add(f"{key} from {name}", OPTIMIZER_STATE, size, dtype)
        buffer = self._stack.enter_context(self._manager.using(placed, fresh=True))
        return PlacedMoment(buffer, first_elements(sizes), placed)

    def _give_moment(self, moment: Moment) -> None:
        assert isinstance(moment, PlacedMoment)
        if self._stack is not None:
            self._leaving.append(moment.placed)  # it is in use until the chunk is closed
        else:
            self._manager.remove(moment.placed)

    # Gradients. Frozen parameters have none, so their objects are made when they are wanted first.

    @cached_property
    def _gradient(self) -> Placed:
        """The shard of the reduced gradient."""
        shard, first = self._shard, self.layout.slots[0].name
        return self._manager.add(f"gradients from {first}", GRADIENTS, shard.numel, shard.dtype)

    @cached_property
    def _whole(self) -> Placed:
        """What this rank collects beside it."""
        name = f"gradients of this rank from {self.layout.slots[0].name}"
        return self._manager.add(name, GRADIENTS, self.layout.size, self.dtype, brief=True)

    def _take_gradient_buffer(self) -> Tensor:
        if self._in_place and not self._kept:
            return self._fill()
        return self._manager.use(self._whole, fresh=True)

    def rest_gradient(self) -> None:
        """Lets what is being collected leave until more comes; what is on its way stays."""
        if not self.gradient_begun:
            return
        assert self.gradient is not None, "something is being collected"
        filled = self.gradient is self._filled
        self.resting = self._gradient if filled else self._whole
        with without_torch_functions():
            for parameter, name, stand_in in zip(
                self.members, self.parameters, self._reduced, strict=True
            ):
                if name in self.placed and parameter.grad is self._gradient_views[name]:
                    parameter.grad = stand_in  # nobody looks at its memory
        self._gradient_views = {}
        self.gradient = _on_meta(self.resting)
        self._filled = self.gradient if filled else self._filled
        self._manager.done(self.resting)

    def wake_gradient(self) -> None:
        """Brings it back, for more to be added."""
        if self.resting is None:
            return
        buffer = self._manager.use(self.resting, write=True)
        self._filled = buffer if self.gradient is self._filled else self._filled
        self.gradient, self.resting = buffer, None
        self._gradient_views = self.named_views(buffer)
        with without_torch_functions():
            for parameter, name in zip(self.members, self.parameters, strict=True):
                if name in self.placed and type(parameter.grad) is ReducedGradient:
                    parameter.grad = self._gradient_views[name]

    def park_gradient(self) -> None:
        """Lets go of what was collected until it is reduced."""
        self.gradient, self.parked = _on_meta(self._whole), True
        self._manager.done(self._whole)

    def fetch_gradient(self) -> None:
        """Brings it back."""
        if self.parked:
            self.gradient, self.parked = self._manager.use(self._whole, write=True), False

    def free_gradient(self) -> None:
        """Gives the gradient buffer back."""
        if self.resting is not None:
            placed, self.resting, self.gradient = self.resting, None, None
            self._manager.discard(placed)
            if placed is self._gradient:
                self._filled, self._kept = None, False
        elif self._in_place:
            super().free_gradient()
        elif self.gradient is not None:
            if not self.parked:
                self._manager.done(self._whole)
            self._manager.discard(self._whole)
            self.gradient, self.parked = None, False

    def take_reduced(self) -> Tensor:
        """A buffer for this rank's shard of the reduced gradient."""
        return super().take_reduced() if self._kept else self._fill()

    def _fill(self) -> Tensor:
        self._kept = True
        self._filled = self._manager.use(self._gradient, fresh=True)
        return self._filled

    def park_reduced(self, gradient: Tensor) -> Tensor:
        """Keeps a gradient for later; returns what stands for it."""
        assert gradient is self._filled, "the first gradient is made in its object"
        self._filled = None
        self._manager.done(self._gradient)
        return _on_meta(self._gradient)

    @contextmanager
    def reduced(self, parked: Tensor, write: bool = False) -> Iterator[Tensor]:
        """Shows a gradient that is kept."""
        with self._manager.using(self._gradient, write) as gradient:
            yield gradient

    @contextmanager
    def scaled(self, parked: Tensor, factor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Shows a gradient that is kept times a factor; and whether it stays multiplied."""
        # It does where the fast tier alone has it; a copy behind stays as it is, and serves later.
        behind = self._gradient.offset is not None
        try:
            with self._manager.using(self._gradient, write=not behind) as gradient:
                yield gradient.mul_(factor.to(gradient.dtype)), not behind
        finally:
            if behind:
                self._manager.revert(self._gradient)

    def give_reduced(self, gradient: Tensor) -> None:
        """Gives a gradient up."""
        if "_whole" in vars(self) and gradient is self._whole.tensor:
            self._manager.done(self._whole)
            self._manager.discard(self._whole)
            return
        if gradient is not self._filled and not gradient.is_meta:
            self.pool.give(gradient, GRADIENTS)
            return
        if self._filled is not None:
            self.park_reduced(gradient)
        self._manager.discard(self._gradient)
        self._kept = False


def _on_meta(placed: Placed) -> Tensor:
    return torch.empty(placed.numel, dtype=placed.dtype, device="meta")
