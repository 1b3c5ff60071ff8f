"""How gradients travel: from the chunk in which backward adds them up to the shards of the ranks.

Read `Phase` first, then `GradientReducer.backward`, `_gradient_ready` and `_reduce`.

[Note: one order on all ranks] Ranks may differ in which parameters a backward touches and when, yet
collectives must be issued in one order everywhere. So chunks are reduced strictly from the last to
the first: a chunk goes when its gradients are complete and all later chunks have gone. What a
backward did not touch is found at its end, and follows in the same order with zeros.

[Note: used anywhere] A parameter without a gradient on this rank may have one elsewhere; its mean
is not zero then. Whether it had one on any rank, since gradients were last forgotten, is voted on
before each step, in one small exchange. Without any, it is left alone, as torch leaves a gradient
of None.

[Note: cleared gradients] After its reduction a parameter's grad is a `ReducedGradient`. If it is
None later, somebody cleared it (``model.zero_grad()``), and its shards are zeroed before more is
added.

It does not know what an optimizer is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gulliver.comm import Handle, all_reduce, reduce_scatter
from gulliver.errors import GulliverError
from gulliver.memory import Chunk, Piece

IN_FLIGHT = 2
"""Chunks that stage 2 lets travel at once: bounds the whole gradient buffers that are alive."""


class Phase(Enum):
    """Where the gradients of a chunk are."""

    EMPTY = auto()
    """Nowhere, or all in the shards."""
    COLLECTING = auto()
    """Being added up in the chunk's buffer."""
    REDUCING = auto()
    """On their way from the buffer to the shards."""


LEGAL = {
    (Phase.EMPTY, Phase.COLLECTING),  # the first gradient arrives
    (Phase.COLLECTING, Phase.REDUCING),  # all gradients have arrived
    (Phase.REDUCING, Phase.EMPTY),  # the shard has its part
    (Phase.COLLECTING, Phase.EMPTY),  # forgotten before they travelled
}


@dataclass(eq=False)
class ShardedChunk:
    """A chunk, the pieces of parameters that this rank owns of it, and its gradients' state."""

    chunk: Chunk
    pieces: list[tuple[Piece, nn.Parameter]]
    phase: Phase = Phase.EMPTY
    waiting: set[str] = field(default_factory=set)
    """Parameters that the present backward has not reached yet."""
    gradient_shard: Tensor | None = None
    """This rank's part of the mean gradient."""
    incoming: Tensor | None = None
    handle: Handle | None = None

    def move(self, phase: Phase) -> None:
        """Enters another phase."""
        assert (self.phase, phase) in LEGAL, f"{self.phase} -> {phase}"
        self.phase = phase


class GradientReducer:
    """Reduces the gradients of chunks to shards while backward goes on.

    Args:
        chunks: in the order of the model.
        stage: 1 keeps the chunks' gradient buffers; 2 frees each when it is reduced.
        group: ranks to average over; None for all.
    """

    def __init__(
        self, chunks: Sequence[ShardedChunk], stage: int, group: dist.ProcessGroup | None
    ) -> None:
        self.chunks, self.stage, self.group = chunks, stage, group
        self._home = {name: c for c in chunks for name in c.chunk.parameters}
        self._used: set[str] = set()
        self._next = -1
        self._reducing = self._settled = False
        self._flying: deque[ShardedChunk] = deque()
        for name, home in self._home.items():
            parameter = home.chunk.parameters[name]
            parameter.register_hook(lambda _, name=name: self._before_gradient(name))
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: self._gradient_ready(name)
            )

    @contextmanager
    def backward(self, reduce: bool) -> Iterator[None]:
        """One backward; with `reduce` its gradients are in the shards when it ends.

        A backward outside of this context, or without `reduce`, only adds up; `settle` or the next
        one that reduces brings it all.
        """
        self._settled = False
        if not reduce:
            yield
            return
        for sharded in self.chunks:
            sharded.waiting = set(sharded.chunk.parameters)
        self._next, self._reducing = len(self.chunks) - 1, True
        try:
            yield
            self._reduce_rest()
        finally:
            self._reducing = False

    def settle(self) -> set[str]:
        """Brings every gradient to its shard, however backward was called; every rank calls it.

        Returns:
            The parameters that have a gradient on any rank.
        """
        for sharded in self.chunks:
            self._forget_cleared(sharded)
        names = list(self._home)
        collecting = any(c.phase is Phase.COLLECTING for c in self.chunks)
        flags = [*(name in self._used for name in names), collecting]
        device = self.chunks[0].chunk.data.device
        votes = torch.tensor(flags, dtype=torch.uint8, device=device)
        all_reduce(votes, "max", self.group)
        *used, pending = votes.tolist()
        if pending:
            self._next = len(self.chunks) - 1
            self._reduce_rest()
        self._settled = True
        return {name for name, vote in zip(names, used, strict=True) if vote}

    @property
    def settled(self) -> bool:
        """Whether nothing came since `settle`."""
        return self._settled

    def unsettle(self) -> None:
        """The settled gradients were made use of; others may come."""
        self._settled = False

    def forget(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, or makes those that there are zero."""
        self._settled = False
        while self._flying:
            self._land(self._flying.popleft())
        for sharded in self.chunks:
            if set_to_none:
                self._empty(sharded)
                continue
            # A buffer that is being filled goes on being filled, from zero.
            for gradient in (sharded.chunk.gradient, sharded.gradient_shard):
                if gradient is not None:
                    gradient.zero_()
        if set_to_none:
            self._used.clear()

    def _empty(self, sharded: ShardedChunk) -> None:
        if sharded.phase is Phase.COLLECTING:
            sharded.move(Phase.EMPTY)
            sharded.chunk.detach_gradient(keep_buffer=self.stage == 1)
        sharded.chunk.clear_gradient()
        sharded.gradient_shard = None

    def _before_gradient(self, name: str) -> None:
        """Called before autograd adds to a parameter: its gradient must be a view of the buffer."""
        home = self._home[name]
        if self._settled and not self._reducing:
            raise GulliverError(
                "loss.backward() was called after clipping or reading the gradients and before "
                "step: do that when all gradients are there, or use booster.backward"
            )
        if home.phase is Phase.REDUCING:
            raise GulliverError(
                f"parameter {name!r} got a second gradient within one backward: with activation "
                "checkpointing of shared modules use use_reentrant=False"
            )
        if home.phase is Phase.EMPTY:
            self._begin(home)
        elif home.chunk.parameters[name].grad is None:
            self._forget_cleared(home)

    def _gradient_ready(self, name: str) -> None:
        """Notes a gradient, and reduces the chunks that are complete and in turn."""
        home = self._home[name]
        home.chunk.check_gradient(name)
        self._used.add(name)
        if not self._reducing:
            return
        home.waiting.discard(name)
        while self._next >= 0 and not self.chunks[self._next].waiting:
            self._reduce(self.chunks[self._next])
            self._next -= 1

    def _begin(self, sharded: ShardedChunk) -> None:
        self._forget_cleared(sharded)
        sharded.chunk.attach_gradient()
        sharded.move(Phase.COLLECTING)

    def _reduce(self, sharded: ShardedChunk) -> None:
        """Starts the way of a chunk's gradients to the shards."""
        if sharded.phase is Phase.EMPTY:
            self._begin(sharded)
        self._forget_cleared(sharded)
        chunk = sharded.chunk
        for name in chunk.parameters:
            chunk.check_gradient(name)
        assert chunk.gradient is not None
        sharded.incoming = torch.empty_like(chunk.shard)
        sharded.handle = reduce_scatter(
            sharded.incoming, chunk.gradient, "mean", self.group, async_op=True
        )
        sharded.move(Phase.REDUCING)
        self._flying.append(sharded)
        if self.stage == 2 and len(self._flying) > IN_FLIGHT:
            self._land(self._flying.popleft())

    def _land(self, sharded: ShardedChunk) -> None:
        """Waits for a reduction under way and adds its result to the shard's gradient."""
        assert sharded.handle is not None
        assert sharded.incoming is not None
        sharded.handle.wait()
        if sharded.gradient_shard is None:
            sharded.gradient_shard = sharded.incoming
        else:
            sharded.gradient_shard += sharded.incoming
        sharded.handle = sharded.incoming = None
        sharded.chunk.detach_gradient(keep_buffer=self.stage == 1)
        sharded.move(Phase.EMPTY)

    def _reduce_rest(self) -> None:
        """Lets the chunks follow that a backward did not complete, and waits for all."""
        while self._next >= 0:
            self._reduce(self.chunks[self._next])
            self._next -= 1
        while self._flying:
            self._land(self._flying.popleft())

    def _forget_cleared(self, sharded: ShardedChunk) -> None:
        """Drops the gradients of parameters whose grad was set to None; see the note above."""
        collecting = sharded.phase is Phase.COLLECTING
        if not collecting and sharded.gradient_shard is None:
            return
        cleared = set(sharded.chunk.cleared_names())
        self._used -= cleared
        if collecting:
            for name in cleared:
                sharded.chunk.attach_again(name)
        if cleared and sharded.gradient_shard is not None:
            for piece, _ in sharded.pieces:
                if piece.name in cleared:
                    sharded.gradient_shard[piece.start : piece.end].zero_()
