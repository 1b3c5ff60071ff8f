"""The sharded state of a rank: chunks of a model, its pieces of them, groups and their state.

It says how parameters are cut into chunks, puts this rank's pieces where the user's optimizer has
had whole parameters, and keeps the two engines that move what chunks hold: `GradientReducer` and
`Gatherer`. Chunks may be exchanged for others, see `_relayout.py`; who uses the state asks it anew.

It does not know of steps, nor who takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakMethod
from zlib import crc32

import torch
from torch import Tensor, nn

from gulliver.comm import IDENTITY, Group, broadcast, group_rank, group_size
from gulliver.memory import (
    OPTIMIZER_STATE,
    BufferPool,
    Chunk,
    ChunkLayout,
    LentBuffers,
    Manager,
    Piece,
    PlacedChunk,
    any_read_lock,
    moment_size,
)
from gulliver.parallel._optimizer import is_counter
from gulliver.parallel.zero._elementwise import makes_beside, state_sizes, steps_by_chunk
from gulliver.parallel.zero._gatherer import Gatherer
from gulliver.parallel.zero._groups import GroupWatch
from gulliver.parallel.zero._reducer import GradientReducer
from gulliver.parallel.zero._sending import ZeroWires
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._sizes import TensorSize, chunk_layouts, shard_dtype
from gulliver.parallel.zero._state_keys import StateByParameter
from gulliver.parallel.zero._tiers import Tiers

_ALWAYS = nullcontext()


class ShardedState:
    """Chunks of a model's parameters over a group of ranks."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        frozen: Mapping[nn.Parameter, str],
        stage: int,
        chunk_bytes: int,
        group: Group,
        ahead: int,
        overlap: bool,
        manager: Manager | None = None,
        whole: bool = False,
        order: Sequence[str] = (),
        wires: ZeroWires | None = None,
    ) -> None:
        self.wires = wires or ZeroWires()
        self.inner, self.names, self.frozen_names = inner, dict(names), dict(frozen)
        self.stage, self.chunk_bytes, self.group = stage, chunk_bytes, group
        self.ahead, self.overlap, self.whole = ahead, overlap, whole
        self.rank, self.size = group_rank(group), group_size(group)
        self._given = [list(group["params"]) for group in inner.param_groups]
        # Frozen parameters that the optimizer was given, which may be unfrozen later.
        self.sleeping = {p: self.frozen_names[p] for p in chain(*self._given) if p in frozen}
        self.list_members()
        # Tells changed groups.
        self.watched = GroupWatch(inner, group)
        self.manager, self.inside, self.unequal = manager, "", False
        # Lends and counts the buffers of chunks.
        self.pool = BufferPool() if manager is None else LentBuffers(manager)
        self.tiers = None if manager is None else Tiers(inner)
        self.parameter_of: dict[nn.Parameter, nn.Parameter] = {}
        if self.tiers is None:  # there state lies on meta between steps
            inner.state = StateByParameter(self.parameter_of)
        self.by_chunk = steps_by_chunk(inner)
        # Names in the order in which a forward is expected to read them, before it is known.
        self.uses: Sequence[str] = ()
        # Called with the name of a parameter whose gradient has come.
        self.on_gradient: Callable[[str], None] | None = None
        # All chunks, in the order of use.
        self.everything: list[ShardedChunk] = []
        # Those of trained parameters.
        self.chunks: list[ShardedChunk] = []
        self._engines: tuple[GradientReducer, Gatherer] | None = None
        if manager is not None:
            relieve = WeakMethod(self._relieve)
            manager.relieve = lambda: (found := relieve()) and found()
        self.adopt([self._placed(*found) for found in self.ordered(order, chunk_bytes)])

    @property
    def parts(self) -> int:
        """Shards of a chunk."""
        return self.size if self.stage else 1

    @property
    def part(self) -> int:
        """Number of the shard of each chunk that this rank owns."""
        return self.rank if self.parts > 1 else 0

    @property
    def reducer(self) -> GradientReducer:
        """Moves gradients to the shards."""
        assert self._engines is not None
        return self._engines[0]

    @property
    def gatherer(self) -> Gatherer:
        """Moves parameters from the shards."""
        assert self._engines is not None
        return self._engines[1]

    @property
    def has_whole(self) -> bool:
        """Whether each piece that is stepped is a whole parameter."""
        return self.whole or self.parts == 1

    def list_members(self) -> None:
        """Lists the trained parameters of each group of the optimizer."""
        # Names of the trained parameters of each group.
        self.members = [[self.names[p] for p in g if p in self.names] for g in self._given]
        self._group_of = {name: n for n, found in enumerate(self.members) for name in found}

    # Chunks.

    def kinds(self) -> Iterator[tuple[bool, dict[nn.Parameter, str]]]:
        """Kinds of parameters that share no chunk, and whether they are trained now."""
        yield True, self.names
        yield False, self.sleeping
        yield False, {p: n for p, n in self.frozen_names.items() if p not in self.sleeping}

    def home_dtype(self, dtype: torch.dtype, trained: bool) -> torch.dtype:
        """Dtype of the shards of parameters of a dtype."""
        return shard_dtype(dtype, trained)

    def layouts(
        self, names: Mapping[nn.Parameter, str], chunk_bytes: int
    ) -> Iterator[tuple[ChunkLayout, dict[str, nn.Parameter]]]:
        """Cuts parameters in their order into chunks of one dtype and device each."""
        sizes = [
            TensorSize(n, p.numel(), p.dtype, p.device, whole=self.whole and self._may_step(p))
            for p, n in names.items()
        ]
        parameters = {name: parameter for parameter, name in names.items()}
        for layout, _ in chunk_layouts(sizes, chunk_bytes, self.stage, self.size):
            yield layout, parameters

    def ordered(
        self, order: Sequence[str], chunk_bytes: int
    ) -> list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]]:
        """Layout and parameters of all chunks in the order of use, and whether each is trained."""
        place = {name: number for number, name in enumerate(order)}
        found: list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]] = []
        for trained, names in self.kinds():
            inorder = dict(sorted(names.items(), key=lambda item: place.get(item[1], len(place))))
            found += [(*chunk, trained) for chunk in self.layouts(inorder, chunk_bytes)]
        found.sort(key=lambda chunk: min(place.get(s.name, len(place)) for s in chunk[0].slots))
        return found

    def _may_step(self, parameter: nn.Parameter) -> bool:
        return parameter in self.names or parameter in self.sleeping

    def _placed(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], trained: bool
    ) -> ShardedChunk:
        """Moves parameters, equal on all ranks from here on, into a chunk."""
        chunk = self.new_chunk(layout, parameters)
        broadcast(chunk.data, 0, self.group)
        return self.settled(chunk, trained)

    def new_chunk(self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter]) -> Chunk:
        """Moves parameters into a chunk."""
        if isinstance(self.pool, LentBuffers):
            return PlacedChunk(layout, parameters, self.part, self.pool)
        return Chunk(layout, parameters, self.part, self.pool)

    def settled(self, chunk: Chunk, trained: bool) -> ShardedChunk:
        """Makes a chunk's shard, and this rank's pieces of it as parameters for the optimizer."""
        wire = self.wires.of_parameters(chunk.layout.parts, chunk.layout.part_size, chunk.dtype)
        separate = self.stage == 3 or wire is not IDENTITY
        chunk.settle_home(self.home_dtype(chunk.dtype, trained), separate, trained)
        if wire is not IDENTITY:
            chunk.pack_parameters(wire, self.stage < 3)
        if self.stage == 3:
            chunk.release()
        sharded = ShardedChunk(chunk, [], trained)
        if trained:
            self.cut_pieces(sharded)
        return sharded

    def cut_pieces(self, sharded: ShardedChunk) -> None:
        """Makes parameters of this rank's pieces of a chunk, for the optimizer."""
        chunk = sharded.chunk
        with chunk.opened():
            sharded.own(
                (piece, nn.Parameter(self._cut(chunk, piece)))
                for piece in chunk.layout.pieces(chunk.part)
            )
            if self.tiers is not None:
                self.tiers.hide(sharded)
            self.parameter_of.update((q, chunk.parameters[p.name]) for p, q in sharded.pieces)

    def _cut(self, chunk: Chunk, piece: Piece) -> Tensor:
        run = chunk.home[piece.start : piece.end]
        # What is not cut has its own shape: some optimizers look at it.
        return run.view(chunk.shapes[piece.name]) if self.has_whole else run

    def opened(self, *chunks: ShardedChunk) -> AbstractContextManager[None]:
        """Block in which the optimizer can step a chunk, and new state of it can be placed."""
        return _ALWAYS if self.tiers is None else self.tiers.opened(*chunks)

    def shown(self, sharded: ShardedChunk, fill: bool = False) -> AbstractContextManager[None]:
        """Block in which a chunk's shard and state can be read, or filled, wherever they lie."""
        return _ALWAYS if self.tiers is None else self.tiers.shown(sharded, fill)

    def adopt(self, chunks: Sequence[ShardedChunk]) -> None:
        """Takes chunks, in the order of use, as those that there are."""
        steps, lent, lost = 0, [], dict[str, Tensor]()
        if self._engines is not None:
            self.reducer.close()
            lost = self.reducer.sender.lost()
            steps, lent = self.gatherer.step, self.gatherer.copies.lent
            for old in self.everything:
                old.chunk.discard()
        self.everything = list(chunks)
        # Optimizers of one model count from different numbers: by them collectives are told apart.
        first = crc32(chunks[0].chunk.layout.slots[0].name.encode()) if chunks else 0
        for number, sharded in enumerate(chunks, first):
            sharded.number = number
        self.list_chunks()
        # In tiers on one rank a manager brings ahead what is wanted, and nobody else waits.
        ahead = 0 if self._alone else self.ahead
        gatherer = Gatherer(
            self.everything,
            self.stage == 3,
            self.group,
            ahead,
            self.overlap,
            every=not self._alone,
            tight=self.tiers is not None,
        )
        gatherer.step, gatherer.copies.lent = steps, lent
        reducer = GradientReducer(self.chunks, self.stage, self.group, self.overlap, self.wires)
        reducer.noted, reducer.record = self.on_gradient, gatherer.note
        reducer.sender.take_lost(lost)
        self._engines = reducer, gatherer
        self.list_pieces()

    @property
    def _alone(self) -> bool:
        return self.tiers is not None and self.size == 1

    def _relieve(self) -> None:
        """Ends uses of the manager's objects that can be begun again later."""
        if self._engines is None:
            return
        if (
            self.gatherer.alone
        ):  # with others no chunk can come again by itself: they would not take part
            self.gatherer.relieve()
        self.reducer.relieve()

    def list_chunks(self) -> None:
        """Lists the chunks that are trained."""
        self.chunks = [c for c in self.everything if c.trained]

    def end_record(self) -> None:
        """Stops recording once a step has been seen."""
        record = self.gatherer.record
        if not record.complete and record.events:
            record.complete, self.reducer.record = True, None

    def notify(self, on_gradient: Callable[[str], None]) -> None:
        """Lets somebody know which gradients come."""
        self.on_gradient = self.reducer.noted = on_gradient

    # Groups of the optimizer.

    def group_of(self, name: str) -> int:
        """Number of the optimizer's group that a trained parameter is in."""
        return self._group_of[name]

    def group_names(self) -> list[list[str]]:
        """Names of the trained parameters of each group."""
        return [list(members) for members in self.members]

    def list_pieces(self) -> None:
        """Makes the lists of pieces that the optimizer's groups are given, once for all steps."""
        mine = {piece.name: owned for c in self.chunks for piece, owned in c.pieces}
        for old in self.parameter_of.keys() - mine.values():
            del self.parameter_of[old]
        self._every = [[mine[n] for n in members if n in mine] for members in self.members]
        self._by_chunk = []
        for sharded in self.chunks:
            here = {piece.name: owned for piece, owned in sharded.pieces}
            self._by_chunk.append([[here[n] for n in m if n in here] for m in self.members])
        self.show_parameters()
        self.watched.remember()

    def show_pieces(self, number: int | None = None) -> None:
        """Puts this rank's pieces of one chunk, or of all, into the optimizer's groups."""
        self._show(self._every if number is None else self._by_chunk[number])

    def show_parameters(self) -> None:
        """Puts the model's parameters into the optimizer's groups, where users look and write."""
        # A write to a piece would be known on one rank only, and race with its gather.
        self._show(self._given)

    def _show(self, members: Sequence[Sequence[nn.Parameter]]) -> None:
        for group, found in zip(self.inner.param_groups, members, strict=True):
            group["params"] = list(found)

    def turns(self) -> list[list[int]]:
        """Numbers of the chunks that are stepped together."""
        # One by one where a chunk's gather goes on while the next is stepped, where a checkpoint
        # may still be copying the others, and where chunks lie in tiers; else all in one call,
        # which an optimizer that is not known gets always: it may look at all that it has at once,
        # or count its calls.
        numbers = list(range(len(self.chunks)))
        apart = (
            (self.stage in (1, 2) and self.size > 1) or any_read_lock() or self.tiers is not None
        )
        return [[n] for n in numbers] if self.by_chunk and apart else [numbers]

    # Optimizer state.

    def place_state(self, sharded: ShardedChunk) -> None:
        """Moves the state of a chunk's pieces into buffers of the chunk; see `Chunk`."""
        # Only that of known optimizers is moved: they write their state in place. Others may
        # exchange theirs for new tensors in every step, so it stays where it is.
        found: dict[str, dict[str, tuple[Tensor, Any]]] = {}
        for piece, owned in sharded.pieces:
            state = self.inner.state.get(owned)
            for key, value in state.items() if state else ():
                if self.places(key, value, owned):
                    found.setdefault(key, {})[piece.name] = value, state
                    sharded.placed.add(piece.name)
        for key, entries in found.items():
            values = {name: value for name, (value, _) in entries.items()}
            sizes = {name: value.numel() for name, value in values.items()}
            if not self.whole:
                # Room for all: each will have state of its own size.
                inside = {self._group_of[name] for name in entries}
                pieces = [p for p, _ in sharded.pieces if self._group_of[p.name] in inside]
                sizes = {p.name: p.numel for p in pieces}
            for name, view in sharded.chunk.place_moment(key, values, sizes).items():
                value, state = entries[name]
                if value.is_meta or view.data_ptr() != value.data_ptr():
                    state[key] = view.view(value.shape)

    def making_state(self, sharded: ShardedChunk) -> AbstractContextManager[None]:
        """Block in which the optimizer steps a chunk in tiers, and may make its first state."""
        assert self.tiers is not None, "elsewhere the optimizer makes it, and it is moved then"
        new = {
            owned: piece
            for piece, owned in sharded.pieces
            if owned.grad is not None and not self.inner.state.get(owned)
        }
        if not new:
            return _ALWAYS
        if not makes_beside(self.inner):
            return self.tiers.making(new, partial(self._place_first, sharded))
        assert self.manager is not None
        groups = self.inner.param_groups
        nbytes = sum(
            moment_size(state_sizes(self.inner, groups[self._group_of[piece.name]], owned.shape))
            * owned.itemsize
            for owned, piece in new.items()
        )
        return self.manager.reserved(nbytes, OPTIMIZER_STATE) if nbytes else _ALWAYS

    def _place_first(
        self, sharded: ShardedChunk, piece: Piece, key: str, value: Tensor
    ) -> Tensor | None:
        """Copies new state of a piece to a buffer of its chunk; None where it has no room."""
        chunk, groups = sharded.chunk, self.inner.param_groups
        moment = chunk.moments.get(key)
        if moment is not None and piece.name not in moment.starts:
            return None
        mine = _kept_by(groups[self._group_of[piece.name]])
        sizes = {
            p.name: p.numel
            for p, _ in sharded.pieces
            if _kept_by(groups[self._group_of[p.name]]) == mine
        }
        sharded.placed.add(piece.name)
        return chunk.place_moment(key, {piece.name: value}, sizes)[piece.name].view(value.shape)

    def places(self, key: str, value: Any, owned: Tensor) -> bool:
        """Whether `place_state` moves an entry: it has an element for each, or factors them."""
        if not self.by_chunk or not isinstance(value, Tensor) or is_counter(key, value, owned):
            return False
        fits = value.shape == owned.shape or self.whole
        return fits and value.dtype == owned.dtype and value.is_contiguous()

    def place_new_state(self, sharded: ShardedChunk, used: set[str]) -> None:
        """Moves state after a step, where pieces were stepped that had no state before."""
        if self.tiers is not None:
            self.place_state(sharded)
        elif len(sharded.placed) < len(sharded.pieces) and self.by_chunk:
            new = {piece.name for piece, _ in sharded.pieces} & used - sharded.placed
            if new:
                self.place_state(sharded)
                sharded.placed |= new  # some optimizers keep nothing

    def drop_state(self) -> None:
        """Forgets all state of the optimizer."""
        self.inner.state.clear()
        for sharded in self.chunks:
            sharded.placed.clear()
            sharded.chunk.drop_moments()

    def capturing(self) -> set[Tensor]:
        """Pieces whose counters kernels read: torch wants them beside the parameter."""
        return {
            owned
            for group, pieces in zip(self.inner.param_groups, self._every, strict=True)
            for owned in pieces
            if group.get("capturable") or group.get("fused")
        }

    def written(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Tensors that a step of chunks writes; a checkpoint may be copying them."""
        for number in numbers:
            sharded = self.chunks[number]
            yield sharded.chunk.home
            for owned in sharded.owned:
                for value in self.inner.state.get(owned, {}).values():
                    if isinstance(value, Tensor):
                        yield value

    def changed(self) -> Iterator[Tensor]:
        """Tensors that steps write, for a checkpoint: groups show parameters, which may be away."""
        if self.tiers is None:
            yield from self.written(range(len(self.chunks)))
            yield from (c.chunk.data for c in self.chunks if self.stage < 3)

    # What users write to parameters.

    def take_writes(self) -> None:
        """Brings what was written to the parameters, on all ranks alike, to the shards."""
        self.gatherer.finish_all()
        for sharded in self.everything:
            if sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()

    def publish_exact(self) -> None:
        """Sends what packed changes have lost so far to all ranks; every rank calls it."""
        if self.stage < 3 and any(c.chunk.wire is not IDENTITY for c in self.everything):
            self.publish()

    def publish_masters(self) -> None:
        """Rounds parameters from float32 copies that were loaded; every rank calls it."""
        if any(c.chunk.has_master for c in self.chunks):
            self.publish()

    def publish(self) -> None:
        """Sends what the shards hold now to all ranks; every rank calls it."""
        for sharded in self.everything:
            if self.stage < 3:
                self.gatherer.start(sharded, exact=True)
                self.gatherer.finish(sharded)
        torch.autograd.graph.increment_version([*self.names, *self.frozen_names])
        self.gatherer.copies.remember()


def _kept_by(group: Mapping[str, Any]) -> tuple[bool, ...]:
    """Settings of a group that decide which state its parameters have."""
    return tuple(bool(group.get(option)) for option in ("amsgrad", "centered", "momentum"))
