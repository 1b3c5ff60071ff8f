"""Reduces gradients: from the chunk in which backward adds them up to the shards of the ranks.

Read `Phase` in `_sharded.py` first, then `GradientReducer.backward`, `_ready_hook`, `_reduce`
and `land`. A reduction travels while backward, and whatever follows it, goes on; whoever needs its
result lands it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gulliver.comm import Group, Purpose, all_reduce, group_size
from gulliver.errors import GulliverError
from gulliver.memory import PlacedChunk, ReducedGradient
from gulliver.parallel.zero._groups import gradient_was_set
from gulliver.parallel.zero._sending import GradientSender, ZeroWires
from gulliver.parallel.zero._sharded import Phase, ShardedChunk, Squared

IN_FLIGHT = 4
"""Chunks that stages 2 and 3 let travel at once: bounds the whole gradient buffers alive."""

STEPS = Purpose("steps the optimizer, or reads its gradients", 1)
"""What the vote before a step is for; codes of chunks begin at 256."""


# [Note: gradients leave the parameters] The obvious way is to leave gradients in ``parameter.grad``
# and to reduce them in the step. Then nothing would hide the messages, and whole gradients of all
# parameters would be there at once. So a chunk is reduced as soon as its gradients are complete,
# while backward computes those of earlier layers; from stage 2 on its buffer goes back to the pool
# after that. From then on a parameter has nothing true to show, but at stage 0 when the reduction
# has ended: what this rank added up is no mean, and its memory may hold other gradients. So at all
# stages a `ReducedGradient` stands there, which refuses norms and changes in place.
#
# [Note: order of the sum] Sums of floats depend on the order of their terms. A ring adds each
# element's terms in an order that depends on where in the buffer it lies, so the bits of a run
# would change with the size of chunks, which tuning picks by measured times. So over gloo terms are
# added in the order of the ranks wherever an element lies (`comm/_exchange.py`), and gloo's own
# ring is allowed between two ranks only, whose sum is the same either way. Updates are element by
# element, so the cut shows nowhere else but in the last bits of a norm, which is added up chunk by
# chunk, in float64.
#
# [Note: one order on all ranks] Ranks may differ in which parameters a backward touches and when,
# yet collectives must be issued in one order everywhere. So chunks are reduced strictly from the
# last to the first: a chunk goes when its gradients are complete and all later chunks have gone.
# What a backward did not touch is found at its end, and follows in the same order with zeros.
# Chunks that no rank used as wholes in the last step stand at the end of the order: no other waits
# for them.
#
# One rank has nothing to agree on: it reduces chunks as they are complete, and none that has
# nothing.
#
# [Note: used anywhere] A parameter without a gradient on this rank may have one elsewhere; its mean
# is not zero then. Whether it had one on any rank, since gradients were last forgotten, is voted on
# before each step, in one small exchange. Without any, it is left alone, as torch leaves a gradient
# of None.
#
# [Note: cleared gradients] From its reduction on a parameter's grad is a `ReducedGradient`. If it
# is None later, somebody cleared it (``model.zero_grad()``), and its shards are zeroed before more
# is added.
#
# It does not know what an optimizer is.
class GradientReducer:
    """Reduces the gradients of chunks to shards while backward goes on."""

    def __init__(
        self,
        chunks: Sequence[ShardedChunk],
        stage: int,
        group: Group,
        overlap: bool = True,
        wires: ZeroWires | None = None,
    ) -> None:
        self.stage, self.group, self.overlap = stage, group, overlap
        # Sends them, and compares what arrives.
        self.sender = GradientSender(group, wires or ZeroWires())
        self.size = group_size(group)
        self.scale, self.closed, self.spoilt = 1.0, "", False
        # Squared norm of a chunk's gradient, to be taken while it is here; None where nobody asks
        # for it.
        self.squared: Squared | None = None
        # Called with the name of a parameter whose gradient has come.
        self.noted: Callable[[str], None] | None = None
        # Called with a chunk whose gradients are on their way.
        self.sent: Callable[[ShardedChunk], None] | None = None
        # With one rank there is nothing to wait for.
        self._in_flight = IN_FLIGHT if self.size > 1 else 0
        self._home: dict[str, ShardedChunk] = {}
        self._used: set[str] = set()
        self._next = 0
        self._reducing = self._settled = False
        self._flying: deque[ShardedChunk] = deque()
        self.record: Callable[[str, ShardedChunk], None] | None = None
        self._hooks: list = []
        self.take(chunks)

    def take(self, chunks: Sequence[ShardedChunk]) -> None:
        """Reduces these chunks from here on, of which it may know some."""
        known, self.chunks = self._home, chunks
        self._home = {name: c for c in chunks for name in c.chunk.parameters}
        self._late, self._order = set[ShardedChunk](), list(reversed(chunks))
        for name in self._home.keys() - known.keys():
            parameter = self._home[name].chunk.parameters[name]
            needed = parameter.requires_grad  # hooks are taken then only, and stay
            self._hooks += [
                parameter.requires_grad_().register_hook(self._before_hook(name)),
                parameter.register_post_accumulate_grad_hook(self._ready_hook(name)),
            ]
            parameter.requires_grad_(needed)

    def _before_hook(self, name: str) -> Callable[[object], None]:
        """Makes the hook before autograd adds to a parameter: the gradient must be a view then."""
        # It runs for every parameter in every backward, so the usual case calls nothing: the chunk
        # collects, and the parameter has no gradient yet, or its view.
        sharded = self._home[name]
        chunk, parameter = sharded.chunk, sharded.chunk.parameters[name]

        def before(_: object) -> None:
            if chunk.resting:
                chunk.wake_gradient()
            if sharded.phase is Phase.COLLECTING and not self._settled:
                if parameter.grad is None:
                    if name in chunk.blank and name not in chunk.placed:
                        return
                elif type(parameter.grad) is not ReducedGradient:
                    return
            self._before_gradient(name)

        return before

    def _ready_hook(self, name: str) -> Callable[[object], None]:
        """Makes the hook after it: places the gradient, and reduces complete chunks in turn."""
        sharded = self._home[name]
        place, waiting, ordered = sharded.chunk.place_gradient, sharded.waiting, self.size > 1
        parks = isinstance(sharded.chunk, PlacedChunk)

        def ready(_: object) -> None:
            if self.closed:  # not before it is added: `autograd.grad` only looks at it
                # Whether one has come all the same, since gradients were last forgotten.
                self.spoilt = True
                raise GulliverError(self.closed)
            place(name)
            if self.noted is not None:
                self.noted(name)
            if self._reducing:
                if name in waiting:
                    del waiting[name]
                if not waiting:
                    if ordered:
                        self._reduce_complete()
                        if parks and sharded.phase is Phase.COLLECTING:  # it waits for others
                            sharded.chunk.wake_gradient()
                            self._gather_up(sharded)
                            sharded.chunk.park_gradient()
                    else:
                        self._reduce(sharded)
            elif parks:
                # The next micro-batch adds to it; until then its memory may serve others.
                waiting.pop(name, None)
                if not waiting:
                    sharded.chunk.rest_gradient()
                    waiting.update(sharded.chunk.parameters)

        return ready

    def relieve(self) -> None:
        """Lands what travels, and lets go of gradients that are being collected."""
        # These come again with their next terms. To wait is safe: what travels has been issued, in
        # one order on all ranks, so none of them waits for what another has yet to issue.
        self.land_all()
        for sharded in self.chunks:
            if sharded.phase is Phase.COLLECTING:
                sharded.chunk.rest_gradient()

    def close(self) -> None:
        """Lets go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def backward(self, reduce: bool) -> Iterator[None]:
        """Wraps one backward; with `reduce` all its gradients are on their way when it ends."""
        # A backward outside of this context, or without `reduce`, only adds up; `settle` or the
        # next one that reduces brings it all.
        self._settled = False
        self.land_all()
        for sharded in self.chunks:
            sharded.waiting.update(sharded.chunk.parameters)
        if not reduce:
            yield
            return
        self._next, self._reducing = 0, True
        try:
            yield
            self._reduce_rest()
        finally:
            self._reducing = False

    def settle(
        self, beside: Sequence[int] = (), check: Callable[[list[int]], None] | None = None
    ) -> set[str]:
        """Sends every gradient on its way, however backward was called; every rank calls it."""
        for sharded in self.chunks:
            self._forget_cleared(sharded)
            self._used |= sharded.chunk.placed.keys()
        names = list(self._home)
        collecting = any(c.phase is Phase.COLLECTING for c in self.chunks)
        foreign = [name for c in self.chunks for name in c.chunk.foreign_gradients()]
        # On the CPU: the host waits for the answer, a device need not.
        ours = [*[n in self._used for n in names], collecting, bool(foreign), *beside]
        votes = torch.tensor(ours, dtype=torch.uint8)
        all_reduce(votes, "max", self.group, purpose=STEPS)
        answer = votes.tolist()
        used, (pending, set_by_user, *others) = answer[: len(names)], answer[len(names) :]
        # On all ranks at once, or the others would wait for one that has raised.
        if set_by_user:
            raise gradient_was_set(foreign)
        if check is not None:
            check(others)
        if pending:
            self.land_all()
            self._next = 0
            self._reduce_rest()
        if self.sender.checking:
            self.land_all()
        self.sender.settled(names, cut=self.stage > 0)
        self._settled = True
        found = {name for name, vote in zip(names, used, strict=True) if vote}
        self._sort(found)
        return found

    def _sort(self, used: set[str]) -> None:
        """Lets chunks that are not used as wholes come last: the others would wait for them."""
        every = self.size == 1 or len(used) == len(self._home)
        unused = (
            [] if every else [c for c in self.chunks if not used.issuperset(c.chunk.parameters)]
        )
        late = set(unused)
        if late != self._late:
            self._late = late
            order = self.chunks[::-1]
            self._order = [c for c in order if c not in late] + [c for c in order if c in late]

    def used_in(self, sharded: ShardedChunk) -> list[bool]:
        """Says which parameters of a chunk have had a gradient on this rank."""
        return [name in self._used for name in sharded.chunk.parameters]

    def use_up(self, sharded: ShardedChunk) -> None:
        """Gives the gradient of a chunk up that was stepped; zero_grad has to follow."""
        assert sharded.gradient_shard is not None, "it has landed"
        sharded.forget_gradient()
        sharded.used_up = True

    def check_cleared(self) -> None:
        """Refuses to add to gradients that were used up."""
        for sharded in self.chunks:
            if sharded.used_up:
                self._check_cleared(sharded)

    def _check_cleared(self, sharded: ShardedChunk) -> None:
        cleared = sharded.chunk.cleared_names()
        if len(cleared) < len(sharded.chunk.members):
            raise GulliverError(
                "gradients would be added to those of the last step, which step_in_backward has "
                "used up: call zero_grad after each step"
            )
        self._used.difference_update(cleared)
        sharded.used_up = False

    @property
    def settled(self) -> bool:
        """Whether nothing came since `settle`."""
        return self._settled

    def unsettle(self) -> None:
        """Notes that the settled gradients were made use of, and that others may come."""
        self._settled = False

    def forget(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, or makes those that there are zero."""
        self._settled = self.spoilt = False
        self.land_all()
        for sharded in self.chunks:
            sharded.used_up = False
            if set_to_none:
                self._empty(sharded)
                continue
            # A buffer that is being filled goes on being filled, from zero.
            sharded.chunk.wake_gradient()
            sharded.chunk.fetch_gradient()
            if sharded.chunk.gradient is not None:
                sharded.chunk.gradient.zero_()
            for gradient in sharded.gradients(write=True):
                gradient.zero_()
        if set_to_none:
            self._used.clear()

    def _empty(self, sharded: ShardedChunk) -> None:
        if sharded.phase is Phase.COLLECTING:
            sharded.move(Phase.EMPTY)
        sharded.chunk.clear_gradient()
        sharded.forget_gradient()
        if self.stage != 1 or sharded.reduced_in_place:
            sharded.chunk.free_gradient()

    def _before_gradient(self, name: str) -> None:
        """Lets a chunk collect, and takes the stand-in away where autograd is about to add."""
        home = self._home[name]
        if self._settled and not self._reducing:
            raise GulliverError(
                "loss.backward() was called after clipping or reading the gradients and before "
                "step: do that when all gradients are there, or use booster.backward"
            )
        if home.phase is Phase.REDUCING or home.chunk.parked:
            if self._reducing:
                raise GulliverError(
                    f"parameter {name!r} got a second gradient within one backward: with "
                    "activation checkpointing of shared modules use use_reentrant=False"
                )
            self.land_all()
        parameter = home.chunk.parameters[name]
        if home.phase is Phase.EMPTY:
            self._begin(home)
        elif parameter.grad is None:
            self._forget_cleared(home)
        if type(parameter.grad) is ReducedGradient:
            parameter.grad = None  # the first gradient is taken as it comes

    def _reduce_complete(self) -> None:
        """Reduces the chunks that are complete and in turn."""
        order = self._order
        while self._next < len(order) and not order[self._next].waiting:
            self._next += 1
            self._reduce(order[self._next - 1])

    def open_gradient(self, name: str) -> torch.Tensor:
        """Returns what backward has added up for a parameter, not reduced yet, to be changed."""
        # Zeros where nothing came: then it counts as used from here on.
        parameter = self._home[name].chunk.parameters[name]
        self._home[name].chunk.wake_gradient()
        if name not in self._home[name].chunk.placed:
            self._before_gradient(name)
            parameter.grad = torch.zeros_like(parameter)
            self._ready_hook(name)(None)
            self._home[name].chunk.wake_gradient()
        assert parameter.grad is not None
        return parameter.grad

    def _begin(self, sharded: ShardedChunk) -> None:
        if sharded.used_up and self.sent is not None:
            raise GulliverError(
                "a parameter gets a further gradient after step_in_backward has stepped it, as "
                "one does that reentrant checkpoints share: use checkpoint(..., "
                "use_reentrant=False), or leave step_in_backward out"
            )
        if sharded.used_up:
            self._check_cleared(sharded)
        self._forget_cleared(sharded)
        sharded.chunk.begin_gradient()
        sharded.move(Phase.COLLECTING)
        if self.record is not None:
            self.record("collecting", sharded)

    def _reduce(self, sharded: ShardedChunk) -> None:
        """Starts the way of a chunk's gradients to the shards."""
        if sharded.phase is Phase.EMPTY:
            self._begin(sharded)
        sharded.chunk.wake_gradient()
        if sharded.chunk.parked:
            sharded.chunk.fetch_gradient()
        else:
            self._gather_up(sharded)
        if self.record is not None:
            self.record("reduced", sharded)
        sharded.incoming, sharded.reduction = self.sender.send(sharded)
        sharded.move(Phase.REDUCING)
        self._flying.append(sharded)
        if self.stage >= 2 and len(self._flying) > self._in_flight:
            self.land(self._flying[0])
        if not self.overlap:
            self.land_all()
        if self.sent is not None:
            self.sent(sharded)

    def _gather_up(self, sharded: ShardedChunk) -> None:
        """Takes what was collected, with zeros for what was not, out of the parameters' sight."""
        self._forget_cleared(sharded)
        sharded.chunk.complete_gradient()
        self._used |= sharded.chunk.placed.keys()
        sharded.chunk.mark_reduced()

    def land(self, sharded: ShardedChunk) -> None:
        """Waits for a reduction under way and adds its result to the shard's gradient."""
        if sharded.phase is not Phase.REDUCING:
            return
        assert sharded.reduction is not None
        assert sharded.incoming is not None
        sharded.reduction.wait()
        self.sender.landed(sharded, sharded.incoming)
        self._flying.remove(sharded)  # room may have to be made on the way, by landing the others
        incoming, sharded.reduction, sharded.incoming = sharded.incoming, None, None
        if self.stage != 1:
            sharded.chunk.free_gradient()
        if self.scale != 1.0:
            incoming /= self.scale
        if sharded.gradient_shard is None:
            self._measure(sharded, incoming)
            sharded.gradient_shard = sharded.chunk.park_reduced(incoming)
        else:
            for gradient in sharded.gradients(write=True):
                gradient += incoming
                self._measure(sharded, gradient)
            sharded.chunk.give_reduced(incoming)
        sharded.move(Phase.EMPTY)
        sharded.zero_gradients(sharded.chunk.cleared_names())

    def _measure(self, sharded: ShardedChunk, gradient: torch.Tensor) -> None:
        if self.squared is not None:
            sharded.squared = self.squared(sharded, gradient)

    def land_all(self) -> None:
        """Waits for all reductions under way."""
        while self._flying:
            self.land(self._flying[0])

    def _reduce_rest(self) -> None:
        """Lets the chunks follow that a backward did not complete."""
        if self.size == 1:
            for sharded in reversed(self.chunks):
                sharded.waiting.clear()
                if sharded.phase is Phase.COLLECTING or self._lacks_zeros(sharded):
                    self._reduce(sharded)
            return
        while self._next < len(self._order):
            self._next += 1
            self._reduce(self._order[self._next - 1])

    def _lacks_zeros(self, sharded: ShardedChunk) -> bool:
        """Whether the gradients of a chunk have been made zero when they had been used up."""
        gone = sharded.phase is Phase.EMPTY and sharded.gradient_shard is None
        return gone and not sharded.used_up and any(self.used_in(sharded))

    def _forget_cleared(self, sharded: ShardedChunk) -> None:
        """Drops the gradients of parameters whose grad was set to None; see the note above."""
        if sharded.phase is Phase.EMPTY and sharded.gradient_shard is None:
            return
        cleared = sharded.chunk.cleared_names()
        if not cleared:
            return
        self._used.difference_update(cleared)
        if sharded.phase is not Phase.REDUCING:
            # What was added up before is zeroed once, here: a gradient may be there afterwards.
            sharded.zero_gradients(cleared)
        if sharded.phase is Phase.COLLECTING:
            sharded.chunk.note_cleared(cleared)
