"""The gradients of a chunk: added up in one flat buffer, then handed over to be reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor, nn

from gulliver._compat import without_torch_functions
from gulliver.errors import GulliverError
from gulliver.memory._buffers import BufferPool
from gulliver.memory._bytes import GRADIENTS
from gulliver.memory._layout import ChunkLayout
from gulliver.memory._placed import ManagedTensor
from gulliver.memory._reduced import ReducedGradient, reduced_gradient


# A parameter's first gradient is moved to its place in the buffer, and autograd adds later ones in
# that place: to write it there once costs less than to add it to zeros. When the buffer is reduced,
# the parameters' gradients are exchanged for `ReducedGradient`s.
class ChunkGradients:
    """Collects the gradients of the parameters of a chunk, and keeps the reduced one."""

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
        # Whether what was collected has left until it is reduced.
        self.parked = False
        # What is being collected, while it may leave until more comes.
        self.resting: ManagedTensor | None = None
        # Parameters whose gradients lie in the buffer. Written for every parameter of a backward:
        # adding to a set would be a call.
        self.placed: dict[str, bool] = {}
        # Parameters that had no gradient when the chunk began to collect.
        self.blank: frozenset[str] = frozenset()
        self._views: dict[str, Tensor] = {}
        self._stand_ins = [reduced_gradient(p) for p in self._members]

    def follow_shard(self, dtype: torch.dtype, in_place: bool = False) -> None:
        """Reduces to the dtype of the master shard; `in_place` collects where that will lie."""
        self.reduced_dtype = dtype

    # Collecting.

    @property
    def begun(self) -> bool:
        """Whether gradients are being collected."""
        return bool(self._views)

    def begin(self) -> None:
        """Makes the buffer ready to collect."""
        if self.buffer is None:
            self.buffer = self._take_buffer()
        for start, end in self._gaps:
            self.buffer[start:end].zero_()  # padding is reduced and measured, too
        self._views = self._named_views(self.buffer)
        self.placed = {}
        self.blank = frozenset(self.cleared_names())

    def _take_buffer(self) -> Tensor:
        return self.pool.take(self.layout.size, self.dtype, self._device, GRADIENTS)

    def rest(self) -> None:
        """Unpins what is being collected until more comes, where a manager has it."""

    def wake(self) -> None:
        """Brings it back, for more to be added."""

    def park(self) -> None:
        """Unpins what was collected until it is reduced, where a manager has it."""

    def fetch(self) -> None:
        """Brings it back."""

    def place(self, name: str) -> None:
        """Moves a parameter's first gradient to its place in the buffer."""
        parameter, view = self.parameters[name], self._views[name]
        gradient = parameter.grad
        if gradient is view:
            return
        if name in self.placed or gradient is None or gradient.requires_grad:
            raise _left(name)
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = view
        self.placed[name] = True

    def complete(self) -> None:
        """Fills the places of gradients that did not come with zeros."""
        for name, view in self._views.items():
            gradient = self.parameters[name].grad
            if name in self.placed:
                if gradient is not view:
                    raise _left(name)
            elif gradient is None or type(gradient) is ReducedGradient:
                view.zero_()
            else:
                raise _left(name)

    def mark_reduced(self) -> None:
        """Puts stand-ins in place of the parameters' gradients: the buffer is to be reduced."""
        for parameter, stand_in in zip(self._members, self._stand_ins, strict=True):
            parameter.grad = stand_in
        self._views, self.placed = {}, {}

    def take(self) -> Tensor:
        """Hands the buffer over; the next gradient gets another."""
        assert self.buffer is not None
        buffer, self.buffer = self.buffer, None
        return buffer

    def free(self) -> None:
        """Gives the buffer back."""
        if self.buffer is not None:
            self.give_reduced(self.take())

    # What users do to ``parameter.grad``.

    def clear(self) -> None:
        """Sets the parameters' gradients to None."""
        with without_torch_functions():
            for parameter in self._members:
                parameter.grad = None
        self._views, self.placed = {}, {}

    def cleared_names(self) -> list[str]:
        """Parameters whose gradient was set to None, such as by ``model.zero_grad()``."""
        with without_torch_functions():
            return [name for name, p in self.parameters.items() if p.grad is None]

    def note_cleared(self, cleared: Sequence[str]) -> None:
        """Forgets what was collected of gradients that were set to None."""
        self.placed = {name: True for name in self.placed if name not in cleared}
        self.blank = frozenset(cleared)

    def foreign_names(self) -> list[str]:
        """Parameters whose gradient the user has set to a tensor of their own."""
        views = self._views
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
            and not (name in views and gradient is views[name])
        ]

    # The reduced gradient: a shard of what was collected, or the buffer itself.

    def take_reduced(self) -> Tensor:
        """A buffer for this rank's shard of the reduced gradient."""
        return self.pool.take(self.layout.part_size, self.reduced_dtype, self._device, GRADIENTS)

    def give_reduced(self, gradient: Tensor) -> None:
        """Gives a gradient up."""
        self.pool.give(gradient, GRADIENTS)

    def keep_reduced(self, gradient: Tensor) -> Tensor:
        """Keeps a gradient for later; returns what stands for it."""
        return gradient

    @contextmanager
    def reduced(self, kept: Tensor, write: bool = False) -> Iterator[Tensor]:
        """Shows a gradient that is kept."""
        yield kept

    @contextmanager
    def scaled(self, kept: Tensor, factor: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Shows a gradient that is kept times a factor, and whether it stays multiplied."""
        yield kept.mul_(factor.to(kept.dtype)), True


def _left(name: str) -> GulliverError:
    return GulliverError(
        f"the gradient of {name!r} left its chunk: backward(create_graph=True) and setting "
        ".grad are not supported with ZeRO, use TorchDDPPlugin for them"
    )
