"""Steps chunks where they lie: each lands, is stepped and starts its gather."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gulliver._compat import step_without_hooks
from gulliver.errors import GulliverError
from gulliver.memory import ASKS, before_write
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState


# [Note: the pipeline of a step] With stages 1 and 2 chunks are updated one by one, in the order of
# use. Each is waited for, stepped where it lies, and its gather started; then the next. So the link
# carries the first chunks' parameters while the others are updated, and the next forward begins
# while most of them are still in flight. Only clipping needs all gradients first: one number is
# exchanged for it. With stages 0 and 3 nothing follows an update, and the chunk that is used first
# is the last to be reduced: one call of the optimizer for all is as early, and cheaper. Where
# chunks lie in tiers of memory they are stepped one by one, too: there is no room for all.
#
# [Note: order of updates] Backward completes the last chunk first, so in that order the first
# update could begin earlier. But the gathers would be issued in it too, and the parameters that the
# next forward waits for first would be sent last. In the order of use the forward's first chunk is
# sent first; the price is that the first update waits for the reduction that was issued last. Who
# wants updates during backward asks for them, see `step.py`.
class Updates:
    """Steps chunks of a sharded state."""

    def __init__(self, shards: ShardedState) -> None:
        self._shards = shards
        # Whether the optimizer may be stepped now: users may not do so themselves.
        self._allowed = False
        # Seconds that the optimizer took since `begin`.
        self.seconds = 0.0
        setattr(shards.inner, ASKS, shards.changed)
        shards.inner.register_step_pre_hook(self._refuse)

    def _refuse(self, *_: Any) -> None:
        """Refuses steps of the optimizer from before boost, which would do nothing silently."""
        if not self._allowed:
            raise GulliverError("step the optimizer that boost returned, not the one it was given")

    def begin(self) -> None:
        """Allows steps of the optimizer until `end`."""
        self._allowed, self.seconds = True, 0.0

    def step(self, numbers: Sequence[int], used: set[str], gather: bool = True) -> None:
        """Steps the chunks of some numbers together, once their gradients are there.

        Args:
            numbers: numbers of chunks.
            used: names of parameters that have a gradient on any rank.
            gather: whether their gathers are started, below stage 3.
        """
        shards = self._shards
        chunks = [shards.chunks[number] for number in numbers]
        for sharded in chunks:
            shards.reducer.wait_reduction(sharded)
        if shards.states.tiered and chunks[0].gradient_shard is None:
            return  # nothing to fetch it for
        with shards.states.opened(chunks[0]):  # in tiers there is only one
            self._step(chunks, numbers, used)
        if gather and shards.stage < 3:
            for sharded in chunks:
                shards.gatherer.start(sharded)

    def _step(self, chunks: Sequence[ShardedChunk], numbers: Sequence[int], used: set[str]) -> None:
        shards = self._shards
        for sharded in chunks:
            sharded.show_gradients(used)
        shards.groups.show_pieces(numbers[0] if len(numbers) == 1 else None)
        before_write(shards.states.written(chunks))
        with shards.states.making(chunks[0]):
            begun = time.perf_counter()
            step_without_hooks(shards.inner)
            self.seconds += time.perf_counter() - begun
            for sharded in chunks:
                if not shards.states.by_chunk:  # those that may be stepped by chunks write in place
                    sharded.take_assigned()
                shards.states.place_new(sharded, used)

    def end(self) -> None:
        """Shows the model's parameters again, and no gradients."""
        if not self._allowed:
            return
        self._allowed = False
        self._shards.groups.show_parameters()
        for sharded in self._shards.chunks:
            sharded.hide_gradients()
