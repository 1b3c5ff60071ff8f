"""The sharded state of a rank: chunks of a model, its pieces of them, groups and their state.

It says how parameters are cut into chunks, puts this rank's pieces where the user's optimizer has
had whole parameters, and keeps the two engines that move what chunks hold: `GradientReducer` and
`Gatherer`. Chunks may be exchanged for others, see `checkpoint.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakMethod
from zlib import crc32

import torch
from torch import Tensor, nn

from gulliver.comm import IDENTITY, Group, broadcast, group_rank, group_size
from gulliver.memory import (
    AccessRecord,
    BufferPool,
    Chunk,
    ChunkLayout,
    ManagedBufferPool,
    ManagedChunk,
    Manager,
    ShardPiece,
    any_read_lock,
)
from gulliver.parallel.zero._gatherer import Gatherer
from gulliver.parallel.zero._groups import OptimizerGroups
from gulliver.parallel.zero._reducer import GradientReducer
from gulliver.parallel.zero._sending import ZeroWires
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._sizes import TensorSize, chunk_layouts, shard_dtype
from gulliver.parallel.zero._state_keys import StateByParameter
from gulliver.parallel.zero._tiers import PieceStates, TieredStates


@dataclass(frozen=True)
class ZeroOptions:
    """How chunks are cut, moved and stepped.

    Attributes:
        chunk_bytes: size of a chunk, in bytes.
        max_norm: global norm that gradients are clipped to in every step; infinite for none.
        assume_elementwise: whether to take the user's word for an optimizer that is not known.
        assume_per_parameter: the same, that it looks at one parameter at a time, as Muon does.
        ahead: chunks that stage 3 gathers ahead of the one in use.
        overlap: False waits for every collective at once, for comparison.
        step_in_backward: whether chunks are stepped during backward, as their gradients come. With
            `max_norm`, and with fp16, all gradients are waited for; see `step.py`.
        order: names of the parameters in the order of use, in which chunks are cut and gathered.
        uses: names in the order in which a forward is expected to read them, for predictions.
        unequal: whether memory was planned for steps of unequal work on the ranks.
        wires: formats that chunks are sent in.
    """

    chunk_bytes: int = 4 * 2**20
    max_norm: float = math.inf
    assume_elementwise: bool = False
    assume_per_parameter: bool = False
    ahead: int = 2
    overlap: bool = True
    step_in_backward: bool = False
    order: Sequence[str] = ()
    uses: Sequence[str] = ()
    unequal: bool = False
    wires: ZeroWires = field(default_factory=ZeroWires)


class ShardedState:
    """Chunks of a model's parameters over a group of ranks."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        names: Mapping[nn.Parameter, str],
        frozen: Mapping[nn.Parameter, str],
        stage: int,
        group: Group,
        options: ZeroOptions,
        manager: Manager | None = None,
        whole: bool = False,
    ) -> None:
        """Cuts parameters into chunks.

        Args:
            inner: the user's optimizer; its groups are changed to hold this rank's pieces.
            names: trainable parameters of the model in its order, with their names.
            frozen: parameters that are not trained but sharded, with their names.
            stage: stage of ZeRO, 0 to 3, see `ZeroOptimizer`.
            group: process group to shard over; None for all ranks.
            options: how chunks are cut and moved.
            manager: memory manager that places chunks in tiers (stage 3); None keeps them here.
            whole: whether no trained parameter may be cut; see the note in `memory._layout`.
        """
        self.inner, self.names, self.frozen_names = inner, dict(names), dict(frozen)
        self.stage, self.group, self.options, self.whole = stage, group, options, whole
        self.manager = manager
        self.rank, self.size = group_rank(group), group_size(group)
        self.groups = OptimizerGroups(inner, group)
        # Frozen parameters that the optimizer was given, which may be unfrozen later.
        self.frozen_trainable = {
            p: self.frozen_names[p] for p in chain(*self.groups.given) if p in frozen
        }
        self.groups.list_members(self.names)
        self._parameter_of: dict[nn.Parameter, nn.Parameter] = {}
        # Lends and counts the buffers of chunks.
        self.pool: BufferPool
        self.states: PieceStates
        if manager is None:
            self.pool = BufferPool()
            inner.state = StateByParameter(self._parameter_of)
            self.states = PieceStates(inner, self.groups, whole)
        else:  # state lies on meta between steps: the users' reads would find nothing
            self.pool = ManagedBufferPool(manager)
            self.states = TieredStates(inner, self.groups, whole, manager)
            # A method, held weakly: the manager may outlive the optimizer.
            release = WeakMethod(self._release_idle)
            manager.release_with(lambda: (found := release()) and found())
        # All chunks, in the order of use, and those of trained parameters.
        self.all_chunks: list[ShardedChunk] = []
        self.chunks: list[ShardedChunk] = []
        # In tiers on one rank a manager fetches ahead what is wanted, and nobody else waits.
        alone = self.states.tiered and self.size == 1
        self.record = AccessRecord()
        self.gatherer = Gatherer(
            stage == 3,
            group,
            self.record,
            0 if alone else options.ahead,
            options.overlap,
            every=not alone,
            tight=self.states.tiered,
        )
        self.reducer = GradientReducer(stage, group, self.record, options.overlap, options.wires)
        self.adopt(
            [self._placed(*found) for found in self.ordered(options.order, options.chunk_bytes)]
        )

    @property
    def parts(self) -> int:
        """Shards of a chunk."""
        return self.size if self.stage else 1

    @property
    def part(self) -> int:
        """Number of the shard of each chunk that this rank owns."""
        return self.rank if self.parts > 1 else 0

    @property
    def has_whole(self) -> bool:
        """Whether each piece that is stepped is a whole parameter."""
        return self.whole or self.parts == 1

    # Chunks.

    def _kinds(self) -> Iterator[tuple[bool, dict[nn.Parameter, str]]]:
        """Kinds of parameters that share no chunk, and whether they are trained now."""
        yield True, self.names
        yield False, self.frozen_trainable
        yield False, {p: n for p, n in self.frozen_names.items() if p not in self.frozen_trainable}

    def layouts(
        self, names: Mapping[nn.Parameter, str], chunk_bytes: int
    ) -> Iterator[tuple[ChunkLayout, dict[str, nn.Parameter]]]:
        """Cuts parameters in their order into chunks of one dtype and device each."""
        may_step = self.names.keys() | self.frozen_trainable.keys()
        sizes = [
            TensorSize(n, p.numel(), p.dtype, p.device, whole=self.whole and p in may_step)
            for p, n in names.items()
        ]
        parameters = {name: parameter for parameter, name in names.items()}
        for layout, _ in chunk_layouts(sizes, chunk_bytes, self.stage, self.size):
            yield layout, parameters

    def ordered(
        self, order: Sequence[str], chunk_bytes: int
    ) -> list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]]:
        """Layout and parameters of all chunks in the order of use, and whether each is trained.

        Parameters that `order` does not name come last. Chunks are of this size from here on.
        """
        self.chunk_bytes = chunk_bytes
        place = {name: number for number, name in enumerate(order)}
        found: list[tuple[ChunkLayout, dict[str, nn.Parameter], bool]] = []
        for trained, names in self._kinds():
            inorder = dict(sorted(names.items(), key=lambda item: place.get(item[1], len(place))))
            found += [(*chunk, trained) for chunk in self.layouts(inorder, chunk_bytes)]
        found.sort(key=lambda chunk: min(place.get(s.name, len(place)) for s in chunk[0].slots))
        return found

    def _placed(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], trained: bool
    ) -> ShardedChunk:
        """Moves parameters, equal on all ranks from here on, into a chunk."""
        chunk = self._new_chunk(layout, parameters)
        broadcast(chunk.data, 0, self.group)
        return self._sharded(chunk, trained)

    def replaced(
        self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], trained: bool
    ) -> ShardedChunk:
        """Moves parameters of other chunks into a new one; reading them gathers them."""
        return self._sharded(self._new_chunk(layout, parameters), trained)

    def _new_chunk(self, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter]) -> Chunk:
        if isinstance(self.pool, ManagedBufferPool):
            return ManagedChunk(layout, parameters, self.part, self.pool)
        return Chunk(layout, parameters, self.part, self.pool)

    def _sharded(self, chunk: Chunk, trained: bool) -> ShardedChunk:
        """Makes a chunk's shard, and this rank's pieces of it as parameters for the optimizer."""
        layout = chunk.layout
        wire = self.options.wires.of_parameters(layout.parts, layout.part_size, chunk.dtype)
        separate = self.stage == 3 or wire is not IDENTITY
        chunk.set_master_shard(shard_dtype(chunk.dtype, trained), separate)
        if wire is not IDENTITY:
            chunk.pack_parameters(wire, self.stage < 3)
        if self.stage == 3:
            chunk.release()
        sharded = ShardedChunk(chunk, [], trained)
        if trained:
            self._cut_pieces(sharded)
        return sharded

    def _cut_pieces(self, sharded: ShardedChunk) -> None:
        """Makes parameters of this rank's pieces of a chunk, for the optimizer."""
        chunk = sharded.chunk
        with chunk.opened():
            sharded.own(
                (piece, nn.Parameter(self._cut(chunk, piece)))
                for piece in chunk.layout.pieces(chunk.part)
            )
            self.states.hide(sharded)
            self._parameter_of.update((q, chunk.parameters[p.name]) for p, q in sharded.pieces)

    def _cut(self, chunk: Chunk, piece: ShardPiece) -> Tensor:
        run = chunk.master_shard[piece.start : piece.end]
        # What is not cut has its own shape: some optimizers look at it.
        return run.view(chunk.shapes[piece.name]) if self.has_whole else run

    def adopt(self, chunks: Sequence[ShardedChunk]) -> None:
        """Takes chunks, in the order of use, in place of any others."""
        for old in self.all_chunks:
            old.chunk.discard()
        self.all_chunks = list(chunks)
        # Optimizers of one model count from different numbers: collectives are known by them.
        first = crc32(chunks[0].chunk.layout.slots[0].name.encode()) if chunks else 0
        for index, sharded in enumerate(chunks):
            sharded.index, sharded.number = index, first + index
        self.gatherer.take(self.all_chunks)
        self._list_trained()

    def train(self, frozen: Sequence[ShardedChunk]) -> None:
        """Begins to train chunks of frozen parameters; see `train_unfrozen`."""
        self.groups.check_members()  # the groups are filled again
        for sharded in frozen:
            self.gatherer.release(sharded)
            sharded.chunk.widen_master_shard(shard_dtype(sharded.chunk.dtype, trained=True))
            sharded.trained = True
            self._cut_pieces(sharded)
            for name, parameter in sharded.chunk.parameters.items():
                self.names[parameter] = name
                vars(parameter)["_boosted"] = True
                del self.frozen_trainable[parameter], self.frozen_names[parameter]
        self.groups.list_members(self.names)
        self._list_trained()

    def _list_trained(self) -> None:
        self.chunks = [c for c in self.all_chunks if c.trained]
        mine = {owned for c in self.chunks for _, owned in c.pieces}
        for old in self._parameter_of.keys() - mine:
            del self._parameter_of[old]
        self.groups.list_pieces(self.chunks)
        self.reducer.take(self.chunks)

    def _release_idle(self) -> None:
        """Ends uses of the manager's objects that can be begun again later."""
        # With other ranks no chunk can come again by itself: they would not take part.
        if self.gatherer.alone:
            self.gatherer.release_idle()
        self.reducer.release_idle()

    def step_groups(self) -> list[list[int]]:
        """Numbers of the chunks that are stepped together.

        One by one where a chunk's gather goes on while the next is stepped, where a checkpoint may
        still be copying the others, and where chunks lie in tiers; else all in one call, which an
        optimizer that is not known gets always: it may look at all that it has at once, or count
        its calls.
        """
        numbers = list(range(len(self.chunks)))
        gathers = self.stage in (1, 2) and self.size > 1
        apart = gathers or any_read_lock() or self.states.tiered
        return [[n] for n in numbers] if self.states.by_chunk and apart else [numbers]

    def changed(self) -> Iterator[Tensor]:
        """Tensors that steps write, for a checkpoint: groups show parameters, which may be away."""
        if not self.states.tiered:
            yield from self.states.written(self.chunks)
            yield from (c.chunk.data for c in self.chunks if self.stage < 3)

    # What users write to parameters.

    def take_writes(self) -> None:
        """Brings what was written to the parameters, on all ranks alike, to the shards."""
        self.gatherer.finish_all()
        for sharded in self.all_chunks:
            if sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()

    def publish_exact(self) -> None:
        """Sends what packed changes have lost so far to all ranks; every rank calls it."""
        if self.stage < 3 and any(c.chunk.wire is not IDENTITY for c in self.all_chunks):
            self.publish()

    def publish_masters(self) -> None:
        """Rounds parameters from float32 copies that were loaded; every rank calls it."""
        if any(c.chunk.has_master for c in self.chunks):
            self.publish()

    def publish(self) -> None:
        """Sends what the shards hold now to all ranks; every rank calls it."""
        for sharded in self.all_chunks:
            if self.stage < 3:
                self.gatherer.start(sharded, exact=True)
                self.gatherer.finish(sharded)
        torch.autograd.graph.increment_version([*self.names, *self.frozen_names])
        self.gatherer.copies.remember()
