"""Steps each chunk inside of backward, as soon as its reduced gradient is there.

Read `InBackward.reduced` first: the reducer calls it for every chunk that it has sent. Updates, and
with stages 1 and 2 some gathers, then overlap with the backward of earlier layers, and a gradient
lives from its first term to its update only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gulliver._compat import step_hooks
from gulliver.comm import Handle, all_gather
from gulliver.errors import GulliverError
from gulliver.memory import Presence, mark_pending, mark_ready
from gulliver.parallel.zero._groups import first_change
from gulliver.parallel.zero._sharded import ShardedChunk
from gulliver.parallel.zero._shards import ShardedState
from gulliver.parallel.zero._updates import Updates
from gulliver.solve import UPDATE_LAG, gathers_in_backward


# [Note: which chunk when] Gathers are collectives, so all ranks must step chunks at the same place
# among them: a chunk is stepped when `UPDATE_LAG` later ones have been sent, whatever has arrived,
# and the last ones when backward ends. With stages 1 and 2 it is gathered right then, or in the
# step, in the order of use: `gathers_in_backward` decides which, and says why. Until then its
# parameters are neither old nor new, and reading them raises.
#
# [Note: used anywhere] Whether a parameter has a gradient on any rank is voted on before a step,
# see `reduce.py`. Here every chunk has a vote of its own, which is sent next to its gradients;
# with the first go the options of the groups.
#
# [Note: exact or refused] What a loop does between backward and step comes too late for chunks that
# have been stepped: other options, clipping, reading or forgetting gradients, a further backward.
# All of it is refused. What needs all gradients before the first update (a norm to clip to, the
# overflow check of fp16) is given to the optimizer before; nothing is stepped in backward then.
#
# It does not know how gradients are reduced, nor how a chunk is stepped.
class InBackward:
    """Steps chunks while backward goes on."""

    def __init__(self, shards: ShardedState, updates: Updates) -> None:
        self._shards, self._updates = shards, updates
        # Whether a backward has stepped chunks, or could have, and no step has followed.
        self.begun = False
        self._torn = self._suspended = ""
        self._numbers: dict[ShardedChunk, int] = {}
        self._sent: deque[tuple[ShardedChunk, Tensor, Handle]] = deque()
        self._stepped: dict[int, ShardedChunk] = {}
        self._options: dict[str, str] = {}
        self._hooks = ExitStack()

    # Inside of backward.

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Steps what is reduced in this block; every rank enters it."""
        reducer = self._shards.reducer
        self.check_whole()
        self.refuse("backward was called again")
        reducer.check_cleared()
        self.begun = True
        self._numbers = {c: n for n, c in enumerate(self._shards.chunks)}
        count = len(self._numbers)
        try:
            yield
            while self._sent:
                self._step(*self._sent.popleft())
        except BaseException:  # an interrupt leaves the model between two steps, too
            if len(self._numbers) < count:
                self._torn = f"{count - len(self._numbers)} of {count} chunks"
            self._forget()
            raise
        finally:
            self._updates.end()

    def reduced(self, sharded: ShardedChunk) -> None:
        """Called when a chunk's gradients were sent; steps the chunks that are complete."""
        used = self._shards.reducer.used_in(sharded)
        first = not self._sent and len(self._numbers) == len(self._shards.chunks)
        votes = torch.tensor([*used, *self._shards.groups.votes()] if first else used)
        votes = votes.to(torch.uint8)
        why = sharded.purpose("votes on", "in a backward")
        # One exchange, where an all-reduce takes two, and the second would wait for what follows.
        every = votes.new_empty(self._shards.size * len(votes))
        handle = all_gather(every, votes, self._shards.group, async_op=True, purpose=why)
        self._sent.append((sharded, every.view(self._shards.size, -1), handle))
        # On one rank there is nothing to wait for.
        while len(self._sent) > (UPDATE_LAG if self._shards.size > 1 else 0):
            self._step(*self._sent.popleft())

    def _step(self, sharded: ShardedChunk, votes: Tensor, handle: Handle) -> None:
        handle.wait()
        names, answer = list(sharded.chunk.parameters), votes.amax(0).tolist()
        if len(answer) > len(names):
            self._shards.groups.check_votes(answer[len(names) :])
            self._begin()
        self._prepare(sharded)
        used = {name for name, vote in zip(names, answer, strict=False) if vote}
        self._updates.begin()
        number = self._numbers.pop(sharded)
        later = self._is_gathered_later(number)
        self._updates.step([number], used, gather=not later)
        if later:
            self._stepped[number] = sharded
        sharded.is_ahead = True  # reading it now raises, at every stage
        mark_pending(sharded.chunk.members, self._shards.gatherer.touched)
        self._shards.reducer.use_up(sharded)
        # Its buffer was written behind autograd's back: what still refers to it must not be used.
        increment_version(sharded.chunk.members)
        self._shards.gatherer.copies.remember()
        sharded.updates += 1

    def _is_gathered_later(self, number: int) -> bool:
        """Whether a chunk of a number is gathered in the step, and not when it is stepped."""
        shards = self._shards
        gathered = shards.stage in (1, 2) and shards.size > 1
        return gathered and not gathers_in_backward(number, len(shards.chunks))

    def _begin(self) -> None:
        """The first chunk is about to be stepped."""
        self._options = self._shards.groups.options()
        self._updates.begin()
        self._hooks.enter_context(step_hooks(self._shards.inner))

    def _prepare(self, sharded: ShardedChunk) -> None:
        """Takes what was written to the parameters of a chunk that is about to be stepped."""
        sharded.chunk.check_parameters()
        gatherer = self._shards.gatherer
        if self._shards.stage == 3:
            gatherer.release(sharded)
        else:
            gatherer.finish(sharded)
            sharded.chunk.take_writes()

    # The step after it.

    def finish(self, used: set[str], end: Callable[[], None]) -> None:
        """Gathers what backward has stepped, steps what it has not; every rank calls it."""
        self._check_options()
        if self._shards.stage == 3:
            self._shards.gatherer.release_all()
        if not self._options:
            self._begin()
        self._updates.begin()
        try:
            for _, sharded in sorted(self._stepped.items()):
                self._shards.gatherer.start(sharded)
            self._stepped.clear()
            for sharded in self._numbers:
                self._prepare(sharded)
                # An evaluation since may have let more chunks be trained.
                self._updates.step([self._shards.chunks.index(sharded)], used)
                if sharded.gradient_shard is not None:
                    self._shards.reducer.use_up(sharded)
        finally:
            self._updates.end()
        hooks = self._hooks.pop_all()
        self._forget()
        end()
        hooks.close()

    def _check_options(self) -> None:
        """Refuses options that were changed after chunks had been stepped with others."""
        found = self._options and first_change(self._options, self._shards.groups.options())
        if found:
            name, then, now = found
            raise GulliverError(
                f"{name} was changed from {then} to {now} between backward and step, but "
                "step_in_backward has stepped with the first: set it before backward"
            )

    def refuse(self, what: str) -> None:
        """Refuses what comes too late where a backward has begun a step."""
        if self._suspended:
            raise GulliverError(self._suspended)
        if self.begun:
            raise GulliverError(
                f"{what} between backward and step: step_in_backward has begun the step already; "
                "accumulate inside no_sync, clip with the plugin's max_norm, and step first, or "
                "leave step_in_backward out"
            )

    def suspend(self, why: str) -> None:
        """Makes `refuse` refuse everything with these words; empty ones end that."""
        self._suspended = why

    def check_whole(self) -> None:
        """Refuses to go on from the middle of a step."""
        if self._torn:
            raise GulliverError(
                f"the last backward failed when step_in_backward had stepped {self._torn}: load a "
                "checkpoint, the model is between two steps"
            )

    def mend(self) -> None:
        """All values are replaced."""
        self._torn = ""

    def _forget(self) -> None:
        self.begun = False
        self._numbers, self._options = {}, {}
        for sharded in self._shards.chunks:
            if sharded.is_ahead:
                sharded.is_ahead = False
                if sharded.presence is Presence.WHOLE:
                    mark_ready(sharded.chunk.members)
        self._stepped.clear()
        self._sent.clear()
        # Drops the hooks that follow a step without calling them: where a backward failed, no step
        # has ended. `finish` has taken them out before, and calls them itself.
        self._hooks.pop_all()
