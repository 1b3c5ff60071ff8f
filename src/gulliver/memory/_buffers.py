"""Flat buffers that are counted, and used again where fresh memory is slow.

On a CPU the first touch of fresh memory costs several times a copy. The buffers of chunks come and
go in few sizes, so a small store of them pays. Devices with a caching allocator need none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gulliver._compat import storage_users
from gulliver.memory._bytes import ByteCounter


class BufferPool:
    """Lends flat buffers; what is given back is lent again once no view of it is left."""

    def __init__(self, kept: int = 4) -> None:
        self.kept = kept
        self.counter = ByteCounter()
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
        """A buffer of `size` elements with any content, counted as of a kind."""
        self.counter.add(kind, size * dtype.itemsize)
        free = self._free.get((size, dtype, device), ())
        for number, buffer in enumerate(free):
            # A view may have been kept: by a graph, or by somebody who read a gradient.
            if storage_users(buffer) == 1:
                assert isinstance(free, list)
                return free.pop(number)
        with torch.inference_mode(
            False
        ):  # first asked for in an evaluation, it serves training too
            return torch.empty(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor, kind: str) -> None:
        """Gives a buffer back; views of it stay right as long as they live."""
        self.counter.add(kind, -buffer.nbytes)
        if buffer.device.type != "cpu":
            return
        free = self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), [])
        if len(free) < self.kept:
            free.append(buffer)

    def clear(self) -> None:
        """Frees what is kept."""
        self._free.clear()
