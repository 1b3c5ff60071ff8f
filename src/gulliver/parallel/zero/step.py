"""Special steps: with updates during backward, and with unequal work per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gulliver._compat import step_hooks
from gulliver.comm.collectives import Handle, all_gather
from gulliver.comm.watchdog import guard
from gulliver.errors import GulliverError
from gulliver.memory.buffers import Presence
from gulliver.memory.pending import mark_pending, mark_ready
from gulliver.parallel.zero.chunks import UPDATE_LAG, ShardedChunk, gathers_in_backward
from gulliver.parallel.zero.state import ShardedState, train_unfrozen
from gulliver.parallel.zero.tiers import first_change

if TYPE_CHECKING:
    from gulliver.parallel.zero.optimizer import ZeroOptimizer


# Steps each chunk during backward, once its gradient is reduced.
#
# Read `InBackward.reduced` first, which the reducer calls for every chunk that it has sent.
# Updates, and with stages 1 and 2 some gathers, then overlap with the backward of earlier layers,
# and a gradient only exists from its first term to its update.


# [Note: which chunk when] Gathers are collectives, so all ranks must step chunks at the same
# position in their order: a chunk is stepped when `UPDATE_LAG` later ones have been sent,
# regardless of arrivals, and the last ones when backward ends. With stages 1 and 2 it is gathered
# immediately, or in the step, in the order of use, as `gathers_in_backward` decides. Until then its
# parameters are partly updated, and reading them raises an error.
#
# [Note: used anywhere] Whether a parameter has a gradient on any rank is voted on before a step,
# see `reduce.py`. Here every chunk has a separate vote, which is sent with its gradients; the first
# vote includes the options of the groups.
#
# [Note: exact or rejected] Actions between backward and step are too late for chunks that have been
# stepped: changes of options, clipping, reading or clearing gradients, and another backward. All of
# these raise errors. If all gradients are needed before the first update (`max_norm`, or the
# overflow check of fp16), no chunk is stepped in backward.
#
# This class is independent of how gradients are reduced and how a chunk is stepped.
class InBackward:
    """Updates chunks during backward."""

    def __init__(self, shards: ShardedState) -> None:
        self._shards = shards
        # Whether a backward has stepped chunks, or may have, and no step has followed.
        self.begun = False
        self._torn = ""
        self._numbers: dict[ShardedChunk, int] = {}
        self._sent: deque[tuple[ShardedChunk, Tensor, Handle]] = deque()
        self._stepped: dict[int, ShardedChunk] = {}
        self._options: dict[str, str] = {}
        self._hooks = ExitStack()

    # During backward.

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context for a backward pass that updates chunks once they are reduced (collective)."""
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
        except BaseException:  # an interrupt also leaves the model between two steps
            if len(self._numbers) < count:
                self._torn = f"{count - len(self._numbers)} of {count} chunks"
            self._forget()
            raise
        finally:
            self._shards.end_updates()

    def reduced(self, sharded: ShardedChunk) -> None:
        """Callback for a chunk whose reduction has started; updates earlier chunks."""
        used = self._shards.reducer.used_in(sharded)
        first = not self._sent and len(self._numbers) == len(self._shards.chunks)
        votes = torch.tensor([*used, *self._shards.groups.votes()] if first else used)
        votes = votes.to(torch.uint8)
        why = sharded.purpose("votes on", "in a backward")
        # A single exchange; an all-reduce needs two, of which the second would wait for later
        # messages.
        every = votes.new_empty(self._shards.size * len(votes))
        handle = all_gather(every, votes, self._shards.group, async_op=True, purpose=why)
        self._sent.append((sharded, every.view(self._shards.size, -1), handle))
        # A single rank does not wait.
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
        self._shards.begin_updates()
        number = self._numbers.pop(sharded)
        later = self._is_gathered_later(number)
        self._shards.update([number], used, gather=not later)
        if later:
            self._stepped[number] = sharded
        sharded.is_ahead = True  # reading it now raises an error, in every stage
        mark_pending(sharded.chunk.members, self._shards.gatherer.touched)
        self._shards.reducer.use_up(sharded)
        # Its buffer was written without autograd, so graphs that refer to it must not be used.
        increment_version(sharded.chunk.members)
        self._shards.gatherer.note_versions()
        sharded.updates += 1

    def _is_gathered_later(self, number: int) -> bool:
        shards = self._shards
        gathered = shards.stage in (1, 2) and shards.size > 1
        return gathered and not gathers_in_backward(number, len(shards.chunks))

    def _begin(self) -> None:
        self._options = self._shards.groups.options()
        self._shards.begin_updates()
        self._hooks.enter_context(step_hooks(self._shards.inner))

    def _prepare(self, sharded: ShardedChunk) -> None:
        sharded.chunk.check_parameters()
        gatherer = self._shards.gatherer
        if self._shards.stage == 3:
            gatherer.release(sharded)
        else:
            gatherer.finish(sharded)
            sharded.chunk.take_writes()

    # The step after it.

    def finish(self, used: set[str], end: Callable[[], None]) -> None:
        """Updates the remaining chunks, and gathers the ones updated in backward (collective)."""
        self._check_options()
        if self._shards.stage == 3:
            self._shards.gatherer.release_all()
        if not self._options:
            self._begin()
        self._shards.begin_updates()
        try:
            for _, sharded in sorted(self._stepped.items()):
                self._shards.gatherer.start(sharded)
            self._stepped.clear()
            for sharded in self._numbers:
                self._prepare(sharded)
                # An evaluation since then may have unfrozen more chunks.
                self._shards.update([self._shards.chunks.index(sharded)], used)
                if sharded.gradient_shard is not None:
                    self._shards.reducer.use_up(sharded)
        finally:
            self._shards.end_updates()
        hooks = self._hooks.pop_all()
        self._forget()
        end()
        hooks.close()

    def _check_options(self) -> None:
        found = self._options and first_change(self._options, self._shards.groups.options())
        if found:
            name, then, now = found
            raise GulliverError(
                f"{name} was changed from {then} to {now} between backward and step, but "
                "chunks were already stepped with the old value; change it before backward"
            )

    def refuse(self, what: str) -> None:
        if self.begun:
            raise GulliverError(
                f"{what} between backward and step, but step_in_backward has already stepped "
                "chunks; accumulate in no_sync, clip with the plugin's max_norm, call step first, "
                "or disable step_in_backward"
            )

    def check_whole(self) -> None:
        if self._torn:
            raise GulliverError(
                f"the last backward failed after step_in_backward had stepped {self._torn}, so the "
                "model is inconsistent; load a checkpoint"
            )

    def mend(self) -> None:
        """Marks the model as consistent, after a checkpoint replaced all values."""
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
        # Drops the hooks after a step without calling them, because after a failed backward no step
        # has ended. `finish` removes them before, and calls them itself.
        self._hooks.pop_all()


# Steps in which each rank calls forward and backward as often as it has work, or never.
#
# The loop of a step looks like this:
#
#     with uneven_step(optimizer) as uneven:
#         for batch in mine:
#             uneven.backward(loss(batch), last=batch is mine[-1])
#     optimizer.step()


UNFINISHED = (
    "a step with unequal work per rank has not ended: call its backward(loss) inside the loop over "
    "micro-batches, and the optimizer's step(), zero_grad() and clipping after the loop"
)
LEFT = (
    "the loop over a step was left before its end, so its gradients are incomplete: call the "
    "optimizer's zero_grad() on all ranks and repeat the step"
)
OUTSIDE = (
    "loss.backward() was called inside a step whose ranks have unequal work: its gradient would "
    "not be weighted; call step.backward(loss) once for each micro-batch, with all terms in that "
    "loss; to restart the step, call optimizer.zero_grad() on all ranks"
)


# [Note: one reduction] Collectives must be issued in the same order on all ranks, and a backward of
# stages 2 and 3 issues some. So within such a step nothing is sent: in all stages gradients are
# accumulated locally, and reduced once, with each rank's last backward. A rank without any sends
# zeros. With stage 3 all parameters are gathered when the step begins and released when it ends, so
# the step needs the memory of stage 1.
#
# Under a memory limit they are gathered into evictable copies (`Gatherer`), and reductions wait
# until these are freed.
#
# The obvious alternative, empty passes for ranks without work, would keep stage 3's memory, but all
# ranks would wait for the slowest at every micro-batch, whereas only entire steps are balanced.
class UnevenStep:
    """The backward passes of one step on this rank; ranks may have different numbers of them."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer, self.sent = optimizer, False
        self._reducer = optimizer.shards.reducer
        # Under a limit gradients are sent once the copies of parameters are freed.
        self.waits = optimizer.shards.manager is not None

    @property
    def _scale(self) -> float:
        scaler = self._optimizer.scaler
        return 1.0 if scaler is None else scaler.scale

    def backward(self, loss: Tensor, last: bool) -> None:
        """Runs backward of a loss; with `last`, starts reducing the accumulated gradients."""
        if self.sent:
            raise GulliverError(
                "backward was called after the step's last backward; call it once per micro-batch"
            )
        last, scale = last and not self.waits, self._scale
        with guard(), self._reducer.backward(last, scale), self._passes():
            (loss if scale == 1.0 else loss * scale).backward()
        self.sent = last

    @contextmanager
    def several(self) -> Iterator[float]:
        """Context for backward passes that other code runs, such as a pipeline schedule.

        Yields the loss scale. Accumulated gradients are reduced when the step ends.
        """
        with guard(), self._reducer.backward(reduce=False, scale=self._scale):
            yield self._scale

    @contextmanager
    def _passes(self) -> Iterator[None]:
        if self._optimizer.shards.manager is None:
            yield
            return
        gatherer = self._optimizer.gatherer
        gatherer.enter_backward()
        try:
            with self._optimizer.saving():
                yield
        finally:
            gatherer.leave_backward()

    def finish(self) -> None:
        """Reduces the gradients if `backward` has not; missing gradients are sent as zeros."""
        self._reducer.check_stray()
        if self.waits:
            return
        if not self.sent:
            self._optimizer.join_copies()
            with guard(), self._reducer.backward(reduce=True, scale=self._scale):
                pass
        self.sent = True

    def finish_waiting(self) -> None:
        self.waits = False
        self.finish()


@contextmanager
def uneven_step(optimizer: ZeroOptimizer) -> Iterator[UnevenStep]:
    """Context for a step in which ranks may run different numbers of passes (collective)."""
    check_uneven(optimizer)
    if optimizer.unfinished:  # earlier gradients would also count in this step
        raise GulliverError(optimizer.unfinished)
    shards = optimizer.shards
    train_unfrozen(shards)
    with optimizer.suspended(UNFINISHED, LEFT), shards.reducer.refusing(OUTSIDE):
        step = UnevenStep(optimizer)
        with shards.gatherer.whole():
            yield step
            step.finish()
        step.finish_waiting()


def check_uneven(optimizer: ZeroOptimizer) -> None:
    limited = optimizer.shards.manager is not None
    found = {
        "step_in_backward": optimizer.options.step_in_backward,
        "a memory limit that was planned for equal work: boost with "
        "DataCentricPlugin(memory_limit=...)": limited and not optimizer.shards.options.unequal,
        "the tuning of chunks (give chunk_mb a number)": optimizer.tuner is not None,
    }
    for what, there in found.items():
        if there:
            raise GulliverError(f"steps with unequal work per rank are not supported with {what}")
