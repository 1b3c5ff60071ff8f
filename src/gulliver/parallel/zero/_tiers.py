"""Shows the optimizer what lies in tiers of memory, chunk by chunk, while it is there.

Where a `gulliver.memory.Manager` has a chunk's shard, moments and gradient, their memory moves. So
the pieces that the optimizer steps, and its state, are views for the length of a block only;
outside of one the pieces are nan, and the state lies on meta: nothing can be read by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gulliver.memory import Piece
from gulliver.parallel._optimizer import is_counter
from gulliver.parallel.zero._sharded import ShardedChunk

Place = Callable[[Piece, str, Tensor], Tensor | None]
_CONSTANTS = torch.zeros_like, torch.ones_like, torch.full_like


# [Note: new state] In its first step an optimizer makes its state itself: one constant tensor for
# each parameter and kind, ``state["exp_avg"] = torch.zeros_like(p)``. All of a chunk would be as
# much as its moments, beside the budget. So such a constant takes no memory (one element,
# stretched), and what is put into a parameter's state is filled in at its place in the chunk at
# once. The optimizer goes on with that: it reads what it has put there. The bits are the same.
#
# It does not know what is done in a block, nor when.
class _Stretched(TorchFunctionMode):
    """Lets constants of a tensor's shape take the memory of one element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CONSTANTS:
            return func(*args, **kwargs)
        like, *rest = args
        kwargs.pop("memory_format", None)
        return func(like.new_empty(()), *rest, **kwargs).expand(like.shape)


class _NewState(dict[str, Any]):
    """State of a piece while it is made: tensors go to their places at once."""

    def __init__(self, piece: Piece, owned: nn.Parameter, place: Place) -> None:
        super().__init__()
        self._piece, self._owned, self._place = piece, owned, place

    def __setitem__(self, key: str, value: Any) -> None:
        owned, counts = self._owned, is_counter(key, value, self._owned)
        if isinstance(value, Tensor) and not counts and value.dtype == owned.dtype:
            placed = self._place(self._piece, key, value) if value.shape == owned.shape else None
            value = value.contiguous() if placed is None else placed
        super().__setitem__(key, value)


class Tiers:
    """Points an optimizer's pieces and state to where they are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._nowhere: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def opened(self, sharded: ShardedChunk) -> Iterator[None]:
        """Brings all of a chunk into the fast tier for a block; new state may be placed in it."""
        with sharded.chunk.opened(write=True, moments=True):
            try:
                self._point(sharded)
                with sharded.stepped_gradient():
                    yield
            finally:
                sharded.hide_gradients()
                self.hide(sharded)

    @contextmanager
    def making(self, new: Mapping[nn.Parameter, Piece], place: Place) -> Iterator[None]:
        """Places state as the optimizer makes it, in its step; see the note above."""
        states = self._inner.state
        states.update({owned: _NewState(piece, owned, place) for owned, piece in new.items()})
        try:
            with _Stretched():
                yield
        finally:
            for owned in new:
                made = dict(states.pop(owned))
                if made:
                    states[owned] = made

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
