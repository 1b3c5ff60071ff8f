"""`RanksRunner`: sends batches to the ranks, collects their logits, notices who is late or lost."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gulliver.serve._batch import Batch, Facts, RunnerLost
from gulliver.serve.ranks._layout import Layout
from gulliver.serve.ranks._worker import RankMessage

GRACE_S = 1.0
"""Longest wait, once a rank has failed, for what others say of it: an error that a rank has by
itself is message, not that connections to it broke."""
BROKEN = ("connection closed", "connection reset", "broken pipe", "timed out", "gloo")
RECENT = 16
"""Batches that the number in flight is chosen by."""


class Crew(Protocol):
    """The processes of the ranks."""

    @property
    def links(self) -> Sequence[Any]:
        """Connections to the ranks, in their order."""
        ...

    def fate(self, rank: int) -> str:
        """Describes how a rank ended whose connection has closed."""
        ...

    def close(self) -> None:
        """Ends the ranks."""
        ...

    def restarted(self) -> RanksRunner:
        """Starts the ranks again."""
        ...


@dataclass(frozen=True)
class Seen:
    """Seconds of a batch at its servers."""

    # Seconds of compute by stage.
    stages: tuple[float, ...]
    # Seconds from a stage to the next, where the next one was waiting; 0 where it was not and the
    # link was covered.
    links: tuple[float, ...]


def best_in_flight(seen: Sequence[Seen], stages: int) -> int:
    """Number of batches in flight that keep the slowest server busy."""
    # A batch passes stages and links one after the other, and each works on another batch
    # meanwhile: m batches take sum + (m - 1) x slowest seconds. The slowest server is never idle
    # when the batches in flight cover the whole way: sum / slowest, rounded up. The seconds are
    # those that the ranks measure.
    if stages == 1:
        return 1
    servers = 2 * stages - 1
    if not seen:
        return servers
    by_server = zip(*((*one.stages, *one.links) for one in seen), strict=True)
    mean = [sum(values) / len(values) for values in by_server]
    slowest = max(mean)
    # One more, for the controller, which draws tokens between the last stage and the first.
    return servers if slowest <= 0 else min(math.ceil(sum(mean) / slowest - 1e-9) + 1, servers + 1)


class RanksRunner:
    """A model that runs on several ranks."""

    def __init__(
        self,
        crew: Crew,
        layout: Layout,
        timeout_s: float = 60.0,
        start_s: float = 600.0,
        block_size: int = 16,
        max_in_flight: int | None = None,
    ) -> None:
        self.layout, self._crew, self._timeout_s = layout, crew, timeout_s
        self._fixed = max_in_flight
        # Seconds of the last batches.
        self.seen: deque[Seen] = deque(maxlen=RECENT)
        self._messages: queue.Queue[tuple[int, RankMessage | None]] = queue.Queue()
        self._out = [queue.SimpleQueue() for _ in range(layout.ranks)]
        self._logits: dict[int, Tensor] = {}
        self._done: dict[int, dict[int, tuple[float, float, float]]] = {}
        self._in_flight: deque[int] = deque()
        self._closed = False
        self._receiving, self._transmitting = (
            [
                threading.Thread(target=target, args=(rank, link), daemon=True)
                for rank, link in enumerate(crew.links)
            ]
            for target in (self._receive, self._transmit)
        )
        for thread in (*self._receiving, *self._transmitting):
            thread.start()
        try:
            sizes = self._all("sizes", start_s)
            blocks = min(one.blocks for one in sizes)
            vocabulary = max(one.vocabulary for one in sizes)
            self.facts = Facts(vocabulary, sizes[0].context, blocks, block_size)
            self._send(blocks)
            self._all("ready", start_s)
        except BaseException:
            self.close()
            raise

    @property
    def max_in_flight(self) -> int:
        """Batches that should be in flight: as many as cover the slowest server."""
        return self._fixed or best_in_flight(self.seen, self.layout.stages)

    def submit(self, batch: Batch) -> None:
        """Sends a batch to all ranks."""
        self._in_flight.append(batch.ticket)
        self._send(batch)

    def collect(self) -> Tensor:
        """Waits for the logits of the oldest batch."""
        ticket = self._in_flight[0]
        while ticket not in self._logits:
            self._handle_next(self._timeout_s)
        self._in_flight.popleft()
        return self._logits.pop(ticket)

    def restarted(self) -> RanksRunner:
        """Ends the ranks and starts others in their place; their caches are empty."""
        self.close()
        return self._crew.restarted()

    def close(self) -> None:
        """Ends the ranks."""
        if not self._closed:
            self._closed = True
            for one in self._out:
                one.put(_END)
            # A rank that has stopped takes nothing more, and is killed.
            _join(self._transmitting)
            # Nobody reads a connection when it is closed: its number may be another's at once.
            for link in self._crew.links:
                _hang_up(link)
            _join(self._receiving)
            self._crew.close()

    # Threads

    def _receive(self, rank: int, link: Any) -> None:
        # A pipe to a process that has stopped fills up, and would stop the controller too. So each
        # rank has a thread that sends and one that receives, and the controller waits on a queue,
        # with a timeout.
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._messages.put((rank, link.recv()))
        self._messages.put((rank, None))

    def _transmit(self, rank: int, link: Any) -> None:
        with contextlib.suppress(OSError):
            while (said := self._out[rank].get()) is not _END:
                link.send(said)
            link.send(None)

    # What ranks say

    def _send(self, value: Any) -> None:
        for one in self._out:
            one.put(value)

    def _all(self, what: str, timeout_s: float) -> list[Any]:
        """Waits for a message of each rank."""
        found: dict[int, Any] = {}
        while len(found) < self.layout.ranks:
            missing = next(r for r in range(self.layout.ranks) if r not in found)
            rank, message = self._next(timeout_s, self.layout.named(missing))
            if message.what == what:
                found[rank] = message.value
        return [found[rank] for rank in range(self.layout.ranks)]

    def _handle_next(self, timeout_s: float) -> None:
        rank, message = self._next(timeout_s)
        if message.what == "logits":
            shape, content = message.value
            array = np.frombuffer(bytearray(content), dtype=np.float32)
            self._logits[message.ticket] = torch.from_numpy(array).view(shape)
        elif message.what == "done":
            self._note(rank, message)

    def _next(self, timeout_s: float, late: str | None = None) -> tuple[int, RankMessage]:
        """Waits for the next message."""
        try:
            rank, message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            raise RunnerLost(
                f"{late or self._late()} has said nothing for {timeout_s:g} s: it is too slow, "
                "stopped or cut off"
            ) from None
        if message is None or message.what == "failed":
            raise RunnerLost(self._failure(rank, message))
        return rank, message

    def _failure(self, rank: int, message: RankMessage | None) -> str:
        """Describes the first failure: an error of a rank's own rather than a broken connection."""
        found = [(rank, message)]
        end = time.monotonic() + GRACE_S
        while (left := end - time.monotonic()) > 0 and _rank(*found[-1]) > 0:
            with contextlib.suppress(queue.Empty):
                other, word = self._messages.get(timeout=left)
                if word is None or word.what == "failed":
                    found.append((other, word))
        rank, message = min(found, key=lambda one: _rank(*one))
        if message is None:
            return f"{self.layout.named(rank)} {self._crew.fate(rank)}"
        return f"{self.layout.named(rank)} failed: {message.value}"

    def _note(self, rank: int, message: RankMessage) -> None:
        """Notes the seconds of a batch; when all ranks have reported, those of its servers."""
        ranks = self._done.setdefault(message.ticket, {})
        ranks[rank] = message.value
        if len(ranks) < self.layout.ranks:
            return
        del self._done[message.ticket]
        layout = self.layout
        by_stage = [[ranks[r] for r in layout.members(stage)] for stage in range(layout.stages)]
        stages = tuple(max(done - got for _, got, done in stage) for stage in by_stage)
        ends = [max(done for *_, done in stage) for stage in by_stage]
        # A stage that was waiting saw the link at work; the others had what came in time.
        links = tuple(
            max((got - max(end, began) for began, got, _ in stage), default=0.0)
            for end, stage in zip(ends, by_stage[1:], strict=False)
        )
        self.seen.append(Seen(stages, tuple(max(0.0, link) for link in links)))

    def _late(self) -> str:
        """Names the first rank that has not done the oldest batch."""
        ticket = self._in_flight[0]
        done = self._done.get(ticket, {})
        rank = next((r for r in range(self.layout.ranks) if r not in done), self.layout.ranks - 1)
        return f"{self.layout.named(rank)}, which has batch {ticket},"


_END = object()


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _hang_up(link: Any) -> None:
    """Shuts a connection down for its readers, without closing it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _rank(rank: int, message: RankMessage | None) -> int:
    """0 for an error of its own, 1 for a death, 2 for a connection that broke."""
    del rank
    if message is None:
        return 1
    text = str(message.value).lower()
    return 2 if any(word in text for word in BROKEN) else 0
