"""Buffers, such as running statistics: after every step all ranks have those of rank 0.

As with torch's DDP, which sends them at the first forward after a step. Here they travel at the
step itself, where all ranks are anyway: one of them may then evaluate or save alone. All of them
travel: writes through ``.data`` and fused kernels do not raise autograd's version counters, so
which were written cannot be known without reading them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from gulliver.comm import Group, broadcast, group_rank
from gulliver.memory import before_write

MESSAGE_BYTES = 1 << 25
"""Bytes that are sent together, which bounds the memory that they are copied to."""


class BufferSync:
    """Gives all ranks rank 0's values of the buffers."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._group = group
        self._places = [
            (module, key, buffer.shape)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._own: Sequence[int] = [1] * len(self._places)

    def votes(self) -> list[int]:
        """Input of this rank to a max all-reduce: 1 for a buffer that is its own."""
        # These are buffers that it has resized, such as caches, and expanded ones, whose elements
        # share memory and cannot be written.
        now = [(module._buffers.get(key), shape) for module, key, shape in self._places]
        return [
            int(b is None or b.shape != shape or (0 in b.stride() and b.numel() > 1))
            for b, shape in now
        ]

    def take_votes(self, votes: Sequence[int]) -> None:
        """Notes which buffers stay each rank's own, as any rank has voted."""
        self._own = votes

    def sync(self) -> None:
        """Sends all other buffers; every rank calls it."""
        for buffers in self._messages():
            # As bytes: backends do not know every dtype.
            runs = [b.contiguous().view(-1).view(torch.uint8) for b in buffers]
            flat = torch.cat(runs)
            broadcast(flat, 0, self._group)
            if group_rank(self._group) == 0:
                continue
            before_write(buffers)
            pieces = flat.split([run.numel() for run in runs])
            for buffer, piece in zip(buffers, pieces, strict=True):
                # A clone starts at an address that every dtype can be read from.
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))

    def _messages(self) -> Iterator[list[Tensor]]:
        """Yields what is sent together: buffers of one device, up to `MESSAGE_BYTES`."""
        pending: dict[torch.device, list[Tensor]] = {}
        for (module, key, _), own in zip(self._places, self._own, strict=True):
            buffer = module._buffers.get(key)
            if own or buffer is None or not buffer.numel():
                continue
            buffers = pending.setdefault(buffer.device, [])
            if buffers and sum(b.nbytes for b in buffers) + buffer.nbytes > MESSAGE_BYTES:
                yield pending.pop(buffer.device)
                buffers = pending.setdefault(buffer.device, [])
            buffers.append(buffer.detach())
        yield from pending.values()
