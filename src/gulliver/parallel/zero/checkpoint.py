"""Saves and loads the state of a ZeRO optimizer and its model, and re-partitions chunks.

Full optimizer state, by parameter name, is independent of the number of ranks and the chunk size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gulliver.comm.collectives import Group, all_gather, gather_objects
from gulliver.errors import GulliverError
from gulliver.memory.buffers import Presence, ShardPiece
from gulliver.memory.parts import Part, part_of, region_of, whole_shape
from gulliver.memory.pending import before_any_write, before_write
from gulliver.parallel.optimizer import (
    Counter,
    Leaf,
    OptimizerCheckpoint,
    Saved,
    State,
    is_counter,
    persistent_buffers,
    refuse_extra_state,
)
from gulliver.parallel.zero.chunks import ShardedChunk, shard_dtype
from gulliver.parallel.zero.state import ShardedState, train_unfrozen

if TYPE_CHECKING:
    from gulliver.parallel.zero.optimizer import ZeroOptimizer


MASTER = "master"
"""State key of a 16-bit parameter's float32 master weights."""


def gather_state(shards: ShardedState, keep: bool) -> State:
    counters, entries = stream_state(shards, shards.chunks)
    state = counters
    for name, key, whole in entries:
        if keep:
            state.setdefault(name, {})[key] = whole.cpu().clone()
    return state if keep else {}


def stream_state(
    shards: ShardedState, chunks: Sequence[ShardedChunk]
) -> tuple[State, Iterator[tuple[str, str, Tensor]]]:
    """Returns counters, and an iterator of name, kind and full value (collective)."""
    # Counters include state that is not element-wise. A value is valid until the next one.
    optimizer, group = shards.inner, shards.group
    counters: State = {}
    present = {(name, MASTER) for c in chunks if c.chunk.has_master for name in c.chunk.parameters}
    for sharded in chunks:
        with shards.states.shown(sharded) if shards.whole else nullcontext():
            for piece, owned in sharded.pieces:
                for key, value in optimizer.state.get(owned, {}).items():
                    if is_counter(key, value, owned):
                        counters.setdefault(piece.name, {})[key] = value
                    elif shards.has_whole and not _is_elementwise(value, owned):
                        # An optimizer of full tensors keeps state of other shapes, and None.
                        counters.setdefault(piece.name, {})[key] = _on_cpu(value)
                    elif value is not None:
                        _check_elementwise(piece.name, key, value, owned)
                        present.add((piece.name, key))
    parts = gather_objects((counters, present), group)
    # Pieces of one parameter are stepped together, so any rank's counters are the parameter's.
    state: State = {name: dict(values) for part, _ in parts for name, values in part.items()}
    everywhere: set[tuple[str, str]] = set().union(*(found for _, found in parts))
    return state, _entries(shards, chunks, everywhere)


def _on_cpu(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def _entries(
    shards: ShardedState, chunks: Sequence[ShardedChunk], present: set[tuple[str, str]]
) -> Iterator[tuple[str, str, Tensor]]:
    for key in sorted({key for _, key in present}):
        for sharded in chunks:
            names = [name for name in sharded.chunk.parameters if (name, key) in present]
            if not names:
                continue
            with shards.states.shown(sharded):
                whole = _gathered(shards.inner, sharded, key, shards.group)
            views = sharded.chunk.named_views(whole)
            for name in names:
                yield name, key, views[name]


def scatter_state(shards: ShardedState, state: State) -> None:
    optimizer, capturing = shards.inner, shards.groups.capturing()
    shards.states.drop(shards.chunks)
    for sharded in shards.chunks:
        with shards.states.opened(sharded):
            for piece, owned in sharded.pieces:
                if piece.name in state:
                    found = _scattered(state[piece.name], sharded, piece, owned, owned in capturing)
                    optimizer.state[owned] = found
            shards.states.place(sharded)


def _scattered(
    state: Mapping[str, Any],
    sharded: ShardedChunk,
    piece: ShardPiece,
    owned: Tensor,
    captured: bool,
) -> dict[str, Any]:
    whole, found = sharded.chunk.parameters[piece.name], dict[str, Any]()
    for key, value in state.items():
        if key == MASTER:
            owned.detach().copy_(run_of(value, piece, owned))
        elif not isinstance(value, Tensor):
            found[key] = value
        elif is_counter(key, value, whole):
            # torch puts counters on the parameter's device only if kernels read them.
            found[key] = value.to(owned.device if captured else value.device).clone()
        elif value.shape != whole.shape and owned.shape == whole.shape:
            found[key] = value.to(owned.device).clone()  # from an optimizer of full tensors
        else:
            found[key] = run_of(value, piece, owned).to(owned.device).clone()
    return found


def run_of(whole: Tensor, piece: ShardPiece, owned: Tensor) -> Tensor:
    return whole.reshape(-1)[piece.offset : piece.offset + piece.numel].view(owned.shape)


def _is_elementwise(value: Any, owned: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.shape == owned.shape and value.dtype == owned.dtype


def _check_elementwise(name: str, key: str, value: Tensor, owned: Tensor) -> None:
    if not _is_elementwise(value, owned):
        raise GulliverError(
            f"the optimizer keeps {key!r} of {name!r} as {tuple(value.shape)} {value.dtype}, but "
            f"the parameter is {tuple(owned.shape)} {owned.dtype}: state that is not element-wise "
            "cannot be saved"
        )


def _gathered(
    optimizer: torch.optim.Optimizer,
    sharded: ShardedChunk,
    key: str,
    group: Group,
) -> Tensor:
    if key == MASTER:
        return _whole(sharded.chunk.master_shard, sharded, group)
    shard = torch.zeros_like(sharded.chunk.master_shard)
    for piece, owned in sharded.pieces:
        value = optimizer.state.get(owned, {}).get(key)
        if _is_elementwise(value, owned):  # factors of another shape may have the same key
            shard[piece.start : piece.end] = value.reshape(-1)
    return _whole(shard, sharded, group)


def _whole(shard: Tensor, sharded: ShardedChunk, group: Group) -> Tensor:
    if sharded.chunk.layout.parts == 1:
        return shard
    whole = torch.empty(sharded.chunk.layout.size, dtype=shard.dtype, device=shard.device)
    all_gather(whole, shard, group)
    return whole


# Re-partitions the chunks of a running optimizer in another order and size; values are unchanged.
#
# Between two steps, when there are no gradients. Parameters move chunk by chunk and state tensor by
# tensor, so that at most one full chunk is needed in addition, apart from the shards, of which both
# old and new exist.


def relayout(shards: ShardedState, order: Sequence[str], chunk_bytes: int) -> bool:
    """Re-partitions parameters in another order and chunk size (collective)."""
    if any(c.gradient_shard is not None or c.chunk.gradients.begun for c in shards.chunks):
        raise GulliverError(
            "chunks cannot be re-partitioned while gradients are pending; call zero_grad first"
        )
    shards.groups.check_members()  # the groups are filled again
    old = shards.all_chunks
    new = shards.ordered(order, chunk_bytes)
    if [found[0] for found in new] == [c.chunk.layout for c in old]:
        return False
    before_any_write()  # a checkpoint may be copying the buffers that are replaced
    shards.take_writes()
    shards.publish_exact()
    chunks = shards.replaced(order, chunk_bytes)
    _move_state(shards, old, chunks)
    shards.adopt(chunks)
    shards.pool.clear()  # buffers of the old sizes are no longer needed
    for sharded in shards.chunks:
        with shards.states.opened(sharded):
            shards.states.place(sharded)
    # Old and new buffers existed at the same time, which is more than any step holds.
    shards.pool.counter.restart()
    return True


def _hand_over(
    shards: ShardedState, old: Sequence[ShardedChunk], new: Sequence[ShardedChunk]
) -> None:
    """Moves optimizer state from old pieces to new ones, all of which must be full parameters."""
    inner = shards.inner
    targets = {piece.name: (c, owned) for c in new for piece, owned in c.pieces}
    for sharded in old:
        for piece, owned in sharded.pieces:
            chunk, target = targets[piece.name]
            with shards.states.shown(sharded), shards.states.opened(chunk):
                target.detach().copy_(owned.detach())
                if owned in inner.state:
                    inner.state[target] = dict(inner.state[owned])
                    if shards.states.tiered:
                        shards.states.place(chunk)  # now that both are there
            if shards.states.tiered:  # otherwise both share the entry of their parameter
                inner.state.pop(owned, None)


def _move_state(
    shards: ShardedState, old: Sequence[ShardedChunk], new: Sequence[ShardedChunk]
) -> None:
    trained = [c for c in old if c.trained]
    if shards.parts == 1:
        _hand_over(shards, trained, new)
        return
    counters, entries = stream_state(shards, trained)
    pieces = {piece.name: (c, piece, owned) for c in new for piece, owned in c.pieces}
    moved: dict[nn.Parameter, dict[str, object]] = {
        owned: dict(counters.get(name, {})) for name, (_, _, owned) in pieces.items()
    }
    for name, key, whole in entries:
        if name not in pieces:
            continue
        chunk, piece, owned = pieces[name]
        part = run_of(whole, piece, owned)
        if key == MASTER:
            with shards.states.opened(chunk):
                owned.detach().copy_(part)
        else:
            moved[owned][key] = part.clone()
    shards.inner.state.clear()
    for owned, state in moved.items():
        if state:
            shards.inner.state[owned] = {
                # Counters stay on their device; factors move to their parameter's device.
                key: value.to(owned.device if value.ndim else value.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state.items()
            }


# Saves and loads a rank's part of a sharded model and its optimizer, without gathering.
#
# 16-bit parameters are saved as their float32 master weights. A parameter with a region of the full
# tensor (a slice of tensor parallelism) is saved and loaded as parts of that region; see
# `OptimizerCheckpoint` for models that no rank has completely.


SMALL, ALIKE = 2**16, 2**20
"""Sizes below which buffers are copied immediately, and tensors are saved by a single rank."""


class ZeroCheckpoint(OptimizerCheckpoint):
    """Saves and loads a ZeRO optimizer and its model, each rank its own shards."""

    def __init__(self, optimizer: ZeroOptimizer, on_load: Callable[[], None] | None) -> None:
        super().__init__(optimizer)
        self._shards = optimizer.shards
        # Called before all values of the model are replaced.
        self._on_load = on_load

    @property
    def copy_limit(self) -> int | None:
        manager = self._shards.manager
        return None if manager is None else min(max(manager.budget // 8, 2**23), 2**26)

    def _saves(self, name: str, tensor: Tensor) -> bool:
        return self.has_whole_model or self.writes(name, tensor)

    # The model.

    def model_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        """Returns this rank's part of the model's state, without gathering or waiting."""
        return self._leaves(model, every=self.has_whole_model)

    def load_leaves(self, model: nn.Module) -> dict[str, Leaf]:
        return self._leaves(model, every=True, fill=True)

    def _leaves(self, model: nn.Module, every: bool, fill: bool = False) -> dict[str, Leaf]:
        """Returns this rank's part of the model's state, by `state_dict` name."""
        # `every` includes tensors that another group writes; `fill` says that the caller overwrites
        # all elements.
        shards = self._shards
        refuse_extra_state(model)
        train_unfrozen(shards)
        self.take_finished_writes()
        if fill and shards.states.tiered:
            shards.gatherer.release_all()  # nothing may move until all tensors are filled
        mine: dict[str, Leaf] = {}
        for sharded in shards.all_chunks:
            with shards.states.shown(sharded, fill):
                mine.update(self._pieces(sharded))
        found: dict[str, Leaf] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            known = shards.names.get(parameter) or shards.frozen_names.get(parameter)
            leaf = _held(parameter) if known is None else mine.get(known)
            if leaf is None or not (every or self.writes(name, parameter)):
                continue
            if not every and (known is None or shards.parts == 1):
                leaf = self._share(leaf)
            if leaf is not None:
                found[name] = leaf
        return found | self._buffers(model, every)

    def _buffers(self, model: nn.Module, every: bool) -> dict[str, Leaf]:
        buffers = persistent_buffers(model)
        if every:
            return {name: _held(buffer) for name, buffer in buffers.items()}
        if self._shards.rank != 0:
            # They may differ between ranks, so one rank's are saved.
            return {}
        mine = {name: part_of(b) for name, b in buffers.items() if self.writes(name, b)}
        return {name: _copied(part) for name, part in mine.items()}

    def _share(self, leaf: Leaf) -> Part | None:
        whole = leaf if isinstance(leaf, Part) else part_of(leaf)
        count, size, rank = whole.value.numel(), self._shards.size, self._shards.rank
        if size == 1 or whole.value.nbytes < ALIKE:
            return whole if rank == 0 else None
        begin, stop = (count * number // size for number in (rank, rank + 1))
        run = whole.value.reshape(-1)[begin:stop]
        return replace(whole, value=run, start=whole.start + begin)

    def _pieces(self, sharded: ShardedChunk) -> Iterator[tuple[str, Leaf]]:
        chunk = sharded.chunk
        for piece in chunk.layout.pieces(chunk.part):
            parameter = chunk.parameters[piece.name]
            run = chunk.master_shard[piece.start : piece.end].detach()
            owner = parameter if chunk.master_is_view else None
            if self._shards.parts > 1:
                yield piece.name, _part(parameter, run, piece.offset, owner)
            elif region_of(parameter) is not None:
                yield piece.name, _part(parameter, run, 0, owner)
            else:
                # Saving of replicated tensors is divided among the ranks like that of any other
                # tensor.
                view = owner is not None
                yield piece.name, parameter.detach() if view else run.view(parameter.shape)
        if chunk.part == 0:
            # A parameter without elements is in no part.
            for name, parameter in chunk.parameters.items():
                if parameter.shape.numel() == 0:
                    yield name, _part(parameter, chunk.master_shard[:0].detach())

    def take_finished_writes(self) -> None:
        """Copies modified parameters to their shards, unless a gather is in flight."""
        # A parameter that is being gathered cannot have been written, because access waits for the
        # gather.
        self._shards.gatherer.check_views()
        for sharded in self._shards.all_chunks:
            if sharded.presence is Presence.WHOLE and sharded.chunk.buffer is not None:
                sharded.chunk.take_writes()

    def before_model_load(self) -> None:
        self._shards.gatherer.release_all()
        before_write(sharded.chunk.master_shard for sharded in self._shards.all_chunks)
        if self._on_load is not None:
            self._on_load()

    def after_model_load(self) -> None:
        self._shards.publish()

    # The optimizer's groups.

    @property
    def trainable(self) -> Mapping[nn.Parameter, str]:
        return {**self._shards.names, **self._shards.frozen_trainable}

    def take_up(self, names: Collection[str]) -> set[str]:
        train_unfrozen(self._shards, names)
        return set(names) - set(self._shards.names.values())

    def group_names(self) -> list[list[str]]:
        train_unfrozen(self._shards)
        return [list(names) for names in self._shards.groups.names]

    # The optimizer's state.

    def state_dtype(self, parameter: Tensor) -> torch.dtype:
        return shard_dtype(parameter.dtype, trained=True)

    @property
    def has_whole_state(self) -> bool:
        return self._shards.whole or (self._shards.parts == 1 and self.has_whole_model)

    def state_leaves(self) -> Saved:
        found: Saved = {}
        for sharded in self._shards.chunks:
            with self._shards.states.shown(sharded):
                for piece, owned in sharded.pieces:
                    parameter = sharded.chunk.parameters[piece.name]
                    if self._saves(piece.name, parameter):
                        state = self._shards.inner.state.get(owned, {})
                        found[piece.name] = self._entries(piece, owned, parameter, state)
        return found

    def _entries(
        self, piece: ShardPiece, owned: Tensor, parameter: Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        alone = self.has_whole_model and self._shards.parts == 1
        for key, value in state.items():
            if value is None:
                continue
            if is_counter(key, value, owned):
                entries[key] = Counter.of(value)
                continue
            leaf: Leaf | None
            if isinstance(value, Tensor) and value.shape == owned.shape:
                leaf = self._state_leaf(_part(parameter, value.reshape(-1), piece.offset))
            elif isinstance(value, Tensor) and (self._shards.whole or alone):
                # From an optimizer of full tensors. Saving of replicated state is divided among the
                # ranks later.
                leaf = value if alone else self._state_leaf(_factor(value))
            else:
                kept = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise GulliverError(
                    f"the optimizer keeps {key!r} of {piece.name!r} as {kept}, not "
                    f"{tuple(owned.shape)}: only element-wise state can be saved here; use "
                    "TorchDDPPlugin, which can save any state"
                )
            if leaf is not None:
                entries[key] = leaf
        return entries

    def _state_leaf(self, part: Part) -> Leaf | None:
        """Returns a state tensor as this rank saves it; None if another rank saves it."""
        if self._shards.parts > 1:
            return part
        if self.has_whole_model:
            return part.value.view(part.shape) if part.region is None else part
        return self._share(part)

    def make_state(self, entries: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Leaf]:
        """Allocates optimizer state to load into, by parameter and kind."""
        shards, states = self._shards, self._shards.states
        capturing = shards.groups.capturing()
        states.drop(shards.chunks)
        for sharded in shards.chunks:
            with states.opened(sharded):
                for piece, owned in sharded.pieces:
                    found = self._empty(entries.get(piece.name, {}), owned, owned in capturing)
                    if found:
                        shards.inner.state[owned] = found
                states.place(sharded)
        wanted: dict[tuple[str, str], Leaf] = {}
        for sharded in shards.chunks:
            with states.shown(sharded, fill=True):
                wanted.update(self._to_fill(sharded, entries))
        return wanted

    def _empty(self, entries: Mapping[str, Any], owned: Tensor, captured: bool) -> dict[str, Any]:
        """Allocates a piece's state; on meta if it will be moved to buffers of the chunk."""
        found: dict[str, Any] = {}
        for key, value in entries.items():
            if isinstance(value, Counter):
                # torch puts counters on the parameter's device only if kernels read them.
                found[key] = value.to_value(owned.device if captured else None)
                continue
            whole = self.has_whole_state
            shape = tuple(getattr(value, "shape", owned.shape)) if whole else owned.shape
            dtype = value.dtype if shape != tuple(owned.shape) else owned.dtype
            stand_in = torch.empty(shape, dtype=dtype, device="meta")
            placed = self._shards.states.places(key, stand_in, owned)
            found[key] = stand_in if placed else torch.empty_like(stand_in, device=owned.device)
        return found

    def _to_fill(
        self, sharded: ShardedChunk, entries: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[tuple[str, str], Leaf]]:
        for piece, owned in sharded.pieces:
            parameter = sharded.chunk.parameters[piece.name]
            state = self._shards.inner.state.get(owned, {})
            for key, value in entries.get(piece.name, {}).items():
                if not isinstance(value, Counter):
                    alike = state[key].shape == owned.shape
                    part = _part(parameter, state[key].view(-1), piece.offset) if alike else None
                    yield (piece.name, key), state[key] if part is None else part

    # An optimizer without its model: state, and the float32 master weights of 16-bit parameters.

    def export_leaves(self) -> Saved:
        """Returns this rank's optimizer state and the master weights of 16-bit parameters."""
        found = self.state_leaves()
        for name, part, parameter in self._masters(fill=False):
            if self._saves(name, parameter):
                leaf = self._state_leaf(part)
                if leaf is not None:
                    found.setdefault(name, {})[MASTER] = leaf
        return found

    def import_leaves(
        self, entries: Mapping[str, Mapping[str, Any]]
    ) -> dict[tuple[str, str], Leaf]:
        """Returns the tensors to fill with the entries that `export_leaves` returned."""
        state = {n: {k: v for k, v in found.items() if k != MASTER} for n, found in entries.items()}
        wanted = self.make_state(state)
        before_write(sharded.chunk.master_shard for sharded in self._shards.chunks)
        for name, part, _ in self._masters(fill=True):
            if MASTER in entries.get(name, {}):
                wanted[name, MASTER] = part
        return wanted

    def _masters(self, fill: bool) -> Iterator[tuple[str, Part, Tensor]]:
        for sharded in self._shards.chunks:
            chunk = sharded.chunk
            if chunk.has_master:
                with self._shards.states.shown(sharded, fill):
                    for piece, owned in sharded.pieces:
                        parameter = chunk.parameters[piece.name]
                        run = owned.detach().view(-1)
                        yield piece.name, _part(parameter, run, piece.offset), parameter

    # Parameters whose changes are sent packed, below stage 3: their values differ from the shards.

    def exact_parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Gathers copies of the parameters from the shards, by `state_dict` name (collective)."""
        found: dict[nn.Parameter, Tensor] = {}
        self.take_finished_writes()
        for sharded in self._shards.all_chunks:
            if sharded.chunk.shown_part is not None:
                views = sharded.chunk.named_views(self._shards.gatherer.copied(sharded))
                found |= {p: views[name] for name, p in sharded.chunk.parameters.items()}
        named = model.named_parameters(remove_duplicate=False)
        return {name: found[p] for name, p in named if p in found}

    def shown_parts(self) -> dict[str, Tensor]:
        """Returns this rank's part of the last gathered values of packed parameters."""
        # They may differ from the shards. Keys are the names of the chunks' first parameters.
        found: dict[str, Tensor] = {}
        for sharded in self._shards.all_chunks:
            self._shards.gatherer.finish(sharded)
            if sharded.chunk.shown_part is not None:
                found[sharded.chunk.layout.slots[0].name] = sharded.chunk.shown_part
        return found

    def take_shown_parts(self, found: Mapping[str, Tensor]) -> None:
        """Unshards chunks from values that `shown_parts` saved; keeps the shards (collective)."""
        for sharded in self._shards.all_chunks:
            part = found.get(sharded.chunk.layout.slots[0].name)
            if part is not None:
                self._shards.gatherer.show(sharded, part)


def _copied(part: Part) -> Part:
    if part.value.nbytes > SMALL:
        return part
    return replace(part, value=part.value.clone(), owner=None)


def _held(tensor: Tensor) -> Leaf:
    """Wraps a tensor that this rank holds completely; a slice becomes a `Part`."""
    return tensor.detach() if region_of(tensor) is None else part_of(tensor)


def _part(parameter: Tensor, run: Tensor, start: int = 0, owner: Tensor | None = None) -> Part:
    """Wraps elements of a parameter or its state, from `start`, as a part of the full tensor."""
    return Part(run, whole_shape(parameter), start, owner, region_of(parameter))


def _factor(value: Tensor) -> Part:
    return part_of(value if value.is_contiguous() else value.contiguous())
