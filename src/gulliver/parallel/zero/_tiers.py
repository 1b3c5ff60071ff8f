"""Shows the optimizer what lies in tiers of memory, chunk by chunk, while it is there.

Where a `gulliver.memory.Manager` has a chunk's shard, moments and gradient, their memory moves. So
the pieces that the optimizer steps, and its state, are views for the length of a block only;
outside of one the pieces are nan, and the state lies on meta: nothing can be read by mistake.

It does not know what is done in a block, nor when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gulliver.parallel.zero._sharded import ShardedChunk


class Tiers:
    """Points an optimizer's pieces and state to where they are.

    Args:
        inner: the user's optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._nowhere: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def opened(self, sharded: ShardedChunk) -> Iterator[None]:
        """Brings all of a chunk into the fast tier for a block; new state may be placed in it."""
        parked = sharded.gradient_shard
        with sharded.chunk.opened(write=True, moments=True):
            try:
                self._point(sharded)
                if parked is None:
                    yield
                else:
                    with sharded.chunk.reduced(parked) as sharded.gradient_shard:
                        yield
            finally:
                sharded.gradient_shard = parked
                sharded.hide_gradients()
                self.hide(sharded)

    @contextmanager
    def shown(self, sharded: ShardedChunk, fill: bool = False) -> Iterator[None]:
        """Shows the shard and the state wherever they lie for a block; see `PlacedChunk.shown`."""
        with sharded.chunk.shown(fill):
            try:
                self._point(sharded)
                yield
            finally:
                self.hide(sharded)

    def _point(self, sharded: ShardedChunk) -> None:
        chunk = sharded.chunk
        for piece, owned in sharded.pieces:
            owned.data = chunk.home[piece.start : piece.end].view(owned.shape)
            state = self._inner.state.get(owned, {})
            for key, moment in chunk.moments.items():
                if piece.name in moment.starts and key in state:
                    start, shape = moment.starts[piece.name], state[key].shape
                    state[key] = moment.buffer[start : start + shape.numel()].view(shape)

    def hide(self, sharded: ShardedChunk) -> None:
        """Takes the memory out of the optimizer's sight."""
        chunk = sharded.chunk
        for piece, owned in sharded.pieces:
            owned.data = self._nan(owned)
            state = self._inner.state.get(owned, {})
            for key, moment in chunk.moments.items():
                if piece.name in moment.starts and key in state:
                    state[key] = torch.empty_like(state[key], device="meta")

    def _nan(self, owned: nn.Parameter) -> Tensor:
        found = self._nowhere.get(owned)
        if found is None:
            nan = torch.full((), float("nan"), dtype=owned.dtype, device=owned.device)
            found = self._nowhere[owned] = nan.expand(owned.shape)
        return found
