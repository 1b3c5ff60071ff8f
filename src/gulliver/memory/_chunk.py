"""A chunk in memory: parameters and their gradients are views of two flat buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory._layout import ChunkLayout


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
        self._views = self._cut(self.data)
        for name, parameter in self.parameters.items():
            self._views[name].copy_(parameter.detach())
            parameter.data = self._views[name]

    @property
    def shard(self) -> Tensor:
        """This rank's part of the parameters, a view."""
        return self._part_of(self.data)

    def attach_gradient(self) -> None:
        """Makes room for the gradients, zeros, and lets backward add to it in place."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.data)
        for name, view in self._cut(self.gradient).items():
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = view

    def detach_gradient(self, keep: bool) -> None:
        """Takes the gradients away from the parameters; keeps the buffer, zeroed, or frees it."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if keep and self.gradient is not None:
            self.gradient.zero_()
        else:
            self.gradient = None

    def check_attached(self) -> None:
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
        """Cuts another buffer of the chunk's size into tensors of the parameters' shapes."""
        return self._cut(buffer)

    def _cut(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            slot.name: buffer[slot.start : slot.end].view(self.parameters[slot.name].shape)
            for slot in self.layout.slots
        }

    def _part_of(self, buffer: Tensor) -> Tensor:
        size = self.layout.part_size
        return buffer[self.part * size : (self.part + 1) * size]
