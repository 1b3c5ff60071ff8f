"""The state that the user's optimizer keeps of this rank's pieces, in the buffers of their chunks.

Where a `gulliver.memory.Manager` has a chunk's shard, moments and gradient, their memory moves. So
the pieces that the optimizer steps, and its state, are views for the length of a block only;
outside of one the pieces are nan, and the state lies on meta: nothing can be read by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gulliver.memory import OPTIMIZER_STATE, Manager, ShardPiece, moment_size
from gulliver.parallel._saving import is_counter
from gulliver.parallel.zero._elementwise import makes_beside, state_sizes, steps_by_chunk
from gulliver.parallel.zero._groups import OptimizerGroups
from gulliver.parallel.zero._sharded import ShardedChunk

Place = Callable[[ShardPiece, str, Tensor], Tensor | None]
_ALWAYS = nullcontext()
_CONSTANTS = torch.zeros_like, torch.ones_like, torch.full_like


# [Note: new state] In its first step an optimizer makes its state itself: one constant tensor for
# each parameter and kind, ``state["exp_avg"] = torch.zeros_like(p)``. All of a chunk would be as
# much as its moments, on top of the budget. So such a constant takes no memory (one element,
# stretched), and what is put into a parameter's state is filled in at its place in the chunk at
# once. The optimizer goes on with that: it reads what it has put there. The bits are the same.
#
# It does not know what is done in a block, nor when.
class _Stretched(TorchFunctionMode):
    """Makes constants of a tensor's shape take the memory of one element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CONSTANTS:
            return func(*args, **kwargs)
        like, *rest = args
        kwargs.pop("memory_format", None)
        return func(like.new_empty(()), *rest, **kwargs).expand(like.shape)


class _NewState(dict[str, Any]):
    """State of a piece while it is made: tensors go to their places at once."""

    def __init__(self, piece: ShardPiece, owned: nn.Parameter, place: Place) -> None:
        super().__init__()
        self._piece, self._owned, self._place = piece, owned, place

    def __setitem__(self, key: str, value: Any) -> None:
        owned, counts = self._owned, is_counter(key, value, self._owned)
        if isinstance(value, Tensor) and not counts and value.dtype == owned.dtype:
            placed = self._place(self._piece, key, value) if value.shape == owned.shape else None
            value = value.contiguous() if placed is None else placed
        super().__setitem__(key, value)


class PieceStates:
    """State of pieces that stays on the device."""

    tiered = False

    def __init__(self, inner: torch.optim.Optimizer, groups: OptimizerGroups, whole: bool) -> None:
        self._inner, self._groups, self._whole = inner, groups, whole
        # Whether it may step some parameters in one call and some in the next.
        self.by_chunk = steps_by_chunk(inner)

    def opened(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Block in which the optimizer can step a chunk, and new state of it can be placed."""
        return _ALWAYS

    def shown(self, sharded: ShardedChunk, fill: bool = False) -> AbstractContextManager[None]:
        """Block in which a chunk's shard and state can be read, or filled, wherever they lie."""
        return _ALWAYS

    def making(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Block in which the optimizer steps a chunk, and may make its first state."""
        return _ALWAYS

    def hide(self, sharded: ShardedChunk) -> None:
        """Takes memory that may leave out of the optimizer's sight."""

    def places(self, key: str, value: Any, owned: Tensor) -> bool:
        """Whether `place` moves an entry: it has an element for each, or factors them."""
        if not self.by_chunk or not isinstance(value, Tensor) or is_counter(key, value, owned):
            return False
        fits = value.shape == owned.shape or self._whole
        return fits and value.dtype == owned.dtype and value.is_contiguous()

    def place(self, sharded: ShardedChunk) -> None:
        """Moves the state of a chunk's pieces into buffers of the chunk; see `Chunk`."""
        # Only that of known optimizers is moved: they write their state in place. Others may
        # exchange theirs for new tensors in every step, so it stays where it is.
        found: dict[str, dict[str, tuple[Tensor, Any]]] = {}
        for piece, owned in sharded.pieces:
            state = self._inner.state.get(owned)
            for key, value in state.items() if state else ():
                if self.places(key, value, owned):
                    found.setdefault(key, {})[piece.name] = value, state
                    sharded.placed.add(piece.name)
        for key, entries in found.items():
            values = {name: value for name, (value, _) in entries.items()}
            sizes = {name: value.numel() for name, value in values.items()}
            if not self._whole:
                # Room for all pieces of these groups: each will have state of its own size.
                pieces = self._groups.alike(entries, (p for p, _ in sharded.pieces))
                sizes = {p.name: p.numel for p in pieces}
            for name, view in sharded.chunk.place_moment(key, values, sizes).items():
                value, state = entries[name]
                if value.is_meta or view.data_ptr() != value.data_ptr():
                    state[key] = view.view(value.shape)

    def place_new(self, sharded: ShardedChunk, used: set[str]) -> None:
        """Moves state after a step, where pieces were stepped that had no state before."""
        if self.by_chunk and len(sharded.placed) < len(sharded.pieces):
            new = {piece.name for piece, _ in sharded.pieces} & used - sharded.placed
            if new:
                self.place(sharded)
                sharded.placed |= new  # some optimizers keep nothing

    def drop(self, chunks: Iterable[ShardedChunk]) -> None:
        """Forgets all state of the optimizer."""
        self._inner.state.clear()
        for sharded in chunks:
            sharded.placed.clear()
            sharded.chunk.drop_moments()

    def written(self, chunks: Iterable[ShardedChunk]) -> Iterator[Tensor]:
        """Tensors that a step of chunks writes; a checkpoint may be copying them."""
        for sharded in chunks:
            yield sharded.chunk.master_shard
            for owned in sharded.owned:
                for value in self._inner.state.get(owned, {}).values():
                    if isinstance(value, Tensor):
                        yield value


class TieredStates(PieceStates):
    """State of pieces that a manager keeps in tiers: shown to the optimizer block by block."""

    tiered = True

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        groups: OptimizerGroups,
        whole: bool,
        manager: Manager,
    ) -> None:
        super().__init__(inner, groups, whole)
        self._manager = manager
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
    def shown(self, sharded: ShardedChunk, fill: bool = False) -> Iterator[None]:
        """Shows the shard and the state wherever they lie for a block; see `ManagedChunk.shown`."""
        with sharded.chunk.shown(fill):
            try:
                self._point(sharded)
                yield
            finally:
                self.hide(sharded)

    def making(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Block in which the optimizer steps a chunk, and may make its first state."""
        new = {
            owned: piece
            for piece, owned in sharded.pieces
            if owned.grad is not None and not self._inner.state.get(owned)
        }
        if not new:
            return _ALWAYS
        if not makes_beside(self._inner):
            return self._making(sharded, new)
        nbytes = sum(
            moment_size(state_sizes(self._inner, self._groups.of(piece.name), owned.shape))
            * owned.itemsize
            for owned, piece in new.items()
        )
        return self._manager.reserved(nbytes, OPTIMIZER_STATE) if nbytes else _ALWAYS

    @contextmanager
    def _making(
        self, sharded: ShardedChunk, new: Mapping[nn.Parameter, ShardPiece]
    ) -> Iterator[None]:
        """Places state of new pieces as the optimizer makes it; see [Note: new state]."""
        states, place = self._inner.state, partial(self._place_first, sharded)
        states.update({owned: _NewState(piece, owned, place) for owned, piece in new.items()})
        try:
            with _Stretched():
                yield
        finally:
            for owned in new:
                made = dict(states.pop(owned))
                if made:
                    states[owned] = made

    def _place_first(
        self, sharded: ShardedChunk, piece: ShardPiece, key: str, value: Tensor
    ) -> Tensor | None:
        """Copies new state of a piece to a buffer of its chunk; None where it has no room."""
        chunk = sharded.chunk
        moment = chunk.moments.get(key)
        if moment is not None and piece.name not in moment.starts:
            return None
        mine = _kept_by(self._groups.of(piece.name))
        sizes = {
            p.name: p.numel for p, _ in sharded.pieces if _kept_by(self._groups.of(p.name)) == mine
        }
        sharded.placed.add(piece.name)
        return chunk.place_moment(key, {piece.name: value}, sizes)[piece.name].view(value.shape)

    def place_new(self, sharded: ShardedChunk, used: set[str]) -> None:
        """Moves state after a step, of which views are good for its block only."""
        self.place(sharded)

    def _point(self, sharded: ShardedChunk) -> None:
        chunk = sharded.chunk
        for piece, owned in sharded.pieces:
            owned.data = chunk.master_shard[piece.start : piece.end].view(owned.shape)
            state = self._inner.state.get(owned, {})
            for key, moment in chunk.moments.items():
                if piece.name in moment.starts and key in state:
                    start, shape = moment.starts[piece.name], state[key].shape
                    state[key] = moment.buffer[start : start + shape.numel()].view(shape)

    def hide(self, sharded: ShardedChunk) -> None:
        """Takes memory that may leave out of the optimizer's sight."""
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


def _kept_by(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Settings of a group that decide which state its parameters have."""
    return tuple(bool(group.get(option)) for option in ("amsgrad", "centered", "momentum"))
