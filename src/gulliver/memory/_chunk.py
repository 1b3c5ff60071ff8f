"""A chunk in memory: parameters and their gradients are views of two flat buffers.

The gradient buffer is there only while gradients are collected. Before backward adds to a parameter
of the chunk, every parameter gets its view as ``grad``, so that autograd accumulates in place and
nothing is copied. When the buffer has been reduced, the views are exchanged for `ReducedGradient`s.

It does not know when that happens, nor of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory._layout import ChunkLayout
from gulliver.memory._reduced import reduced_gradient


class Chunk:
    """Parameters of one dtype and device in one buffer, of which this rank owns one part.

    Args:
        layout: places of the parameters.
        parameters: by the names of the layout; their data moves into the buffer.
        part: of the buffer that this rank owns.
    """

    def __init__(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], part: int
    ) -> None:
        self.layout, self.part = layout, part
        self.parameters = {slot.name: parameters[slot.name] for slot in layout.slots}
        first = parameters[layout.slots[0].name]
        self.data = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self.gradient: Tensor | None = None
        self._shapes = {name: p.shape for name, p in self.parameters.items()}
        self._views = self.named_views(self.data)
        self._gradient_views: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            self._views[name].copy_(parameter.detach())
            parameter.data = self._views[name]
            parameter.grad = None  # one from before lies outside the chunk
        self._reduced = {name: reduced_gradient(p) for name, p in self.parameters.items()}

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameters, a view."""
        size = self.layout.part_size
        return self.data[self.part * size : (self.part + 1) * size]

    def attach_gradient(self) -> None:
        """Makes every parameter's gradient a zeroed view of the gradient buffer."""
        self.check_parameters()
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.data)
        else:
            self.gradient.zero_()
        self._gradient_views = self.named_views(self.gradient)
        for name, parameter in self.parameters.items():
            parameter.grad = self._gradient_views[name]

    def attach_again(self, name: str) -> None:
        """Gives back the view of a parameter whose gradient the user set to None, zeroed."""
        self.parameters[name].grad = self._gradient_views[name].zero_()

    def detach_gradient(self, keep_buffer: bool) -> None:
        """Marks the parameters' gradients as reduced; keeps the buffer for later or frees it."""
        for name, parameter in self.parameters.items():
            parameter.grad = self._reduced[name]
        self._gradient_views = {}
        if not keep_buffer:
            self.gradient = None

    def clear_gradient(self) -> None:
        """Takes gradients and marks away from the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradient_views = {}

    def cleared_names(self) -> list[str]:
        """Parameters whose gradient was set to None, such as by ``model.zero_grad()``."""
        return [name for name, parameter in self.parameters.items() if parameter.grad is None]

    def check_gradient(self, name: str) -> None:
        """Refuses a gradient that was not added up in the buffer.

        Raises:
            GulliverError: autograd or the user has put another tensor in its place.
        """
        if self.parameters[name].grad is not self._gradient_views[name]:
            raise GulliverError(
                f"the gradient of {name!r} left its chunk: backward(create_graph=True) and setting "
                ".grad are not supported with ZeRO, use TorchDDPPlugin for them"
            )

    def check_parameters(self) -> None:
        """Refuses parameters that no longer lie in this chunk.

        Raises:
            GulliverError: one was moved, converted or reshaped after it had been placed here.
        """
        for name, parameter in self.parameters.items():
            view = self._views[name]
            if parameter.data_ptr() != view.data_ptr() or parameter.shape != view.shape:
                raise GulliverError(
                    f"parameter {name!r} was moved, converted or reshaped after boost "
                    f"({tuple(view.shape)} {view.dtype} on {view.device} then, "
                    f"{tuple(parameter.shape)} {parameter.dtype} on {parameter.device} now): "
                    "do that before boost"
                )

    def named_views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Cuts a buffer of the chunk's size into tensors of the parameters' shapes."""
        return {
            slot.name: buffer[slot.start : slot.end].view(self._shapes[slot.name])
            for slot in self.layout.slots
        }
