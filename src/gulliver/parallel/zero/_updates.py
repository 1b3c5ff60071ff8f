"""Steps chunks where they lie: each lands, is stepped and starts its gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from gulliver._compat import step_without_hooks
from gulliver.errors import GulliverError
from gulliver.memory import ASKS, before_write
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState


# [Note: the pipeline of a step] With stages 1 and 2 chunks are updated one by one, in the order of
# use. Each is waited for, stepped where it lies, and its gather started; then the next. So the link
# carries the first chunks' parameters while the others are updated, and the next forward begins
# while most of them are still on their way. Only clipping needs all gradients first: one number is
# exchanged for it. With stages 0 and 3 nothing follows an update, and the chunk that is used first
# is the last to be reduced: one call of the optimizer for all is as early, and cheaper. Where
# chunks lie in tiers of memory they are stepped one by one, too: there is no room for all.
#
# [Note: order of updates] Backward completes the last chunk first, so in that order the first
# update could begin earlier. But the gathers would be issued in it too, and the parameters that the
# next forward waits for first would be sent last. In the order of use the forward's first chunk is
# sent first; the price is that the first update waits for the reduction that was issued last. Who
# wants updates during backward asks for them, see `_in_backward.py`.
#
# It does not know why a step is taken.
class Updates:
    """Steps chunks of a sharded state."""

    def __init__(self, shards: ShardedState) -> None:
        self._shards = shards
        # Whether the optimizer may be stepped; the user may not do so past this.
        self.allowed = False
        # Time that the optimizer took, since it was last set.
        self.seconds = 0.0
        setattr(shards.inner, ASKS, shards.changed)
        shards.inner.register_step_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        """Refuses steps of the optimizer from before boost, which would do nothing silently."""
        if not self.allowed:
            raise GulliverError("step the optimizer that boost returned, not the one it was given")

    def step(self, turn: Sequence[int], used: set[str], gather: bool = True) -> None:
        """Steps the chunks of some numbers together, once their gradients are there."""
        shards = self._shards
        chunks = [shards.chunks[number] for number in turn]
        for sharded in chunks:
            shards.reducer.land(sharded)
        if shards.tiers is not None and chunks[0].gradient_shard is None:
            return  # nothing to bring it for
        if shards.tiers is None:
            self._step(chunks, turn, used)
        else:
            with shards.opened(*chunks):  # there is one in a turn
                self._step(chunks, turn, used)
        if gather and shards.stage < 3:
            for sharded in chunks:
                shards.gatherer.start(sharded)

    def _step(self, chunks: Sequence[ShardedChunk], turn: Sequence[int], used: set[str]) -> None:
        shards = self._shards
        for sharded in chunks:
            sharded.show_gradients(used)
        shards.show_pieces(turn[0] if len(turn) == 1 else None)
        before_write(shards.written(turn))
        # In tiers there is one chunk in a turn; elsewhere nothing is made ready for its state.
        with nullcontext() if shards.tiers is None else shards.making_state(chunks[0]):
            begun = time.perf_counter()
            step_without_hooks(shards.inner)
            self.seconds += time.perf_counter() - begun
            for sharded in chunks:
                if not shards.by_chunk:  # those that may be stepped by chunks write in place
                    sharded.take_assigned()
                shards.place_new_state(sharded, used)

    def end(self) -> None:
        """Shows the model's parameters again, and no gradients."""
        if not self.allowed:
            return
        self.allowed = False
        self._shards.show_parameters()
        for sharded in self._shards.chunks:
            sharded.hide_gradients()
