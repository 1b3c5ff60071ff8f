"""`RankWorker`: a rank's loop, which receives batches and sends activations and logits."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import ALONE, RankGroup
from gulliver.comm.messages import Messages, post
from gulliver.errors import GulliverError
from gulliver.serve.batch import Batch
from gulliver.serve.options import ModelOptions
from gulliver.serve.ranks.stage import Layout, StageModel

CARRY_TAG = 310
"""Tag of activations sent between stages; they are received in order."""


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A message from a rank to the controller."""

    # ``sizes``, ``ready``, ``done``, ``logits`` or ``failed``.
    what: str
    # Ticket of the batch that it concerns, or -1.
    ticket: int = -1
    # Sizes, logits as ``(shape, bytes)``, or an error message; for ``done``, the times at which the
    # rank began to wait for the batch, received it, and finished it, in seconds of a clock shared
    # by all ranks of the machine.
    value: Any = None


@dataclass
class _Waiting:
    """A batch that this rank has received but not run."""

    batch: Batch
    carry: Tensor | None
    arriving: Messages | None


class RankWorker:
    """Runs batches in the order of their tickets until the controller ends the rank."""

    # Ranks of the layout are the first ones of the world.
    def __init__(
        self,
        link: Connection,
        model: Any,
        layout: Layout,
        rank: int,
        before: Callable[[Batch], None] | None = None,
    ) -> None:
        self._link, self._model, self._before = link, model, before
        place = layout.place(rank)
        self._first = place.stage == 0
        self._last = place.stage == layout.stages - 1
        self._previous = None if self._first else rank - layout.tensor
        self._next = None if self._last else rank + layout.tensor
        self._speaks = self._last and place.tensor == 0
        self._waiting: deque[_Waiting] = deque()
        self._sent: deque[Messages] = deque()
        self._ticket: int | None = None

    def run(self) -> None:
        while self._listen():
            self._run(self._waiting.popleft())

    def _listen(self) -> bool:
        """Receives all commands that have arrived; waits for one if there is nothing to do."""
        while self._link.poll(None if not self._waiting else 0.0):
            try:
                batch = self._link.recv()
            except EOFError:
                return False
            if batch is None:
                return False
            self._take(batch)
        return True

    def _take(self, batch: Batch) -> None:
        # The controller sends each batch to all ranks, several ahead. The receive of a carry is
        # posted as soon as its batch, and thus its number of tokens, is known: so a stage's send
        # never waits for its receiver, and a link transfers one batch while the stages compute
        # others. Ticket order follows EnergonAI (arXiv 2209.02341); its endless wait for a lost
        # command is an error here.
        if self._ticket is not None and batch.ticket != self._ticket:
            raise GulliverError(
                f"batch {batch.ticket} arrived instead of batch {self._ticket}: a command was lost"
            )
        self._ticket = batch.ticket + 1
        if self._previous is None:
            self._waiting.append(_Waiting(batch, None, None))
            return
        carry = torch.empty(1, batch.tokens, self._model.width, dtype=self._model.dtype)
        arriving = post([(self._previous, carry)], [], None, CARRY_TAG)
        self._waiting.append(_Waiting(batch, carry, arriving))

    def _run(self, one: _Waiting) -> None:
        began = time.monotonic()
        if one.arriving is not None:
            one.arriving.wait()
        got = time.monotonic()
        if self._before is not None:
            self._before(one.batch)
        out = self._model.run(one.batch, one.carry)
        done = time.monotonic()
        if self._speaks:
            content = out.contiguous().numpy().tobytes()
            self._link.send(RankMessage("logits", one.batch.ticket, (tuple(out.shape), content)))
        elif self._next is not None:
            self._sent.append(post([], [(self._next, out)], None, CARRY_TAG))
            # Sends that are older than a round of the pipeline have arrived.
            while len(self._sent) > KEPT:
                self._sent.popleft().wait()
        self._link.send(RankMessage("done", one.batch.ticket, (began, got, done)))


KEPT = 64
"""Maximum number of pending sends; exceeds the number of batches in flight."""


# `serve`: runs a rank, which loads its shard, reports its cache size, and processes batches.


def serve(
    link: Any,
    folder: Path,
    options: ModelOptions,
    layout: Layout,
    rank: int,
    sequences: int,
    block_size: int,
    before: Callable[[Batch], None] | None = None,
) -> None:
    """Runs a rank until the controller ends it; sends errors to the controller."""
    # Called by every rank of the layout, in a world whose first ranks are those of the layout.
    try:
        group = tensor_group(layout, rank)
        model = StageModel(folder, options, layout, rank, group)
        link.send(RankMessage("sizes", value=model.sizes(options, block_size, sequences)))
        blocks = link.recv()
        if blocks is None:
            return
        model.take_cache(blocks, block_size)
        link.send(RankMessage("ready"))
        RankWorker(link, model, layout, rank, before).run()
        model.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller has gone
    except Exception as error:
        text = " ".join(str(error).split())[:500] or type(error).__name__
        with contextlib.suppress(OSError):  # the controller may have gone meanwhile
            link.send(RankMessage("failed", value=text))


def tensor_group(layout: Layout, rank: int) -> RankGroup:
    """Creates the tensor group of a rank's stage; every rank of the layout must call it."""
    if layout.tensor == 1:
        return ALONE
    mine = layout.members(layout.place(rank).stage)
    group: Any = dist.new_group(list(mine), use_local_synchronization=True)
    return RankGroup(mine, mine.index(rank), group)
