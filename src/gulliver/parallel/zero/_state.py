"""Optimizer state as whole tensors by parameter name, gathered from the shards and cut again.

What is exchanged knows neither the number of ranks nor the size of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import Group, all_gather, gather_objects
from gulliver.errors import GulliverError
from gulliver.memory import ShardPiece
from gulliver.parallel._saving import State, is_counter
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState

MASTER = "master"
"""The float32 values behind a parameter of 16 bits, among the optimizer's state."""


def gather_state(shards: ShardedState, keep: bool) -> State:
    """The whole state of an optimizer that steps shards; every rank calls it."""
    counters, entries = stream_state(shards, shards.chunks)
    state = counters
    for name, key, whole in entries:
        if keep:
            state.setdefault(name, {})[key] = whole.cpu().clone()
    return state if keep else {}


def stream_state(
    shards: ShardedState, chunks: Sequence[ShardedChunk]
) -> tuple[State, Iterator[tuple[str, str, Tensor]]]:
    """The state of an optimizer that steps shards, tensor by tensor; every rank goes through all.

    Args:
        shards: sharded state whose optimizer steps the pieces.
        chunks: chunks that the pieces belong to.

    Returns:
        Counters, and what has a shape of its own, by name and kind; and an iterator over the name,
        kind and whole value of the other state; a value is good until the next one.
    """
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
                        # An optimizer of whole tensors keeps other shapes, and None.
                        counters.setdefault(piece.name, {})[key] = _on_cpu(value)
                    elif value is not None:
                        _check_elementwise(piece.name, key, value, owned)
                        present.add((piece.name, key))
    parts = gather_objects((counters, present), group)
    # Pieces of one parameter step together, so any rank's counters are the parameter's.
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
    """Gives an optimizer this rank's pieces of a whole state, in place of what it has."""
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
    """This rank's piece of the state of a parameter; its float32 values are written at once."""
    whole, found = sharded.chunk.parameters[piece.name], dict[str, Any]()
    for key, value in state.items():
        if key == MASTER:
            owned.detach().copy_(run_of(value, piece, owned))
        elif not isinstance(value, Tensor):
            found[key] = value
        elif is_counter(key, value, whole):
            # torch wants counters on the parameter's device only where kernels read them.
            found[key] = value.to(owned.device if captured else value.device).clone()
        elif value.shape != whole.shape and owned.shape == whole.shape:
            found[key] = value.to(owned.device).clone()  # of an optimizer of whole tensors
        else:
            found[key] = run_of(value, piece, owned).to(owned.device).clone()
    return found


def run_of(whole: Tensor, piece: ShardPiece, owned: Tensor) -> Tensor:
    """The elements of a whole tensor that a piece has, in the shape of what is stepped."""
    return whole.reshape(-1)[piece.offset : piece.offset + piece.numel].view(owned.shape)


def _is_elementwise(value: Any, owned: Tensor) -> bool:
    """Whether state has the form of what it belongs to."""
    if not isinstance(value, Tensor):
        return False
    return value.shape == owned.shape and value.dtype == owned.dtype


def _check_elementwise(name: str, key: str, value: Tensor, owned: Tensor) -> None:
    if not _is_elementwise(value, owned):
        raise GulliverError(
            f"the optimizer keeps {key!r} of {name!r} as {tuple(value.shape)} {value.dtype} for "
            f"{tuple(owned.shape)} {owned.dtype}: state that is not element-wise cannot be saved"
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
