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
from gulliver.serve.ranks._stage import Sizes
from gulliver.serve.ranks._worker import Told

GRACE_S = 1.0
"""Longest wait, once a rank has failed, for what others say of it: an error that a rank has by
itself is told, not that connections to it broke."""
BROKEN = ("connection closed", "connection reset", "broken pipe", "timed out", "gloo")
RECENT = 16
"""Batches that the number in flight is chosen by."""


# [Note: servers] A batch goes through stages and links one after the other. Each works on another
# batch meanwhile, so m batches take ``sum + (m - 1) x slowest`` seconds, and the slowest server is
# never idle when so many batches are in flight as cover the whole way: ``sum / slowest``, rounded
# up. The seconds are measured: every rank tells for each batch when it began to wait for it, had
# it, and had computed it (`depth_of`).
#
# [Note: threads] A pipe to a process that has stopped fills up, and would stop the controller, too.
# So each rank has a thread that sends and one that listens, and the controller waits on a queue,
# for no longer than `timeout_s`.
class Crew(Protocol):
    """The processes of the ranks."""

    @property
    def links(self) -> Sequence[Any]:
        """Connections to the ranks, in their order."""
        ...

    def fate(self, rank: int) -> str:
        """Says how a rank ended whose connection has closed."""
        ...

    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""
        ...

    def restarted(self) -> RanksRunner:
        """Starts the ranks anew."""
        ...


@dataclass(frozen=True)
class Seen:
    """Seconds of a batch at its servers."""

    # Seconds of compute by stage.
    stages: tuple[float, ...]
    # Seconds from a stage to the next, where the next one was waiting; 0 where it was not and the
    # link was covered.
    links: tuple[float, ...]


def depth_of(seen: Sequence[Seen], stages: int) -> int:
    """Number of batches in flight that cover the slowest server; see the note.

    Args:
        seen: seconds of the last batches; none at the start, when all servers count as equal.
        stages: number of stages.
    """
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
        depth: int | None = None,
    ) -> None:
        """Waits until all ranks have loaded their parts, and lets them take their caches."""
        self.layout, self._crew, self._timeout_s = layout, crew, timeout_s
        self._fixed = depth
        # Seconds of the last batches.
        self.seen: deque[Seen] = deque(maxlen=RECENT)
        self._heard: queue.Queue[tuple[int, Told | None]] = queue.Queue()
        self._out = [queue.SimpleQueue() for _ in range(layout.ranks)]
        self._logits: dict[int, Tensor] = {}
        self._done: dict[int, dict[int, tuple[float, float, float]]] = {}
        self._flying: deque[int] = deque()
        self._closed = False
        self._listening, self._speaking = (
            [
                threading.Thread(target=target, args=(rank, link), daemon=True)
                for rank, link in enumerate(crew.links)
            ]
            for target in (self._listen, self._speak)
        )
        for thread in (*self._listening, *self._speaking):
            thread.start()
        try:
            sizes = self._all("sizes", start_s)
            blocks = min(one.blocks for one in sizes)
            vocabulary = max(one.vocabulary for one in sizes)
            self._facts = Facts(vocabulary, sizes[0].context, blocks, block_size)
            self._send(blocks)
            self._all("ready", start_s)
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> Facts:
        """Sizes of the model and of its cache."""
        return self._facts

    @property
    def depth(self) -> int:
        """Batches that should be in flight: as many as cover the slowest server."""
        return self._fixed or depth_of(self.seen, self.layout.stages)

    def submit(self, batch: Batch) -> None:
        """Sends a batch to all ranks."""
        self._flying.append(batch.ticket)
        self._send(batch)

    def collect(self) -> Tensor:
        """Waits for the logits of the oldest batch."""
        ticket = self._flying[0]
        while ticket not in self._logits:
            self._hear(self._timeout_s)
        self._flying.popleft()
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
            _join(self._speaking)
            # Nobody reads a connection when it is closed: its number may be another's at once.
            for link in self._crew.links:
                _hang_up(link)
            _join(self._listening)
            self._crew.close()

    # Threads

    def _listen(self, rank: int, link: Any) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._heard.put((rank, link.recv()))
        self._heard.put((rank, None))

    def _speak(self, rank: int, link: Any) -> None:
        with contextlib.suppress(OSError):
            while (said := self._out[rank].get()) is not _END:
                link.send(said)
            link.send(None)

    # What ranks say

    def _send(self, value: Any) -> None:
        for one in self._out:
            one.put(value)

    def _all(self, what: str, timeout_s: float) -> list[Any]:
        """Waits for one word of each rank."""
        found: dict[int, Any] = {}
        while len(found) < self.layout.ranks:
            missing = next(r for r in range(self.layout.ranks) if r not in found)
            rank, told = self._next(timeout_s, self.layout.named(missing))
            if told.what == what:
                found[rank] = told.value
        return [found[rank] for rank in range(self.layout.ranks)]

    def _hear(self, timeout_s: float) -> None:
        rank, told = self._next(timeout_s)
        if told.what == "logits":
            shape, content = told.value
            array = np.frombuffer(bytearray(content), dtype=np.float32)
            self._logits[told.ticket] = torch.from_numpy(array).view(shape)
        elif told.what == "done":
            self._note(rank, told)

    def _next(self, timeout_s: float, late: str | None = None) -> tuple[int, Told]:
        """Waits for the next word."""
        try:
            rank, told = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise RunnerLost(
                f"{late or self._late()} has said nothing for {timeout_s:g} s: it is too slow, "
                "stopped or cut off"
            ) from None
        if told is None or told.what == "failed":
            raise RunnerLost(self._failure(rank, told))
        return rank, told

    def _failure(self, rank: int, told: Told | None) -> str:
        """Says what failed first: a death, or an error that is not a connection's."""
        found = [(rank, told)]
        end = time.monotonic() + GRACE_S
        while (left := end - time.monotonic()) > 0 and _rank(*found[-1]) > 0:
            with contextlib.suppress(queue.Empty):
                other, word = self._heard.get(timeout=left)
                if word is None or word.what == "failed":
                    found.append((other, word))
        rank, told = min(found, key=lambda one: _rank(*one))
        if told is None:
            return f"{self.layout.named(rank)} {self._crew.fate(rank)}"
        return f"{self.layout.named(rank)} failed: {told.value}"

    def _note(self, rank: int, told: Told) -> None:
        """Notes the seconds of a batch; when all ranks have told, those of its servers."""
        ranks = self._done.setdefault(told.ticket, {})
        ranks[rank] = told.value
        if len(ranks) < self.layout.ranks:
            return
        del self._done[told.ticket]
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
        ticket = self._flying[0]
        done = self._done.get(ticket, {})
        rank = next((r for r in range(self.layout.ranks) if r not in done), self.layout.ranks - 1)
        return f"{self.layout.named(rank)}, which has batch {ticket},"


_END = object()


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _hang_up(link: Any) -> None:
    """Ends what is read from a connection, which stays open."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _rank(rank: int, told: Told | None) -> int:
    """0 for an error of its own, 1 for a death, 2 for a connection that broke."""
    del rank
    if told is None:
        return 1
    text = str(told.value).lower()
    return 2 if any(word in text for word in BROKEN) else 0


__all__ = ["Crew", "RanksRunner", "Seen", "Sizes", "depth_of"]
