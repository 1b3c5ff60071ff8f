"""Buffers that training changes, such as running statistics: ranks go on with those of rank 0.

As with torch's DDP, which sends them at the first forward after a step. Here they travel at the
step itself, where all ranks are anyway: one of them may then evaluate or save alone. Only buffers
that changed on some rank travel, which the vote before every step says; see `_reducer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gulliver.comm import Group, broadcast
from gulliver.memory import before_write

SAME, CHANGED, RESIZED = range(3)


class BufferSync:
    """Gives all ranks rank 0's values of the buffers that were changed.

    Args:
        model: model with the same buffers on all ranks.
        group: process group of the ranks that train it.
        always: types of modules whose buffers are taken for changed: batch normalization writes its
            statistics without autograd's version counter showing it.
    """

    def __init__(self, model: nn.Module, group: Group, always: tuple[type[nn.Module], ...]) -> None:
        self._group = group
        self._places = [
            (module, key, buffer.shape, isinstance(module, always))
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._seen: list[tuple[Tensor | None, int]] = []
        self._changed: list[int] = []
        self._remember()

    def _now(self) -> list[Tensor | None]:
        return [module._buffers.get(key) for module, key, *_ in self._places]

    def _remember(self) -> None:
        self._seen = [(b, -1 if b is None else b._version) for b in self._now()]

    def votes(self) -> list[int]:
        """This rank's part of a vote that takes the largest of each number."""
        found = []
        known = zip(self._now(), self._seen, self._places, strict=True)
        for buffer, (seen, version), (_, _, shape, always) in known:
            if buffer is None or buffer.shape != shape:
                found.append(RESIZED)  # a cache that each rank sizes for itself
            else:
                same = not always and buffer is seen and buffer._version == version
                found.append(SAME if same else CHANGED)
        return found

    def take_votes(self, votes: Sequence[int]) -> None:
        """Notes which buffers changed on any rank."""
        self._changed = [number for number, vote in enumerate(votes) if vote == CHANGED]

    def sync(self) -> None:
        """Sends what the last vote found, in one message per device; every rank calls it."""
        now = self._now()
        by_device: dict[torch.device, list[Tensor]] = {}
        for number in self._changed:
            buffer = now[number]
            if buffer is not None and buffer.numel():
                by_device.setdefault(buffer.device, []).append(buffer.detach())
        for buffers in by_device.values():
            before_write(buffers)
            # As bytes: backends do not know every dtype.
            runs = [b.contiguous().view(-1).view(torch.uint8) for b in buffers]
            flat = torch.cat(runs)
            broadcast(flat, 0, self._group)
            pieces = flat.split([run.numel() for run in runs])
            for buffer, piece in zip(buffers, pieces, strict=True):
                # A clone starts at an address that every dtype can be read from.
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))
        self._changed = []
        self._remember()
