"""Keys and values of a generation, shared out over ranks.

A prompt's tokens stay where the layout puts them. Of new tokens, the one at position p is kept by
rank p modulo their count, so that no rank grows faster than another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gulliver.parallel.sequence import SequenceGroups

# Tokens that a layer's memory grows by at least.
SPARE = 64


class ShardedCache:
    """This rank's keys and values of all layers."""

    def __init__(self, groups: SequenceGroups) -> None:
        # Tokens that all ranks have seen together.
        self.length = 0
        self.positions = self.asked = torch.empty(0, dtype=torch.int64)
        self._groups = groups
        self._own = torch.empty(0, dtype=torch.int64)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, count: int) -> None:
        """A forward of the next tokens begins."""
        # Positions of the tokens of the forward under way, ``[tokens]``.
        self.asked = torch.arange(self.length, self.length + count)
        if self.length == 0:
            held = self._groups.plan.lay(count).positions(self._groups.rank)
            self._own = torch.arange(len(held))
        else:
            held = self.asked[self.asked % self._groups.all.size == self._groups.rank]
            self._own = held - self.length
        # Positions of the tokens that this rank keeps, ``[kept]``.
        self.positions = torch.cat([self.positions, held])
        self.length += count

    def keep(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a layer's new keys and values."""
        count = len(self.positions)
        buffers = self._layers.get(id(module))
        if buffers is None or buffers[0].shape[2] < count:
            buffers = tuple(
                _grown(x, count, old)
                for x, old in zip((key, value), buffers or (None,) * 2, strict=True)
            )
            self._layers[id(module)] = buffers[0], buffers[1]
        first = count - len(self._own)
        if len(self._own):
            index = self._own.to(key.device)
            for buffer, new in zip(buffers, (key, value), strict=True):
                buffer[:, :, first:count] = new.detach().index_select(2, index)
        return buffers[0][:, :, :count], buffers[1][:, :, :count]


def _grown(like: Tensor, count: int, old: Tensor | None) -> Tensor:
    batch, heads, _, dim = like.shape
    room = count + max(SPARE, count // 4)
    buffer = like.new_empty(batch, heads, room, dim)
    if old is not None:
        buffer[:, :, : old.shape[2]] = old
    return buffer
