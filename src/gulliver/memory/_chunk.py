"""A chunk in memory: parameters and their gradients are views of two flat buffers.

The gradient buffer is there only while gradients are collected. A parameter's first gradient is
moved to its place there, and autograd adds later ones in that place. When the buffer is reduced,
the parameters' gradients are exchanged for `ReducedGradient`s.

The parameter buffer may go too. Then every parameter is one nan, stretched to its shape, and only
`home` is left: this rank's part. A buffer is never emptied behind the back of a graph that still
refers to it; it lives as long as somebody does.

It does not know when any of that happens, nor of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory._awaited import arrived
from gulliver.memory._buffers import BufferPool
from gulliver.memory._claims import before_write, is_claimed
from gulliver.memory._layout import ChunkLayout
from gulliver.memory._reduced import ReducedGradient, reduced_gradient


class Chunk:
    """Parameters of one dtype and device in one buffer, of which this rank owns one part.

    Args:
        layout: places of the parameters.
        parameters: by the names of the layout; their data moves into the buffer.
        part: of the buffer that this rank owns.
        pool: where buffers that come and go are taken from.

    Attributes:
        shapes: of the parameters, by name.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        parameters: Mapping[str, nn.Parameter],
        part: int,
        pool: BufferPool | None = None,
    ) -> None:
        self.layout, self.part, self.pool = layout, part, pool or BufferPool()
        self.parameters = {slot.name: parameters[slot.name] for slot in layout.slots}
        first = parameters[layout.slots[0].name]
        self.dtype, self.device = first.dtype, first.device
        self.buffer: Tensor | None = torch.zeros(layout.size, dtype=self.dtype, device=self.device)
        self.home = self.shard
        self.gradient: Tensor | None = None
        self.shapes = {name: p.shape for name, p in self.parameters.items()}
        self._views = self.named_views(self.buffer)
        self._gradient_views: dict[str, Tensor] = {}
        self._placed: set[str] = set()
        self._gaps = layout.gaps()
        for name, parameter in self.parameters.items():
            self._views[name].copy_(parameter.detach())
            arrived(parameter)
            parameter.data = self._views[name]
            parameter.grad = None  # one from before lies outside the chunk
        self._reduced = {name: reduced_gradient(p) for name, p in self.parameters.items()}
        self._absent = {name: _one_nan(p) for name, p in self.parameters.items()}

    @property
    def data(self) -> Tensor:
        """The whole buffer of parameters; only while it is there."""
        assert self.buffer is not None, "the chunk has been released"
        return self.buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk."""
        return self.layout.size * self.dtype.itemsize

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameters, a view."""
        size = self.layout.part_size
        return self.data[self.part * size : (self.part + 1) * size]

    def settle_home(self, dtype: torch.dtype, separate: bool) -> None:
        """Makes `home`, what an optimizer steps: a view of the buffer, or a tensor of its own."""
        own = separate or dtype != self.dtype
        self.home = self.shard.to(dtype, copy=True) if own else self.shard

    @property
    def home_is_view(self) -> bool:
        """Whether what is written to `home` is in the parameters already."""
        return self.buffer is not None and self.home.data_ptr() == self.shard.data_ptr()

    def publish(self) -> None:
        """Writes `home` to this rank's part of the buffer."""
        if not self.home_is_view:
            self.shard.copy_(self.home)

    def release(self) -> None:
        """Gives the parameter buffer back; `home` and the gradients stay."""
        for name, parameter in self.parameters.items():
            parameter.data = self._absent[name]
        buffer, self.buffer, self._views = self.buffer, None, {}
        if buffer is not None:
            self.pool.give(buffer)

    def materialise(self) -> None:
        """Gives every parameter its place in a buffer again, of which only `home` is filled."""
        self.buffer = self.pool.take(self.layout.size, self.dtype, self.device)
        self._views = self.named_views(self.buffer)
        for name, parameter in self.parameters.items():
            parameter.data = self._views[name]
        self.publish()

    def take_writes(self) -> None:
        """Brings what the user has written to parameters, on every rank alike, to `home`.

        Values are compared: a write through ``.data`` leaves no other trace.
        """
        if not self.home_is_view:
            self.merge(self.home, self.shard)

    def merge(self, home: Tensor, values: Tensor) -> None:
        """Writes what differs to `home` or a run of it; the rest keeps more bits than `values`."""
        rounded = home.to(values.dtype)
        # A device would be waited for; to write what is there already costs it less.
        if (self.device.type == "cpu" or is_claimed()) and torch.equal(rounded, values):
            return
        before_write([self.home])
        home.copy_(torch.where(rounded == values, home, values.to(home.dtype)))

    @property
    def gradient_begun(self) -> bool:
        """Whether gradients are being collected."""
        return bool(self._gradient_views)

    def begin_gradient(self) -> None:
        """Makes the gradient buffer ready to collect."""
        self.check_parameters()
        if self.gradient is None:
            self.gradient = self.pool.take(self.layout.size, self.dtype, self.device)
        for start, end in self._gaps:
            self.gradient[start:end].zero_()  # what lies between is reduced and measured too
        self._gradient_views = self.named_views(self.gradient)
        self._placed = set()

    @property
    def placed(self) -> frozenset[str]:
        """Parameters whose gradients are being collected in the buffer."""
        return frozenset(self._placed)

    def expect_gradient(self, name: str) -> None:
        """Called before autograd adds to a parameter: the first gradient is taken as it comes."""
        parameter = self.parameters[name]
        if isinstance(parameter.grad, ReducedGradient):
            parameter.grad = None

    def place_gradient(self, name: str) -> None:
        """Moves a parameter's first gradient to its place; later ones are added there by autograd.

        To write it there once costs less than to add it to zeros.

        Raises:
            GulliverError: autograd or the user has put another tensor in its place.
        """
        parameter, view = self.parameters[name], self._gradient_views[name]
        gradient = parameter.grad
        if gradient is view:
            return
        if name in self._placed or gradient is None or gradient.requires_grad:
            raise self._left(name)
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = view
        self._placed.add(name)

    def drop_gradient(self, name: str) -> None:
        """Forgets a parameter's gradient that was set to None."""
        self._placed.discard(name)

    def complete_gradient(self) -> None:
        """Fills the places of gradients that did not come with zeros.

        Raises:
            GulliverError: the user has put another tensor in the place of one.
        """
        for name, view in self._gradient_views.items():
            gradient = self.parameters[name].grad
            if name in self._placed:
                if gradient is not view:
                    raise self._left(name)
            elif gradient is None or isinstance(gradient, ReducedGradient):
                view.zero_()
            else:
                raise self._left(name)

    def mark_reduced(self) -> None:
        """Takes the parameters' gradients out of their sight: the buffer is to be reduced."""
        for name, parameter in self.parameters.items():
            parameter.grad = self._reduced[name]
        self._gradient_views, self._placed = {}, set()

    def take_gradient(self) -> Tensor:
        """Hands the gradient buffer over; the next gradient gets another."""
        assert self.gradient is not None
        buffer, self.gradient = self.gradient, None
        return buffer

    def free_gradient(self) -> None:
        """Gives the gradient buffer back."""
        if self.gradient is not None:
            self.pool.give(self.take_gradient())

    def clear_gradient(self) -> None:
        """Takes gradients and marks away from the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradient_views, self._placed = {}, set()

    def cleared_names(self) -> list[str]:
        """Parameters whose gradient was set to None, such as by ``model.zero_grad()``."""
        return [name for name, parameter in self.parameters.items() if parameter.grad is None]

    def foreign_gradients(self) -> list[str]:
        """Parameters whose gradient the user has set to a tensor of their own."""
        return [
            name
            for name, parameter in self.parameters.items()
            if (gradient := parameter.grad) is not None
            and gradient is not self._reduced[name]
            and gradient is not self._gradient_views.get(name)
        ]

    def _left(self, name: str) -> GulliverError:
        return GulliverError(
            f"the gradient of {name!r} left its chunk: backward(create_graph=True) and setting "
            ".grad are not supported with ZeRO, use TorchDDPPlugin for them"
        )

    def check_parameters(self) -> None:
        """Refuses parameters that no longer lie in this chunk.

        Raises:
            GulliverError: one was moved, converted or reshaped after it had been placed here.
        """
        places = self._views or self._absent
        for name, parameter in self.parameters.items():
            place = places[name]
            moved = parameter.shape != place.shape or parameter.dtype != place.dtype
            if moved or parameter.data_ptr() != place.data_ptr():
                raise GulliverError(
                    f"parameter {name!r} was moved, converted or reshaped after boost "
                    f"({tuple(place.shape)} {place.dtype} on {place.device} then, "
                    f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device} now): "
                    "do that before boost"
                )

    def named_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Cuts a buffer of the chunk's size into tensors of the parameters' shapes."""
        return {
            slot.name: buffer[slot.start : slot.end].view(self.shapes[slot.name])
            for slot in self.layout.slots
        }


def _one_nan(parameter: Tensor) -> Tensor:
    nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)
