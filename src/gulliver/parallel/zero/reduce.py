"""Reduces gradients from the buffers of backward to the ranks' gradient shards.

Read `Phase` in `chunks.py` first, then `GradientReducer.backward`, `_ready_hook`, `_reduce`
and `wait_reduction`. A reduction stays in flight during backward and afterwards, until its result
is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gulliver.comm.collectives import Group, Handle, all_reduce, group_size, reduce_scatter
from gulliver.comm.groups import ALONE
from gulliver.comm.host import host_team
from gulliver.comm.watchdog import Purpose
from gulliver.errors import GulliverError
from gulliver.memory.chunk import Chunk, ReducedGradient
from gulliver.memory.managed_chunk import ManagedChunk
from gulliver.parallel.zero.chunks import Phase, ShardedChunk, Squared
from gulliver.parallel.zero.gate import GradientGate, ZeroWires
from gulliver.parallel.zero.tiers import gradient_was_set
from gulliver.precision.wire.formats import IDENTITY

IN_FLIGHT = 4
"""Maximum reductions in flight from stage 1 on; bounds the full gradients in memory."""

STEPS = Purpose("steps the optimizer, or reads its gradients", 1)
"""Purpose of the vote before a step, for the watchdog; codes of chunks begin at 256."""


# [Note: gradients leave the parameters] The obvious way is to leave gradients in ``parameter.grad``
# and to reduce them in the step. Then all messages would be exposed, and full gradients of all
# parameters would exist at the same time. So a chunk is reduced as soon as its gradients are
# complete, while backward computes those of earlier layers; its buffer then returns to the pool.
# From then on a parameter has no meaningful gradient, except in stage 0 after the reduction: this
# rank's sum is not a mean, and its memory may hold other gradients. So in all stages a
# `ReducedGradient` replaces it, which rejects norms and in-place changes.
#
# [Note: order of the sum] Sums of floats depend on the order of their terms. A ring adds each
# element's terms in an order that depends on its position in the buffer, so results would vary with
# the chunk size, which tuning chooses by measured times. So over gloo, terms are added in rank
# order at every position (`comm/steps.py`), and gloo's own ring is only used between two ranks, for
# which the order does not matter. Updates are element-wise, so the partition only affects the last
# bits of a norm, which is accumulated by chunk, in float64.
#
# [Note: one order on all ranks] Ranks may differ in which parameters a backward touches and when,
# yet collectives must be issued in one order everywhere. So chunks are reduced strictly from the
# last to the first: a chunk is sent when its gradients are complete and all later chunks have been
# sent. Chunks that a backward did not reach follow at its end, in the same order, with zeros.
# Chunks with unused parameters in the last step are last in the order, so that no other waits for
# them.
#
# A single rank needs no common order: it reduces chunks once they are complete, and skips unused
# ones.
#
# [Note: used anywhere] A parameter without a gradient on this rank may have one on another; its
# mean is then not zero. Before each step, a small vote determines whether any rank has had a
# gradient of it since gradients were last cleared. Without any, the parameter is not updated, as in
# torch with a gradient of None.
#
# [Note: cleared gradients] After its reduction a parameter's grad is a `ReducedGradient`. If it is
# None later, the user has cleared it (``model.zero_grad()``), and its shards are zeroed before more
# is added.
#
# This class is independent of optimizers.
class GradientReducer:
    """Reduces gradients of chunks to shards during backward."""

    def __init__(
        self,
        stage: int,
        group: Group,
        overlap: bool = True,
        wires: ZeroWires | None = None,
    ) -> None:
        self.stage, self.overlap = stage, overlap
        self.group, self.size = group, group_size(group)
        self.sender = GradientSender(group, wires or ZeroWires())
        # Whether a gradient was accumulated where this is rejected, since gradients were last
        # cleared.
        self.stray_gradient_seen = False
        self.chunks: Sequence[ShardedChunk] = ()
        self._scale = 1.0
        self._refusal = ""
        self._squared: Squared | None = None
        self._on_sent: Callable[[ShardedChunk], None] | None = None
        # With one rank there is nothing to wait for.
        self._in_flight = IN_FLIGHT if self.size > 1 else 0
        self._chunk_of: dict[str, ShardedChunk] = {}
        self._used: set[str] = set()
        self._next = 0
        self._reducing = self._voted = False
        self._flying: deque[ShardedChunk] = deque()
        self._hooks: dict[ShardedChunk, list[RemovableHandle]] = {}
        self._late, self._order = set[ShardedChunk](), list[ShardedChunk]()

    def measure(self, squared: Squared) -> None:
        """Sets the function that computes squared norms of gradients while they are loaded."""
        self._squared = squared

    def take(self, chunks: Sequence[ShardedChunk]) -> None:
        """Sets the chunks to reduce, in the order of use; keeps the hooks of known chunks."""
        gone = self._hooks.keys() - set(chunks)
        for sharded in gone:
            for hook in self._hooks.pop(sharded):
                hook.remove()
        if gone:
            self._used, self._voted = set(), False
        self.chunks = chunks
        self._chunk_of = {name: c for c in chunks for name in c.chunk.parameters}
        self._late, self._order = set(), list(reversed(chunks))
        if gone:
            self.sender.take_lost(self.sender.lost())
        for sharded in chunks:
            if sharded not in self._hooks:
                sharded.chunk.gradients.direct = self.sender.is_direct(sharded.chunk)
                self._hooks[sharded] = [*self._hooks_of(sharded)]

    def _hooks_of(self, sharded: ShardedChunk) -> Iterator[RemovableHandle]:
        for name, parameter in sharded.chunk.parameters.items():
            needed = parameter.requires_grad  # torch only accepts hooks then, and they stay
            parameter.requires_grad_()
            yield parameter.register_hook(self._before_hook(sharded, name))
            yield parameter.register_post_accumulate_grad_hook(self._ready_hook(sharded, name))
            parameter.requires_grad_(needed)

    def _before_hook(self, sharded: ShardedChunk, name: str) -> Callable[[object], None]:
        """Creates a hook that makes a gradient a buffer view before autograd accumulates it."""
        # Runs for every parameter in every backward, so the usual case makes no calls: the chunk is
        # collecting, and the parameter has no gradient yet, or its view.
        gradients, parameter = sharded.chunk.gradients, sharded.chunk.parameters[name]

        def before(_: object) -> None:
            if gradients.resting:
                gradients.wake()
            if sharded.phase is Phase.COLLECTING and not self._voted:
                if parameter.grad is None:
                    if name in gradients.blank and name not in gradients.placed:
                        return
                elif type(parameter.grad) is not ReducedGradient:
                    return
            self._before_gradient(name)

        return before

    def _ready_hook(self, sharded: ShardedChunk, name: str) -> Callable[[object], None]:
        """Creates the hook that records a gradient and reduces complete chunks in order."""
        gradients, waiting, ordered = sharded.chunk.gradients, sharded.waiting, self.size > 1
        place, parks = gradients.place, isinstance(sharded.chunk, ManagedChunk)

        def ready(_: object) -> None:
            # Rejected here and not before accumulation, because `autograd.grad` does not
            # accumulate.
            if self._refusal:
                self.stray_gradient_seen = True
                raise GulliverError(self._refusal)
            place(name)
            if self._reducing:
                waiting.pop(name, None)
                if not waiting:
                    if ordered:
                        self._reduce_complete()
                        if parks and sharded.phase is Phase.COLLECTING:  # it waits for others
                            gradients.wake()
                            self._gather_up(sharded)
                            gradients.park()
                    else:
                        self._reduce(sharded)
            elif parks:
                # The next micro-batch adds to it; until then its memory may be used otherwise.
                waiting.pop(name, None)
                if not waiting:
                    gradients.rest()
                    waiting.update(sharded.chunk.parameters)

        return ready

    def release_idle(self) -> None:
        """Waits for pending reductions, then makes accumulated gradients evictable."""
        # They are loaded again for their next terms. Waiting is safe, because reductions in flight
        # were issued in the same order on all ranks, so none waits for one that another rank has
        # yet to issue.
        self.wait_all_reductions()
        for sharded in self.chunks:
            if sharded.phase is Phase.COLLECTING:
                sharded.chunk.gradients.rest()

    @contextmanager
    def backward(
        self,
        reduce: bool,
        scale: float = 1.0,
        on_sent: Callable[[ShardedChunk], None] | None = None,
    ) -> Iterator[None]:
        """Context for a backward pass; with `reduce`, all reductions have started when it ends."""
        # Otherwise backward only accumulates; the next one with `reduce`, or `vote_and_flush`,
        # sends all gradients. Reduced ones are divided by `scale`, the scale of the loss.
        self.check_stray()
        refusal, self._refusal, self._scale = self._refusal, "", scale
        self._voted = False
        self.wait_all_reductions()
        for sharded in self.chunks:
            sharded.waiting.update(sharded.chunk.parameters)
        self._next, self._reducing, self._on_sent = 0, reduce, on_sent
        try:
            yield
            if reduce:
                self._reduce_rest()
        finally:
            self._reducing, self._on_sent, self._refusal = False, None, refusal

    def check_stray(self) -> None:
        """Raises if, within `refusing`, a gradient was accumulated outside of `backward`."""
        if self.stray_gradient_seen and self._refusal:
            raise GulliverError(self._refusal)

    @contextmanager
    def refusing(self, why: str) -> Iterator[None]:
        self._refusal = why
        try:
            yield
        finally:
            self._refusal = ""

    def vote_and_flush(
        self, extra: Sequence[int] = (), check: Callable[[list[int]], None] | None = None
    ) -> set[str]:
        """Reduces all gradients; returns the parameters that have one on any rank (collective)."""
        # Ranks may have called backward differently. `extra` is sent with the vote, equally long on
        # every rank; `check` gets its maxima over the ranks, before reductions start.
        for sharded in self.chunks:
            self._forget_cleared(sharded)
            self._used |= sharded.chunk.gradients.placed.keys()
        names = list(self._chunk_of)
        collecting = any(c.phase is Phase.COLLECTING for c in self.chunks)
        foreign = [name for c in self.chunks for name in c.chunk.gradients.foreign_names()]
        # On the CPU, because the host needs the result; a device need not wait.
        ours = [*[n in self._used for n in names], collecting, bool(foreign), *extra]
        votes = torch.tensor(ours, dtype=torch.uint8)
        all_reduce(votes, "max", self.group, purpose=STEPS)
        answer = votes.tolist()
        used, (pending, set_by_user, *others) = answer[: len(names)], answer[len(names) :]
        # Raised on all ranks, or the others would wait for the one that raised.
        if set_by_user:
            raise gradient_was_set(foreign)
        if check is not None:
            check(others)
        if pending:
            self.wait_all_reductions()
            self._next = 0
            self._reduce_rest()
        if self.sender.checking:
            self.wait_all_reductions()
        self.sender.end_step(names, cut=self.stage > 0)
        self._voted = True
        found = {name for name, vote in zip(names, used, strict=True) if vote}
        self._sort(found)
        return found

    def _sort(self, used: set[str]) -> None:
        """Moves chunks with unused parameters to the end, so that other chunks need not wait."""
        every = self.size == 1 or len(used) == len(self._chunk_of)
        late = {c for c in self.chunks if not every and not used.issuperset(c.chunk.parameters)}
        if late != self._late:
            self._late = late
            order = self.chunks[::-1]
            self._order = [c for c in order if c not in late] + [c for c in order if c in late]

    def used_in(self, sharded: ShardedChunk) -> list[bool]:
        return [name in self._used for name in sharded.chunk.parameters]

    def use_up(self, sharded: ShardedChunk) -> None:
        """Drops the gradient of an updated chunk; the user has to call `zero_grad` next."""
        assert sharded.gradient_shard is not None, "its reduction was waited for"
        sharded.forget_gradient()
        sharded.used_up = True

    def check_cleared(self) -> None:
        for sharded in self.chunks:
            if sharded.used_up:
                self._check_cleared(sharded)

    def _check_cleared(self, sharded: ShardedChunk) -> None:
        cleared = sharded.chunk.gradients.cleared_names()
        if len(cleared) < len(sharded.chunk.members):
            raise GulliverError(
                "step_in_backward has consumed the gradients of the last step; call zero_grad "
                "after each step"
            )
        self._used.difference_update(cleared)
        sharded.used_up = False

    @property
    def voted(self) -> bool:
        return self._voted

    def end_step(self) -> None:
        self._voted = False

    def forget(self, set_to_none: bool = True) -> None:
        """Drops all gradients; with ``set_to_none=False``, zeroes existing ones."""
        self._voted = self.stray_gradient_seen = False
        self.wait_all_reductions()
        for sharded in self.chunks:
            sharded.used_up = False
            if set_to_none:
                self._empty(sharded)
                continue
            # A buffer that is being filled starts again from zero.
            gradients = sharded.chunk.gradients
            gradients.wake()
            gradients.fetch()
            for gradient in gradients.collected:
                gradient.zero_()
            for gradient in sharded.gradients(write=True):
                gradient.zero_()
        if set_to_none:
            self._used.clear()

    def _empty(self, sharded: ShardedChunk) -> None:
        if sharded.phase is Phase.COLLECTING:
            sharded.move(Phase.EMPTY)
        sharded.chunk.gradients.clear()
        sharded.forget_gradient()
        sharded.chunk.gradients.free()

    def _before_gradient(self, name: str) -> None:
        sharded = self._chunk_of[name]
        if self._voted and not self._reducing:
            raise GulliverError(
                "loss.backward() was called after clipping or reading the gradients and before "
                "step: clip or read them after the last backward, or use booster.backward"
            )
        if sharded.phase is Phase.REDUCING or sharded.chunk.gradients.parked:
            if self._reducing:
                raise GulliverError(
                    f"parameter {name!r} got a second gradient within one backward: with "
                    "activation checkpointing of shared modules, pass use_reentrant=False"
                )
            self.wait_all_reductions()
        parameter = sharded.chunk.parameters[name]
        if sharded.phase is Phase.EMPTY:
            self._begin(sharded)
        elif parameter.grad is None:
            self._forget_cleared(sharded)
        if type(parameter.grad) is ReducedGradient:
            parameter.grad = None  # the first gradient is used without a copy

    def _reduce_complete(self) -> None:
        order = self._order
        while self._next < len(order) and not order[self._next].waiting:
            self._next += 1
            self._reduce(order[self._next - 1])

    def open_gradient(self, name: str) -> torch.Tensor:
        """Returns a parameter's accumulated, unreduced gradient, to be modified in place."""
        # Zeros if there is none; from then on it counts as used.
        sharded = self._chunk_of[name]
        parameter, gradients = sharded.chunk.parameters[name], sharded.chunk.gradients
        gradients.wake()
        if name not in gradients.placed:
            self._before_gradient(name)
            parameter.grad = torch.zeros_like(parameter)
            self._ready_hook(sharded, name)(None)
            gradients.wake()
        assert parameter.grad is not None
        return parameter.grad

    def _begin(self, sharded: ShardedChunk) -> None:
        if sharded.used_up and self._on_sent is not None:
            raise GulliverError(
                "a parameter got another gradient after step_in_backward had stepped it (shared "
                "by reentrant checkpoints?); use checkpoint(..., use_reentrant=False), or "
                "disable step_in_backward"
            )
        if sharded.used_up:
            self._check_cleared(sharded)
        self._forget_cleared(sharded)
        sharded.chunk.check_parameters()
        sharded.chunk.gradients.begin()
        sharded.move(Phase.COLLECTING)

    def _reduce(self, sharded: ShardedChunk) -> None:
        gradients = sharded.chunk.gradients
        if sharded.phase is Phase.EMPTY:
            self._begin(sharded)
        gradients.wake()
        if gradients.parked:
            gradients.fetch()
        else:
            self._gather_up(sharded)
        sharded.incoming, sharded.reduction = self.sender.send(sharded)
        sharded.move(Phase.REDUCING)
        self._flying.append(sharded)
        # From stage 1 on gradients are freed when their reduction ends. A few in flight hide each
        # other's latency; more would only keep more of them alive.
        if self.stage and len(self._flying) > self._in_flight:
            self.wait_reduction(self._flying[0])
        if not self.overlap:
            self.wait_all_reductions()
        if self._on_sent is not None:
            self._on_sent(sharded)

    def _gather_up(self, sharded: ShardedChunk) -> None:
        self._forget_cleared(sharded)
        sharded.chunk.gradients.complete()
        self._used |= sharded.chunk.gradients.placed.keys()
        sharded.chunk.gradients.mark_reduced()

    def wait_reduction(self, sharded: ShardedChunk) -> None:
        """Waits for a chunk's reduction and adds the result to its gradient shard."""
        if sharded.phase is not Phase.REDUCING:
            return
        assert sharded.reduction is not None
        assert sharded.incoming is not None
        gradients = sharded.chunk.gradients
        sharded.reduction.wait()
        if self.sender.references:
            self.sender.check_reduced(sharded, sharded.incoming)
        # Before memory is requested below, which may wait for other reductions.
        self._flying.remove(sharded)
        incoming, sharded.reduction, sharded.incoming = sharded.incoming, None, None
        gradients.free()
        if self._scale != 1.0:
            incoming /= self._scale
        if sharded.gradient_shard is None:
            self._measure(sharded, incoming)
            sharded.gradient_shard = gradients.keep_reduced(incoming)
        else:
            for gradient in sharded.gradients(write=True):
                gradient += incoming
                self._measure(sharded, gradient)
            gradients.give_reduced(incoming)
        sharded.move(Phase.EMPTY)
        sharded.zero_gradients(gradients.cleared_names())

    def _measure(self, sharded: ShardedChunk, gradient: torch.Tensor) -> None:
        if self._squared is not None:
            sharded.squared = self._squared(sharded, gradient)

    def wait_all_reductions(self) -> None:
        while self._flying:
            self.wait_reduction(self._flying[0])

    def _reduce_rest(self) -> None:
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
        """Whether a chunk's gradients were dropped but have to exist as zeros."""
        gone = sharded.phase is Phase.EMPTY and sharded.gradient_shard is None
        return gone and not sharded.used_up and any(self.used_in(sharded))

    def _forget_cleared(self, sharded: ShardedChunk) -> None:
        if sharded.phase is Phase.EMPTY and sharded.gradient_shard is None:
            return
        cleared = sharded.chunk.gradients.cleared_names()
        if not cleared:
            return
        self._used.difference_update(cleared)
        if sharded.phase is not Phase.REDUCING:
            # The accumulated gradient is zeroed here only once, because a new one may follow.
            sharded.zero_gradients(cleared)
        if sharded.phase is Phase.COLLECTING:
            sharded.chunk.gradients.note_cleared(cleared)


# In a wire format, packing errors may be kept and added to the next gradient (error feedback). They
# are stored by parameter, so that they survive re-partitioning and checkpoints.
class GradientSender:
    """Starts the reductions of chunks; keeps packing errors for error feedback."""

    def __init__(self, group: Group, wires: ZeroWires) -> None:
        self.group, self.wires = group, wires
        self._lost: dict[int, tuple[ShardedChunk, Tensor]] = {}
        self._given: dict[str, Tensor] = {}
        # Unpacked reductions of chunks in flight, for comparison.
        self.references: dict[int, Tensor] = {}
        packs = wires.reduce.name != "identity" and group_size(group) > 1
        # Whether packing errors are added to the next gradient.
        self.feeds = packs and wires.feedback
        # Compares packed gradients with unpacked ones.
        gated = packs and wires.gate
        self.gate = GradientGate(wires.reduce, wires.feedback, True) if gated else None

    @property
    def checking(self) -> bool:
        return self.gate is not None and self.gate.checking

    def is_direct(self, chunk: Chunk) -> bool:
        """Whether other ranks can read a chunk's gradients where backward puts them."""
        # At stage 0 the result is whole: a buffer of the gradients becomes it, so that both are
        # never there.
        whole = chunk.layout.parts == 1
        if whole or isinstance(chunk, ManagedChunk) or self.wires.reduce is not IDENTITY:
            return False
        team = host_team(self.group) if group_size(self.group) > 1 else None
        return team is not None and team.takes(chunk.master_shard, chunk.members[0], "mean")

    def send(self, sharded: ShardedChunk) -> tuple[Tensor, Handle]:
        chunk, why = sharded.chunk, sharded.purpose("reduces", "in a backward")
        if chunk.gradients.direct:
            team = host_team(self.group)  # not stored: it ends with the world
            assert team is not None, "gradients are direct only where ranks read each other"
            layout, placed = chunk.layout, chunk.gradients.lend()
            found = [(s.start, placed.get(s.name), s.end) for s in layout.by_address]
            incoming = chunk.gradients.take_reduced()
            work = team.reduce_terms(incoming, found, layout.size, chunk.dtype, why)
            return incoming, Handle(work)
        gradient, dtype = chunk.gradients.buffer, chunk.master_shard.dtype
        assert gradient is not None
        whole = chunk.layout.parts == 1

        def reduce(output: Tensor, **how: Any) -> Handle:
            if whole:
                return all_reduce(output, "mean", self.group, purpose=why, **how)
            # Terms are sent in 16 bits or less, and summed in the dtype of the optimizer.
            how["accumulate_dtype"] = dtype
            return reduce_scatter(output, gradient, "mean", self.group, purpose=why, **how)

        lost = self._lost_of(sharded, gradient) if self.feeds else None
        in_place = sharded.reduced_in_place
        incoming = chunk.gradients.take() if in_place else chunk.gradients.take_reduced()
        if whole and not in_place:
            # The optimizer steps float32, and an all-reduce does not widen, so float32 is sent.
            incoming.copy_(gradient)
        if self.checking:
            exact = self.references[id(sharded)] = incoming.clone()
            reduce(exact)
        return incoming, reduce(incoming, async_op=True, wire=self.wires.reduce, error=lost)

    def _lost_of(self, sharded: ShardedChunk, gradient: Tensor) -> Tensor:
        if id(sharded) not in self._lost:
            lost = torch.zeros_like(gradient)
            for name, view in sharded.chunk.named_views(lost).items():
                if name in self._given:
                    view.copy_(self._given.pop(name))
            self._lost[id(sharded)] = sharded, lost
        return self._lost[id(sharded)][1]

    def lost(self) -> dict[str, Tensor]:
        found = dict(self._given)
        for sharded, lost in self._lost.values():
            found |= sharded.chunk.named_views(lost)
        return found

    def take_lost(self, found: Mapping[str, Tensor]) -> None:
        self._lost, self._given = {}, dict(found) if self.feeds else {}

    def check_reduced(self, sharded: ShardedChunk, incoming: Tensor) -> None:
        exact = self.references.pop(id(sharded), None)
        if exact is None or self.gate is None:
            return
        for piece in sharded.chunk.layout.pieces(sharded.chunk.part):
            run = slice(piece.start, piece.end)
            self.gate.add(piece.name, incoming[run], exact[run])

    def end_step(self, names: Sequence[str], cut: bool) -> None:
        if self.gate is not None:
            self.gate.end_step(names, self.group if cut else ALONE)
