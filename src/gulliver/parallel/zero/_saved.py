"""What a rank has of a sharded model and its optimizer: for checkpoints, with nothing gathered.

Parameters of 16 bits are saved by their float32 copies, which they are rounded from. A parameter
that holds a region of a whole (a slice of tensor parallelism) is saved and loaded as parts of that
region; see the note at `BoostedOptimizer` for models that no rank has all of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gulliver.errors import GulliverError
from gulliver.memory import Part, before_write, part_of, region_of, whole_shape
from gulliver.parallel._optimizer import (
    Counter,
    Leaf,
    Saved,
    is_counter,
    persistent_buffers,
    refuse_extra_state,
)
from gulliver.parallel.zero._sharded import Presence, ShardedChunk
from gulliver.parallel.zero._state import MASTER

if TYPE_CHECKING:
    from gulliver.parallel.zero._optimizer import ZeroOptimizer

SMALL, ALIKE = 2**16, 2**20
"""Bytes: smaller buffers are copied at once; smaller tensors are written by one rank."""


def model_leaves(
    optimizer: ZeroOptimizer, model: nn.Module, saving: bool = True
) -> dict[str, Leaf]:
    """The model's state as far as this rank has it, by the names of its `state_dict`.

    Args:
        optimizer: of the model.
        model: boosted.
        saving: only what this rank is to write, where no rank has the whole model; else all that
            it holds.

    Raises:
        GulliverError: a module keeps state that is no tensor.
    """
    refuse_extra_state(model)
    mine = {name: leaf for chunk in optimizer.everything for name, leaf in _homes(optimizer, chunk)}
    shared = saving and not optimizer.has_whole_model
    found: dict[str, Leaf] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = optimizer.names.get(parameter) or optimizer.frozen_names.get(parameter)
        leaf = _held(parameter) if known is None else mine.get(known)
        if leaf is None or (shared and not optimizer.writes(name, parameter)):
            continue
        if shared and (known is None or optimizer.parts == 1):
            leaf = _share(optimizer, leaf)
        if leaf is not None:
            found[name] = leaf
    return found | _buffers(optimizer, model, shared)


def _buffers(optimizer: ZeroOptimizer, model: nn.Module, shared: bool) -> dict[str, Leaf]:
    buffers = persistent_buffers(model)
    if not shared:
        return {name: _held(buffer) for name, buffer in buffers.items()}
    if optimizer.rank != 0:
        # They need not be alike on all ranks: one rank's are taken.
        return {}
    mine = {name: part_of(b) for name, b in buffers.items() if optimizer.writes(name, b)}
    return {name: _copied(part) for name, part in mine.items()}


def _copied(part: Part) -> Part:
    """Small buffers are copied at once: forwards write to them, and ask nobody."""
    if part.value.nbytes > SMALL:
        return part
    return replace(part, value=part.value.clone(), owner=None)


def _held(tensor: Tensor) -> Leaf:
    """A tensor that this rank has as a whole; of a slice, all of it."""
    return tensor.detach() if region_of(tensor) is None else part_of(tensor)


def _share(optimizer: ZeroOptimizer, leaf: Leaf) -> Part | None:
    """This rank's share of what all ranks of the group have alike: small ones are the first's."""
    whole = leaf if isinstance(leaf, Part) else part_of(leaf)
    count, size = whole.value.numel(), optimizer.size
    if size == 1 or whole.value.nbytes < ALIKE:
        return whole if optimizer.rank == 0 else None
    begin, stop = (count * number // size for number in (optimizer.rank, optimizer.rank + 1))
    run = whole.value.reshape(-1)[begin:stop]
    return replace(whole, value=run, start=whole.start + begin)


def _homes(optimizer: ZeroOptimizer, sharded: ShardedChunk) -> Iterator[tuple[str, Leaf]]:
    """This rank's part of a chunk's parameters, as the optimizer steps it."""
    chunk = sharded.chunk
    for piece in chunk.layout.pieces(chunk.part):
        parameter = chunk.parameters[piece.name]
        run = chunk.home[piece.start : piece.end].detach()
        owner = parameter if chunk.home_is_view else None
        if optimizer.parts > 1:
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


def take_finished_writes(optimizer: ZeroOptimizer) -> None:
    """Brings what was written to parameters to the shards, without waiting for gathers.

    A parameter that is on its way cannot have been written: whoever touches it waits for it.
    """
    optimizer.gatherer.settle_lent()
    for sharded in optimizer.everything:
        if sharded.presence is Presence.WHOLE and sharded.chunk.buffer is not None:
            sharded.chunk.take_writes()


def before_model_load(optimizer: ZeroOptimizer) -> None:
    """Lets nothing be under way while the shards are filled."""
    optimizer.gatherer.release_all()
    before_write(sharded.chunk.home for sharded in optimizer.everything)


def after_model_load(optimizer: ZeroOptimizer) -> None:
    """Sends what the shards hold now to all ranks; every rank calls it."""
    for sharded in optimizer.everything:
        if optimizer.stage < 3:
            optimizer.gatherer.start(sharded)
            optimizer.gatherer.finish(sharded)
    increment_version([*optimizer.names, *optimizer.frozen_names])


def state_leaves(optimizer: ZeroOptimizer) -> Saved:
    """The optimizer's state by parameter and kind, as far as this rank has it.

    Raises:
        GulliverError: state that is neither element-wise nor one value.
    """
    found: Saved = {}
    shared = not optimizer.has_whole_model
    for sharded in optimizer.chunks:
        for piece, owned in sharded.pieces:
            parameter = sharded.chunk.parameters[piece.name]
            if shared and not optimizer.writes(piece.name, parameter):
                continue
            entries = found.setdefault(piece.name, {})
            for key, value in optimizer.inner.state.get(owned, {}).items():
                if value is None:
                    continue
                if is_counter(key, value, owned):
                    entries[key] = Counter.of(value)
                    continue
                if isinstance(value, Tensor) and _stands_alone(optimizer, value, owned):
                    entries[key] = value
                    continue
                if not isinstance(value, Tensor) or value.shape != owned.shape:
                    kept = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise GulliverError(
                        f"the optimizer keeps {key!r} of {piece.name!r} as {kept}, not "
                        f"{tuple(owned.shape)}: only element-wise state can be saved here; "
                        "TorchDDPPlugin saves any"
                    )
                run = value.reshape(-1)
                leaf = _state_leaf(optimizer, _part(parameter, run, piece.offset), parameter)
                if leaf is not None:
                    entries[key] = leaf
    return found


def _stands_alone(optimizer: ZeroOptimizer, value: Tensor, owned: Tensor) -> bool:
    """Whether state has a shape of its own, as of optimizers of whole tensors, and is all here."""
    return optimizer.has_whole_state and value.shape != owned.shape


def _state_leaf(optimizer: ZeroOptimizer, part: Part, parameter: Tensor) -> Leaf | None:
    """State as this rank saves it; None where another rank of its group does."""
    if optimizer.parts > 1:
        return part
    if optimizer.has_whole_model:
        return part.value.view(parameter.shape) if part.region is None else part
    return _share(optimizer, part)


def make_state(
    optimizer: ZeroOptimizer, entries: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Leaf]:
    """Gives the optimizer state of the kinds that a checkpoint has, to be filled.

    Args:
        optimizer: whose state is replaced.
        entries: by parameter and kind; counters, or whatever stands for a tensor.

    Returns:
        The tensors to fill, by parameter and kind.
    """
    capturing = {
        owned
        for group in optimizer.inner.param_groups
        for owned in group["params"]
        if group.get("capturable") or group.get("fused")
    }
    wanted: dict[tuple[str, str], Leaf] = {}
    optimizer.inner.state.clear()
    for sharded in optimizer.chunks:
        for piece, owned in sharded.pieces:
            found: dict[str, Any] = {}
            for key, value in entries.get(piece.name, {}).items():
                if isinstance(value, Counter):
                    # torch wants counters beside the parameter only where kernels read them.
                    found[key] = value.to_value(owned.device if owned in capturing else None)
                    continue
                shape = getattr(value, "shape", owned.shape)
                if optimizer.has_whole_state and tuple(shape) != tuple(owned.shape):
                    found[key] = torch.empty(shape, dtype=value.dtype, device=owned.device)
                    wanted[piece.name, key] = found[key]
                    continue
                found[key] = torch.empty_like(owned, requires_grad=False)
                parameter = sharded.chunk.parameters[piece.name]
                wanted[piece.name, key] = _part(parameter, found[key].view(-1), piece.offset)
            if found:
                optimizer.inner.state[owned] = found
    return wanted


def export_leaves(optimizer: ZeroOptimizer) -> Saved:
    """State and, of parameters of 16 bits, their float32 copies, as far as this rank saves them."""
    found = state_leaves(optimizer)
    for name, part, parameter in _masters(optimizer):
        if optimizer.has_whole_model or optimizer.writes(name, parameter):
            leaf = _state_leaf(optimizer, part, parameter)
            if leaf is not None:
                found.setdefault(name, {})[MASTER] = leaf
    return found


def import_leaves(
    optimizer: ZeroOptimizer, entries: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Leaf]:
    """As `make_state`, for what `export_leaves` gave: float32 copies are to be filled, too."""
    state = {n: {k: v for k, v in found.items() if k != MASTER} for n, found in entries.items()}
    wanted = make_state(optimizer, state)
    before_write(sharded.chunk.home for sharded in optimizer.chunks)
    for name, part, _ in _masters(optimizer):
        if MASTER in entries.get(name, {}):
            wanted[name, MASTER] = part
    return wanted


def _masters(optimizer: ZeroOptimizer) -> Iterator[tuple[str, Part, Tensor]]:
    """This rank's pieces of float32 copies, and the parameters that they are of."""
    for sharded in optimizer.chunks:
        chunk = sharded.chunk
        if chunk.home.dtype == chunk.dtype:
            continue
        for piece, owned in sharded.pieces:
            parameter = chunk.parameters[piece.name]
            run = owned.detach().view(-1)
            yield piece.name, _part(parameter, run, piece.offset), parameter
