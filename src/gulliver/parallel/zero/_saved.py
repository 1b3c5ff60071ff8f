"""What a rank has of a sharded model and its optimizer: for checkpoints, with nothing gathered.

Parameters of 16 bits are saved by their float32 copies, which they are rounded from. A parameter
that holds a region of a whole (a slice of tensor parallelism) is saved and loaded as parts of that
region; see the note at `BoostedOptimizer` for models that no rank has all of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.memory import Part, Piece, Presence, before_write, part_of, region_of, whole_shape
from gulliver.parallel._optimizer import (
    Counter,
    Leaf,
    Saved,
    is_counter,
    persistent_buffers,
    refuse_extra_state,
)
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState
from gulliver.parallel.zero._state import MASTER
from gulliver.parallel.zero._unfreezing import wake

Writes = Callable[[str, Tensor], bool] | None
"""Whether this rank's group writes a tensor of the model; None where each has the whole model."""

SMALL, ALIKE = 2**16, 2**20
"""Bytes: smaller buffers are copied at once; smaller tensors are written by one rank."""


def model_leaves(
    shards: ShardedState, model: nn.Module, writes: Writes, fill: bool = False
) -> dict[str, Leaf]:
    """The model's state as far as this rank has it, by the names of its `state_dict`."""
    refuse_extra_state(model)
    wake(shards)
    take_finished_writes(shards)
    if fill and shards.tiers is not None:
        shards.gatherer.release_all()  # nothing may move until all is filled
    mine: dict[str, Leaf] = {}
    for sharded in shards.everything:
        with shards.shown(sharded, fill):
            mine.update(_homes(shards, sharded))
    found: dict[str, Leaf] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = shards.names.get(parameter) or shards.frozen_names.get(parameter)
        leaf = _held(parameter) if known is None else mine.get(known)
        if leaf is None or (writes is not None and not writes(name, parameter)):
            continue
        if writes is not None and (known is None or shards.parts == 1):
            leaf = _share(shards, leaf)
        if leaf is not None:
            found[name] = leaf
    return found | _buffers(shards, model, writes)


def _buffers(shards: ShardedState, model: nn.Module, writes: Writes) -> dict[str, Leaf]:
    buffers = persistent_buffers(model)
    if writes is None:
        return {name: _held(buffer) for name, buffer in buffers.items()}
    if shards.rank != 0:
        # They need not be alike on all ranks: one rank's are taken.
        return {}
    mine = {name: part_of(b) for name, b in buffers.items() if writes(name, b)}
    return {name: _copied(part) for name, part in mine.items()}


def _copied(part: Part) -> Part:
    """Small buffers are copied at once: forwards write to them, and ask nobody."""
    if part.value.nbytes > SMALL:
        return part
    return replace(part, value=part.value.clone(), owner=None)


def _held(tensor: Tensor) -> Leaf:
    """A tensor that this rank has as a whole; of a slice, all of it."""
    return tensor.detach() if region_of(tensor) is None else part_of(tensor)


def _share(shards: ShardedState, leaf: Leaf) -> Part | None:
    """This rank's share of what all ranks of the group have alike: small ones are the first's."""
    whole = leaf if isinstance(leaf, Part) else part_of(leaf)
    count, size = whole.value.numel(), shards.size
    if size == 1 or whole.value.nbytes < ALIKE:
        return whole if shards.rank == 0 else None
    begin, stop = (count * number // size for number in (shards.rank, shards.rank + 1))
    run = whole.value.reshape(-1)[begin:stop]
    return replace(whole, value=run, start=whole.start + begin)


def _homes(shards: ShardedState, sharded: ShardedChunk) -> Iterator[tuple[str, Leaf]]:
    """This rank's pieces of a chunk's parameters, as the optimizer steps them."""
    chunk = sharded.chunk
    for piece in chunk.layout.pieces(chunk.part):
        parameter = chunk.parameters[piece.name]
        run = chunk.home[piece.start : piece.end].detach()
        owner = parameter if chunk.home_is_view else None
        if shards.parts > 1:
            yield piece.name, _part(parameter, run, piece.offset, owner)
        elif region_of(parameter) is not None:
            yield piece.name, _part(parameter, run, 0, owner)
        else:
            # What every rank has as a whole is shared out among them like any other tensor.
            view = owner is not None
            yield piece.name, parameter.detach() if view else run.view(parameter.shape)
    if chunk.part == 0:
        # A parameter without elements lies on no part.
        for name, parameter in chunk.parameters.items():
            if parameter.shape.numel() == 0:
                yield name, _part(parameter, chunk.home[:0].detach())


def _part(parameter: Tensor, run: Tensor, start: int = 0, owner: Tensor | None = None) -> Part:
    """Elements of a parameter, or of what has its shape, in the whole that it is of."""
    return Part(run, whole_shape(parameter), start, owner, region_of(parameter))


def take_finished_writes(shards: ShardedState) -> None:
    """Brings what was written to parameters to the shards, without waiting for gathers."""
    # A parameter that is on its way cannot have been written: whoever touches it waits for it.
    shards.gatherer.settle_writes()
    for sharded in shards.everything:
        if sharded.presence is Presence.WHOLE and sharded.chunk.buffer is not None:
            sharded.chunk.take_writes()


def state_leaves(shards: ShardedState, writes: Writes) -> Saved:
    """The optimizer's state by parameter and kind, as far as this rank has it."""
    found: Saved = {}
    for sharded in shards.chunks:
        with shards.shown(sharded):
            for piece, owned in sharded.pieces:
                parameter = sharded.chunk.parameters[piece.name]
                if writes is None or writes(piece.name, parameter):
                    state = shards.inner.state.get(owned, {})
                    entries = _entries(shards, piece, owned, parameter, state, writes)
                    found[piece.name] = entries
    return found


def _entries(
    shards: ShardedState,
    piece: Piece,
    owned: Tensor,
    parameter: Tensor,
    state: Mapping[str, Any],
    writes: Writes,
) -> dict[str, Any]:
    """The state of a piece: counters, and leaves as far as this rank saves them."""
    entries: dict[str, Any] = {}
    for key, value in state.items():
        if value is None:
            continue
        if is_counter(key, value, owned):
            entries[key] = Counter.of(value)
            continue
        alone = shards.whole or (writes is None and shards.parts == 1)
        if alone and isinstance(value, Tensor) and value.shape != owned.shape:
            # Of an optimizer of whole tensors. What all ranks have is shared out later.
            every = writes is None and shards.parts == 1
            leaf = value if every else _state_leaf(shards, _factor(value), writes)
            if leaf is not None:
                entries[key] = leaf
            continue
        if not isinstance(value, Tensor) or value.shape != owned.shape:
            kept = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise GulliverError(
                f"the optimizer keeps {key!r} of {piece.name!r} as {kept}, not "
                f"{tuple(owned.shape)}: only element-wise state can be saved here; "
                "TorchDDPPlugin saves any"
            )
        part = _part(parameter, value.reshape(-1), piece.offset)
        leaf = _state_leaf(shards, part, writes)
        if leaf is not None:
            entries[key] = leaf
    return entries


def _factor(value: Tensor) -> Part:
    """State of a shape of its own, which only the owner of its parameter has."""
    return part_of(value if value.is_contiguous() else value.contiguous())


def _state_leaf(shards: ShardedState, part: Part, writes: Writes) -> Leaf | None:
    """State as this rank saves it; None where another rank of its group does."""
    if shards.parts > 1:
        return part
    if writes is None:
        return part.value.view(part.shape) if part.region is None else part
    return _share(shards, part)


def make_state(
    shards: ShardedState, entries: Mapping[str, Mapping[str, Any]], whole: bool
) -> dict[tuple[str, str], Leaf]:
    """Gives the optimizer state of the kinds that a checkpoint has, to be filled."""
    capturing = shards.capturing()
    shards.drop_state()
    for sharded in shards.chunks:
        with shards.opened(sharded):
            for piece, owned in sharded.pieces:
                captured = owned in capturing
                found = _empty(shards, entries.get(piece.name, {}), owned, captured, whole)
                if found:
                    shards.inner.state[owned] = found
            shards.place_state(sharded)
    wanted: dict[tuple[str, str], Leaf] = {}
    for sharded in shards.chunks:
        with shards.shown(sharded, fill=True):
            wanted.update(_to_fill(shards, sharded, entries))
    return wanted


def _empty(
    shards: ShardedState, entries: Mapping[str, Any], owned: Tensor, captured: bool, whole: bool
) -> dict[str, Any]:
    """State of a piece, to be filled; on meta where it will be placed in buffers of its chunk."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, Counter):
            # torch wants counters beside the parameter only where kernels read them.
            found[key] = value.to_value(owned.device if captured else None)
            continue
        shape = tuple(getattr(value, "shape", owned.shape)) if whole else owned.shape
        dtype = value.dtype if shape != tuple(owned.shape) else owned.dtype
        stand_in = torch.empty(shape, dtype=dtype, device="meta")
        placed = shards.places(key, stand_in, owned)
        found[key] = stand_in if placed else torch.empty_like(stand_in, device=owned.device)
    return found


def _to_fill(
    shards: ShardedState, sharded: ShardedChunk, entries: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[tuple[str, str], Leaf]]:
    for piece, owned in sharded.pieces:
        state, parameter = shards.inner.state.get(owned, {}), sharded.chunk.parameters[piece.name]
        for key, value in entries.get(piece.name, {}).items():
            if not isinstance(value, Counter):
                alike = state[key].shape == owned.shape
                part = _part(parameter, state[key].view(-1), piece.offset) if alike else None
                yield (piece.name, key), state[key] if part is None else part


def export_leaves(shards: ShardedState, writes: Writes) -> Saved:
    """State and, of parameters of 16 bits, their float32 copies, as far as this rank saves them."""
    found = state_leaves(shards, writes)
    for name, part, parameter in _masters(shards, fill=False):
        if writes is None or writes(name, parameter):
            leaf = _state_leaf(shards, part, writes)
            if leaf is not None:
                found.setdefault(name, {})[MASTER] = leaf
    return found


def import_leaves(
    shards: ShardedState, entries: Mapping[str, Mapping[str, Any]], whole: bool
) -> dict[tuple[str, str], Leaf]:
    """Gives the tensors to fill for what `export_leaves` gave: state, and float32 copies too."""
    state = {n: {k: v for k, v in found.items() if k != MASTER} for n, found in entries.items()}
    wanted = make_state(shards, state, whole)
    before_write(sharded.chunk.home for sharded in shards.chunks)
    for name, part, _ in _masters(shards, fill=True):
        if MASTER in entries.get(name, {}):
            wanted[name, MASTER] = part
    return wanted


def _masters(shards: ShardedState, fill: bool) -> Iterator[tuple[str, Part, Tensor]]:
    """This rank's pieces of float32 copies, and the parameters that they are of."""
    for sharded in shards.chunks:
        chunk = sharded.chunk
        if chunk.has_master:
            with shards.shown(sharded, fill):
                for piece, owned in sharded.pieces:
                    parameter = chunk.parameters[piece.name]
                    run = owned.detach().view(-1)
                    yield piece.name, _part(parameter, run, piece.offset), parameter
