"""Optimizer state of this rank's pieces, which is also accessible by model parameter.

A *piece* is the part of a parameter in this rank's shard. Between steps ``optimizer.param_groups``
contains the model's parameters, so ``optimizer.state[p]`` has to return the state of the piece.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gulliver.comm.collectives import Group, gather_objects
from gulliver.errors import GulliverError, first_difference
from gulliver.memory.buffers import OPTIMIZER_STATE, ShardPiece, moment_size
from gulliver.memory.manager import Manager
from gulliver.parallel.optimizer import is_counter
from gulliver.parallel.zero.chunks import ShardedChunk
from gulliver.parallel.zero.elementwise import makes_beside, state_sizes, steps_by_chunk


class StateByParameter(defaultdict[Any, Any]):
    """An optimizer's state by parameter; a piece shares its parameter's entry."""

    def __init__(self, parameter_of: Mapping[Any, nn.Parameter]) -> None:
        super().__init__(dict)
        self.parameter_of = parameter_of

    def __reduce__(self) -> Any:
        """Copies and pickles as a plain dict, as the copy of a piece would be a different key."""
        return defaultdict, (dict,), None, None, iter(self.items())

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.parameter_of.get(key, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self.parameter_of.get(key, key), value)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self.parameter_of.get(key, key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self.parameter_of.get(key, key), default)


# The groups of a sharded optimizer, whose options may change, but not their members.
#
# Steps use the pieces of the members at boost, so moving a member to another group would have no
# effect. Options must be equal on all ranks, because each steps its shards with its own. Both are
# checked with a few bytes in the vote before every step, see `reduce.py`.


DIGEST = 8
MOVED = (
    "the parameters in param_groups changed after boost; set groups up before, as only their "
    "options may change afterwards (lr = 0 stops a group)"
)


class OptimizerGroups:
    """The parameter groups of the user's optimizer.

    Between steps they contain the model's parameters; during a step, this rank's pieces.
    """

    def __init__(self, inner: torch.optim.Optimizer, group: Group) -> None:
        self._inner, self._group = inner, group
        self.given = [list(group["params"]) for group in inner.param_groups]
        # Names of the trained parameters of each group.
        self.names: list[list[str]] = []
        self._number_of: dict[str, int] = {}
        self._members: list[list[Any]] = []
        self._pieces: list[list[nn.Parameter]] = []
        self._by_chunk: list[list[list[nn.Parameter]]] = []

    def list_members(self, names: Mapping[nn.Parameter, str]) -> None:
        self.names = [[names[p] for p in found if p in names] for found in self.given]
        self._number_of = {name: n for n, found in enumerate(self.names) for name in found}

    def of(self, name: str) -> dict[str, Any]:
        return self._inner.param_groups[self._number_of[name]]

    def alike(self, names: Collection[str], pieces: Iterable[ShardPiece]) -> list[ShardPiece]:
        """Returns the pieces that belong to the same groups as these parameters."""
        numbers = {self._number_of[name] for name in names}
        return [piece for piece in pieces if self._number_of[piece.name] in numbers]

    def list_pieces(self, chunks: Sequence[ShardedChunk]) -> None:
        mine = {piece.name: owned for c in chunks for piece, owned in c.pieces}
        self._pieces = [[mine[n] for n in names if n in mine] for names in self.names]
        self._by_chunk = []
        for sharded in chunks:
            here = {piece.name: owned for piece, owned in sharded.pieces}
            self._by_chunk.append([[here[n] for n in m if n in here] for m in self.names])
        self.show_parameters()
        self._members = [list(group["params"]) for group in self._inner.param_groups]

    def show_pieces(self, numbers: Sequence[int]) -> None:
        """Puts this rank's pieces of some chunks, or of all, into the groups."""
        if len(numbers) in (0, len(self._by_chunk)):
            self._show(self._pieces)
        else:  # the same group of each chunk
            found = zip(*(self._by_chunk[n] for n in numbers), strict=True)
            self._show([list(chain(*pieces)) for pieces in found])

    def show_parameters(self) -> None:
        # A write to a piece would be known to one rank only, and race with its gather.
        self._show(self.given)

    def _show(self, members: Sequence[Sequence[nn.Parameter]]) -> None:
        for group, found in zip(self._inner.param_groups, members, strict=True):
            group["params"] = list(found)

    def capturing(self) -> set[Tensor]:
        """Returns pieces whose step counters must be on the device (capturable or fused)."""
        return {
            owned
            for group, pieces in zip(self._inner.param_groups, self._pieces, strict=True)
            for owned in pieces
            if group.get("capturable") or group.get("fused")
        }

    def is_moved(self) -> bool:
        groups = self._inner.param_groups
        return len(groups) != len(self._members) or any(
            len(group["params"]) != len(members) or not all(map(is_, group["params"], members))
            for group, members in zip(groups, self._members, strict=True)
        )

    def check_members(self) -> None:
        if self.is_moved():
            raise GulliverError(MOVED)

    def votes(self) -> list[int]:
        """Returns bytes whose maximum over the ranks reveals differences between ranks."""
        moved = self.is_moved()
        # The maxima of a byte and of its complement both equal this rank's only if all ranks have
        # the same.
        digest = hashlib.sha256(repr([] if moved else self.options()).encode()).digest()[:DIGEST]
        return [moved, *digest, *(255 - byte for byte in digest)]

    def check_votes(self, votes: Sequence[int]) -> None:
        """Raises on all ranks if the reduced votes show a change or a difference."""
        moved, digest, complement = votes[0], votes[1 : DIGEST + 1], votes[DIGEST + 1 :]
        if moved:
            raise GulliverError(MOVED)
        if any(a + b != 255 for a, b in zip(digest, complement, strict=True)):
            raise GulliverError(_difference(gather_objects(self.options(), self._group)))

    def options(self) -> dict[str, str]:
        # Options on a device are excluded, because the host would have to wait for them.
        known = self._inner.defaults
        return {
            f"{key} of the optimizer's group {number}": repr(_numbers(value))
            for number, group in enumerate(self._inner.param_groups)
            for key, value in group.items()
            if key in known
        }


def first_change(then: dict[str, str], now: dict[str, str]) -> tuple[str, str, str] | None:
    for name in then | now:
        if then.get(name) != now.get(name):
            return name, str(then.get(name)), str(now.get(name))
    return None


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return [_numbers(entry) for entry in value]
    return value if isinstance(value, Number) else None


def _difference(every: Sequence[dict[str, str]]) -> str:
    found = first_difference(every)
    if found is None:
        return "the options of the optimizer differ between ranks: set the same on all"
    rank, name, first, other = found
    return (
        f"{name} is {first} on rank 0 and {other} on rank {rank}: give schedulers the same "
        "numbers on all ranks, such as a loss averaged over them"
    )


def gradient_was_set(foreign: Sequence[str]) -> GulliverError:
    whose = f"the gradient of {foreign[0]!r}" if foreign else "a gradient on another rank"
    return GulliverError(
        f"{whose} was set: the optimizer steps what backward has reduced to the shards, and "
        "setting .grad is not supported with ZeRO: change the loss, or register_hook on the "
        "parameter"
    )


# The user's optimizer state of this rank's pieces, in the buffers of their chunks.
#
# If a `gulliver.memory.manager.Manager` holds a chunk's shard, moments and gradient, their memory
# moves. So the pieces that the optimizer steps, and its state, are views only within a block;
# outside, the pieces are NaN and the state is on meta, so that nothing is read by mistake.


Place = Callable[[ShardPiece, str, Tensor], Tensor | None]
_ALWAYS = nullcontext()
_CONSTANTS = torch.zeros_like, torch.ones_like, torch.full_like


# [Note: new state] In its first step an optimizer creates its state: one constant tensor for each
# parameter and kind, ``state["exp_avg"] = torch.zeros_like(p)``. For an entire chunk this would
# take as much as its moments, in addition to the budget. So such a constant takes no memory (one
# expanded element), and when it is stored in a parameter's state, its place in the chunk is filled
# immediately. The optimizer reads it from there and continues with the same values.
#
# This class is independent of what happens in a block, and when.
class _Stretched(TorchFunctionMode):
    """Creates constant tensors as expanded views of one element."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CONSTANTS:
            return func(*args, **kwargs)
        like, *rest = args
        kwargs.pop("memory_format", None)
        return func(like.new_empty(()), *rest, **kwargs).expand(like.shape)


class _NewState(dict[str, Any]):
    """A piece's state during creation; stores tensors in the chunk's buffers immediately."""

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
    """States of pieces on the device."""

    tiered = False

    def __init__(self, inner: torch.optim.Optimizer, groups: OptimizerGroups, whole: bool) -> None:
        self._inner, self._groups, self._whole = inner, groups, whole
        # Whether the optimizer may step some parameters in one call and others in the next.
        self.by_chunk = steps_by_chunk(inner)

    def opened(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Context in which the optimizer may update a chunk and add state to its buffers."""
        return _ALWAYS

    def shown(self, sharded: ShardedChunk, fill: bool = False) -> AbstractContextManager[None]:
        """Context in which a chunk's shard and state may be read or filled."""
        return _ALWAYS

    def making(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Context in which the optimizer steps a chunk and may create state."""
        return _ALWAYS

    def hide(self, sharded: ShardedChunk) -> None:
        """Removes the optimizer's references to memory that may be evicted."""

    def places(self, key: str, value: Any, owned: Tensor) -> bool:
        """Whether `place` moves a state entry: only if it is element-wise or factored."""
        if not self.by_chunk or not isinstance(value, Tensor) or is_counter(key, value, owned):
            return False
        fits = value.shape == owned.shape or self._whole
        return fits and value.dtype == owned.dtype and value.is_contiguous()

    def place(self, sharded: ShardedChunk) -> None:
        """Moves the state of a chunk's pieces into the chunk's buffers."""
        # Only state of known optimizers is moved, because they write it in place. Others may
        # replace theirs by new tensors in every step, so it is not moved.
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
                # Room for all pieces of these groups, each of which will have state of its size.
                pieces = self._groups.alike(entries, (p for p, _ in sharded.pieces))
                sizes = {p.name: p.numel for p in pieces}
            for name, view in sharded.chunk.place_moment(key, values, sizes).items():
                value, state = entries[name]
                if value.is_meta or view.data_ptr() != value.data_ptr():
                    state[key] = view.view(value.shape)

    def place_new(self, sharded: ShardedChunk, used: set[str]) -> None:
        if self.by_chunk and len(sharded.placed) < len(sharded.pieces):
            new = {piece.name for piece, _ in sharded.pieces} & used - sharded.placed
            if new:
                self.place(sharded)
                sharded.placed |= new  # some optimizers have no state

    def drop(self, chunks: Iterable[ShardedChunk]) -> None:
        self._inner.state.clear()
        for sharded in chunks:
            sharded.placed.clear()
            sharded.chunk.drop_moments()

    def written(self, chunks: Iterable[ShardedChunk]) -> Iterator[Tensor]:
        for sharded in chunks:
            yield sharded.chunk.master_shard
            for owned in sharded.owned:
                for value in self._inner.state.get(owned, {}).values():
                    if isinstance(value, Tensor):
                        yield value


class TieredStates(PieceStates):
    """States of pieces in managed memory tiers; the optimizer sees one chunk at a time."""

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
        with sharded.chunk.shown(fill):
            try:
                self._point(sharded)
                yield
            finally:
                self.hide(sharded)

    def making(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
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
        """Creates state directly in the chunk's buffers; see [Note: new state]."""
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
        """Copies new state to a buffer of the chunk; None if the buffer has no room."""
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
    return tuple(bool(group.get(option)) for option in ("amsgrad", "centered", "momentum"))
