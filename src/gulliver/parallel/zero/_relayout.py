"""Cuts the chunks of a running optimizer again: another order, another size, the same numbers.

Between two steps, when there are no gradients. Parameters move chunk by chunk, state tensor by
tensor, so that never more than one chunk is whole on top of what is held anyway, apart from the
shards, of which old and new live side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.memory import before_any_write
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState
from gulliver.parallel.zero._state import MASTER, run_of, stream_state


def relayout(shards: ShardedState, order: Sequence[str], chunk_bytes: int) -> bool:
    """Lays the parameters out in another order, in chunks of another size; every rank calls it."""
    if any(c.gradient_shard is not None or c.chunk.gradients.begun for c in shards.chunks):
        raise GulliverError("chunks are cut between steps: call zero_grad first")
    shards.groups.check_members()  # the groups are filled again
    old = shards.all_chunks
    new = shards.ordered(order, chunk_bytes)
    if [found[0] for found in new] == [c.chunk.layout for c in old]:
        return False
    before_any_write()  # buffers change hands, which a checkpoint may be copying
    shards.take_writes()
    shards.publish_exact()
    chunks = [shards.replaced(*found) for found in new]
    _move_state(shards, old, chunks)
    shards.adopt(chunks)
    shards.pool.clear()  # buffers of the old sizes are not asked for again
    for sharded in shards.chunks:
        with shards.states.opened(sharded):
            shards.states.place(sharded)
    # While chunks were cut there were two of some: no step holds as much.
    shards.pool.counter.restart()
    return True


def _hand_over(
    shards: ShardedState, old: Sequence[ShardedChunk], new: Sequence[ShardedChunk]
) -> None:
    """Moves state of any shape from pieces that are whole parameters to others that are."""
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
            if shards.states.tiered:  # elsewhere both have one entry, of their parameter
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
                # Counters stay where they are, factors go to their parameter's device.
                key: value.to(owned.device if value.ndim else value.device, copy=True)
                if isinstance(value, torch.Tensor)
                else value
                for key, value in state.items()
            }
