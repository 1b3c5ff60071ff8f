"""Parameters that are unfrozen after boost: their chunks begin to be trained."""

from __future__ import annotations

from collections.abc import Collection

from gulliver._compat import without_torch_functions
from gulliver.parallel.zero._elementwise import check_trainable
from gulliver.parallel.zero._shards import ShardedState


# [Note: frozen trainable chunks] Frozen parameters that the optimizer was given have chunks of
# their own, with nothing but parameters: no gradient, no state, no float32 copy, no vote, no
# message. When a forward or a backward begins and one of them requires a gradient, all of its chunk
# is trained from there on. A parameter without a gradient is not stepped, so neighbours that are
# still frozen stay as they are, and state is made in the first step that there is a gradient for,
# as in plain torch. Freezing needs nothing: a parameter that gets no gradient is not stepped.
def train_unfrozen(shards: ShardedState, also: Collection[str] = ()) -> None:
    """Trains the chunks of parameters that were unfrozen; every rank has to unfreeze the same."""
    if not shards.frozen_trainable:
        return
    with without_torch_functions():
        unfrozen = {
            p for p, name in shards.frozen_trainable.items() if p.requires_grad or name in also
        }
    if not unfrozen or not shards.gatherer.idle:
        return
    found = [c for c in shards.all_chunks if not unfrozen.isdisjoint(c.chunk.members)]
    for sharded in found:
        check_trainable({p: n for n, p in sharded.chunk.parameters.items()})
    shards.train(found)
