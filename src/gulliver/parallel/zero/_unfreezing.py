"""Parameters that are unfrozen after boost: their chunks begin to be trained."""

from __future__ import annotations

from collections.abc import Collection

from gulliver._compat import without_torch_functions
from gulliver.parallel.zero._elementwise import check_trainable
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState


# [Note: sleeping chunks] Frozen parameters that the optimizer was given have chunks of their own,
# with nothing but parameters: no gradient, no state, no float32 copy, no vote, no message. When a
# forward or a backward begins and one of them requires a gradient, all of its chunk is trained from
# there on. A parameter without a gradient is not stepped, so neighbours that are still frozen stay
# as they are, and state is made in the first step that there is a gradient for, as in plain torch.
# Freezing needs nothing: a parameter that gets no gradient is not stepped.
#
# It does not know what a pass is.
def wake(shards: ShardedState, also: Collection[str] = ()) -> None:
    """Trains the chunks of parameters that were unfrozen; every rank has to unfreeze the same."""
    if not shards.sleeping:
        return
    with without_torch_functions():
        unfrozen = {p for p, name in shards.sleeping.items() if p.requires_grad or name in also}
    if not unfrozen or not shards.gatherer.idle:
        return
    found = [c for c in shards.everything if not unfrozen.isdisjoint(c.chunk.members)]
    shards.watched.check_members()  # the groups are filled anew
    for sharded in found:
        check_trainable({p: n for n, p in sharded.chunk.parameters.items()})
    for sharded in found:
        _train(shards, sharded)
    shards.list_members()
    shards.list_chunks()
    shards.list_pieces()
    shards.reducer.take(shards.chunks)


def _train(shards: ShardedState, sharded: ShardedChunk) -> None:
    chunk = sharded.chunk
    shards.gatherer.release(sharded)
    chunk.widen_home(shards.home_dtype(chunk.dtype, trained=True))
    sharded.trained = True
    shards.cut_pieces(sharded)
    for name, parameter in chunk.parameters.items():
        shards.names[parameter] = name
        vars(parameter)["_boosted"] = True
        del shards.sleeping[parameter], shards.frozen_names[parameter]
