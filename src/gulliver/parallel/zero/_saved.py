"""What a rank has of a sharded model and its optimizer: for checkpoints, with nothing gathered.

Parameters of 16 bits are saved by their float32 copies, which they are rounded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gulliver.errors import GulliverError
from gulliver.memory import Part, before_write
from gulliver.parallel._optimizer import (
    Counter,
    Leaf,
    Saved,
    is_counter,
    persistent_buffers,
)
from gulliver.parallel.zero._sharded import Presence, ShardedChunk

if TYPE_CHECKING:
    from gulliver.parallel.zero._optimizer import ZeroOptimizer


def model_leaves(optimizer: ZeroOptimizer, model: nn.Module) -> dict[str, Leaf]:
    """The model's state as far as this rank has it, by the names of its `state_dict`.

    Raises:
        GulliverError: a module keeps state that is no tensor.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise GulliverError(
                f"module {name!r} has a state of its own (get_extra_state), which cannot be saved "
                "with ZeRO: keep it in buffers"
            )
    mine = {name: leaf for chunk in optimizer.everything for name, leaf in _homes(optimizer, chunk)}
    found: dict[str, Leaf] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = optimizer.names.get(parameter) or optimizer.frozen_names.get(parameter)
        if known is None:
            found[name] = parameter.detach()
        elif known in mine:
            found[name] = mine[known]
    return found | persistent_buffers(model)


def _homes(optimizer: ZeroOptimizer, sharded: ShardedChunk) -> Iterator[tuple[str, Leaf]]:
    """This rank's part of a chunk's parameters, as the optimizer steps it."""
    chunk = sharded.chunk
    for piece in chunk.layout.pieces(chunk.part):
        parameter = chunk.parameters[piece.name]
        run = chunk.home[piece.start : piece.end].detach()
        if optimizer.parts > 1:
            owner = parameter if chunk.home_is_view else None
            yield piece.name, Part(run, tuple(parameter.shape), piece.offset, owner)
        else:
            # What every rank has as a whole is shared out among them like any other tensor.
            view = chunk.home_is_view
            yield piece.name, parameter.detach() if view else run.view(parameter.shape)
    if chunk.part == 0:
        # A parameter without elements lies on no part.
        for name, parameter in chunk.parameters.items():
            if parameter.shape.numel() == 0:
                yield name, Part(chunk.home[:0].detach(), tuple(parameter.shape))


def take_finished_writes(optimizer: ZeroOptimizer) -> None:
    """Brings what was written to parameters to the shards, without waiting for gathers.

    A parameter that is on its way cannot have been written: whoever touches it waits for it.
    """
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
    for sharded in optimizer.everything:
        sharded.chunk.note_versions()


def state_leaves(optimizer: ZeroOptimizer) -> Saved:
    """The optimizer's state by parameter and kind, as far as this rank has it.

    Raises:
        GulliverError: state that is neither element-wise nor one value.
    """
    found: Saved = {}
    for sharded in optimizer.chunks:
        for piece, owned in sharded.pieces:
            entries = found.setdefault(piece.name, {})
            shape = sharded.chunk.parameters[piece.name].shape
            for key, value in optimizer.inner.state.get(owned, {}).items():
                if value is None:
                    continue
                if is_counter(key, value, owned):
                    entries[key] = Counter.of(value)
                    continue
                if value.shape != owned.shape:
                    raise GulliverError(
                        f"the optimizer keeps {key!r} of {piece.name!r} as {tuple(value.shape)}, "
                        f"not {tuple(owned.shape)}: only element-wise state can be saved"
                    )
                whole = optimizer.parts == 1
                part = Part(value, tuple(shape), piece.offset)
                entries[key] = value.view(shape) if whole else part
    return found


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
                found[key] = torch.empty_like(owned, requires_grad=False)
                shape = sharded.chunk.parameters[piece.name].shape
                wanted[piece.name, key] = Part(found[key], tuple(shape), piece.offset)
            if found:
                optimizer.inner.state[owned] = found
    return wanted
