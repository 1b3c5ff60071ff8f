"""Runs collectives over gloo in background threads while Python computes.

A collective is a generator: it posts messages, yields them, and resumes when they have arrived;
then it uses them, and may post more. Copies into sockets and additions release the GIL, so they
do not slow down the training thread while a core is free.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import (
    Messages,
    acquire_buffer,
    others,
    receive,
    release_buffer,
    send,
)
from gulliver.comm.watchdog import ANY, Purpose, flight_recorder, wait_for

THREADS = 8
"""Maximum number of multi-axis collectives in flight; further ones are queued."""
IN_FLIGHT_BYTES = 3 << 20
"""Bytes that collectives of a group in flight send at most, unless a single one sends more."""


# [Note: two lanes] A collective waits only for its own messages, and collectives begin in the order
# of submission, which is equal on all ranks of a group. Those with at most two exchanges run *in
# turn*: one thread begins them, whatever else is in flight, and another waits for messages in that
# order and resumes them. So the link serves them in order, and sums do not run in parallel. This
# cannot deadlock: each exchange is posted as soon as the previous one has arrived, and the first
# ones unconditionally. With three exchanges it could: a rank that waits for an old collective
# before it begins a new one blocks ranks that wait for the new one and have not posted the third
# exchange of the old one. So collectives along several axes run *apart*, in a thread each: the
# oldest unfinished one has a thread on every rank, and always continues.
#
# [Note: few in flight] Gloo serves one peer after the other: of 18 all-gathers among 4 ranks that
# are in flight together, all messages to the first peer are sent before those to the next, so the
# first all-gather ends with the last, after 256 ms instead of 14. So a group has few in flight, and
# the others wait in order. This cannot deadlock, because only collectives of the same group are
# waited for, which all of its ranks submit in the same order. All-reduces have two exchanges, and
# are not limited: some gather while others reduce. Between 2 ranks, too, a forward of 101 ms
# waited 141 ms for gathers, and waits 78 with few in flight.
class Arriving(Protocol):
    """Messages in flight."""

    def wait(self) -> None: ...


Steps = Generator[Arriving, None, None]
"""A collective, which yields messages to wait for."""


class PendingCollective:
    """A collective that is in flight, finished or failed."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.on_end: Callable[[], None] | None = None

    def wait(self) -> None:
        wait_for(self._done)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._done.is_set()

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        _under_way.discard(self)
        self._done.set()
        if self.on_end is not None:
            self.on_end()


@dataclass
class _Queue:
    """Collectives of one group."""

    nbytes: int = 0  # Sent by those in flight
    waiting: deque[tuple[int, Steps, PendingCollective]] = field(default_factory=deque)


class _Threads:
    def __init__(self) -> None:
        self.begun: SimpleQueue[tuple[Steps, PendingCollective]] = SimpleQueue()
        self.apart: SimpleQueue[tuple[Steps, PendingCollective]] = SimpleQueue()
        self._arriving: SimpleQueue[tuple[Steps, PendingCollective, Arriving]] = SimpleQueue()
        self._lock, self._drivers, self._driven = threading.Lock(), 0, 0
        self._queues: WeakKeyDictionary[dist.ProcessGroup, _Queue] = WeakKeyDictionary()
        _serve("post", self.begun, self._resume)
        _serve("finish", self._arriving, self._finish)

    def drive(self, steps: Steps, exchange: PendingCollective) -> None:
        with self._lock:
            self._driven += 1
            more = self._drivers < min(THREADS, self._driven)
            self._drivers += more
            self.apart.put((steps, exchange))
        if more:
            _serve(f"apart-{self._drivers}", self.apart, self._drive)

    def enqueue(
        self, group: dist.ProcessGroup, nbytes: int, steps: Steps, exchange: PendingCollective
    ) -> None:
        """Begins a collective when few others of its group are in flight."""
        with self._lock:
            queue = self._queues.setdefault(group, _Queue())
            exchange.on_end = partial(self._ended, queue, nbytes)
            queue.waiting.append((nbytes, steps, exchange))
            self._admit(queue)

    def _ended(self, queue: _Queue, nbytes: int) -> None:
        with self._lock:
            queue.nbytes -= nbytes
            self._admit(queue)

    def _admit(self, queue: _Queue) -> None:
        while queue.waiting:
            nbytes, steps, exchange = queue.waiting[0]
            if queue.nbytes and queue.nbytes + nbytes > IN_FLIGHT_BYTES:
                return
            queue.waiting.popleft()
            queue.nbytes += nbytes
            self.begun.put((steps, exchange))

    def _resume(self, steps: Steps, exchange: PendingCollective) -> None:
        with _errors_of(exchange):
            messages = next(steps, None)
            if messages is None:
                exchange.end()
            else:
                self._arriving.put((steps, exchange, messages))

    def _finish(self, steps: Steps, exchange: PendingCollective, messages: Arriving) -> None:
        with _errors_of(exchange):
            messages.wait()
            self._resume(steps, exchange)

    def _drive(self, steps: Steps, exchange: PendingCollective) -> None:
        with _errors_of(exchange):
            drive(steps)
            exchange.end()
        with self._lock:
            self._driven -= 1


_threads: _Threads | None = None
_under_way: WeakSet[PendingCollective] = WeakSet()


def start(steps: Steps, rank_groups: Sequence[RankGroup], limited: int = 0) -> PendingCollective:
    """Starts a collective; with `limited`, its bytes, it may wait for others of its group."""
    global _threads
    if _threads is None:
        _threads = _Threads()
    exchange = PendingCollective()
    _under_way.add(exchange)
    axis, *more = rank_groups
    if more:
        _threads.drive(steps, exchange)
    elif limited and axis.size > 1:
        group = axis.process_group or dist.group.WORLD
        assert group is not None, "the world is initialized"
        _threads.enqueue(group, limited, steps, exchange)
    else:
        _threads.begun.put((steps, exchange))
    return exchange


def drive(steps: Steps) -> None:
    for messages in steps:
        messages.wait()


def drain(until: float) -> bool:
    """Waits for all collectives in flight, up to a deadline; returns whether they finished."""
    every = [e._done.wait(max(0.0, until - time.monotonic())) for e in list(_under_way)]
    return all(every)


@contextmanager
def _errors_of(exchange: PendingCollective) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        exchange.end(error)


def _serve(name: str, queue: SimpleQueue[Any], work: Callable[..., None]) -> None:
    def loop() -> None:
        while True:
            # References are dropped at once, because the next collective may be long in coming.
            work(*queue.get())

    # A daemon, so that the interpreter does not wait at exit for a thread blocked on a lost rank.
    # `world._shutdown_at_exit` drains messages in flight first: ending a thread inside gloo would
    # crash the process. A forked child has the queues but not the threads, so processes that
    # communicate are spawned; workers of data loaders never communicate.
    threading.Thread(target=loop, name=f"gulliver-comm-{name}", daemon=True).start()


# Collectives over the axes of a torus by point-to-point messages, step by step.
#
# The full payload crosses only the innermost, fast axis, and this rank's shard the outer ones:
# reduce-scatter runs from the inner to the outer axis, all-gather back, all-reduce both ways. Along
# an axis, every rank exchanges directly with every other: each sends and receives (n - 1) / n of
# the data, as in a ring, but with one latency instead of n - 1. (Gloo's own reduce-scatter is an
# all-reduce.) A plain group is a torus of one axis. Along several axes, a large tensor is split
# into segments with a collective each, so that one crosses the slow axis while the next crosses the
# fast one.
#
# Each collective is a generator that yields the messages to wait for. `all_gather_steps` mirrors
# `reduce_scatter_steps`.


ROW_BYTES = 32 << 10
"""Minimum bytes of a row that is sent without a copy."""
DIRECT_BYTES = 32 << 10
"""Extra bytes per rank that a direct all-reduce may send, because it saves an exchange."""
TINY_BYTES = 2 << 10
"""Maximum bytes of an all-reduce that sends directly along every axis."""
SEGMENTS, LEAST_SEGMENT, MOST_SEGMENT = 8, 512 << 10, 4 << 20
"""Number of segments of a tensor, and their minimum and maximum bytes."""


# [Note: who owns what] Rank r owns part r, with one or several axes. Seen as ``[outer, inner,
# part]``, an inner exchange sends the strided block ``[:, i]`` to inner rank i. Long rows are sent
# in place, one message each, and short rows as one gathered copy, because a message costs tens of
# microseconds for any size. An all-reduce has no owners, so its blocks are contiguous.
#
# [Note: receives first] The receives of all steps are posted before anything is sent. A message
# whose receive is posted needs no further round trip, which would take most of its time over a slow
# link.
#
# [Note: order of the sum] Terms are added in rank order along each axis, so the bits depend only on
# the shape of the torus.
@dataclass
class AxisExchange:
    """One exchange of blocks ``[rows, length]`` along a rank group."""

    rank_group: RankGroup
    tag: int  # First tag; there is one per row
    receives: list[Any] = field(default_factory=list)  # Posted receives that were not waited for
    sends: list[Any] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)  # Tensors to keep alive until they are sent

    def __post_init__(self) -> None:
        # The other positions of the rank group.
        self.peers = others(self.rank_group.rank, self.rank_group.size)
        # Looked up once: torch takes three calls to find the world's group.
        self._group = self.rank_group.process_group or dist.group.WORLD

    def receive(self, peer: int, block: Tensor) -> None:
        for number, piece in enumerate(_pieces(block)):
            rank = self.rank_group.ranks[peer]
            self.receives.append(receive(piece, rank, self._group, self.tag + number))

    def send(self, peers: Iterable[int], block: Tensor) -> None:
        pieces = _pieces(block)
        self.keep += pieces
        for peer in peers:
            for number, piece in enumerate(pieces):
                rank = self.rank_group.ranks[peer]
                self.sends.append(send(piece, rank, self._group, self.tag + number))

    def arrivals(self) -> Messages:
        works, self.receives = self.receives, []
        return Messages(works)

    def departures(self) -> Messages:
        works, self.sends = self.sends, []
        return Messages(works, self.keep)


def segmented_reduce_scatter(
    output: Tensor, input: Tensor, op: str, rank_groups: Sequence[RankGroup], purpose: Purpose = ANY
) -> list[Steps]:
    return [
        reduce_scatter_steps(output, input, op, rank_groups, _tags(rank_groups, purpose), segment)
        for segment in _segments(output.numel(), input.nbytes, rank_groups)
    ]


def segmented_all_gather(
    output: Tensor, input: Tensor, rank_groups: Sequence[RankGroup], purpose: Purpose = ANY
) -> list[Steps]:
    return [
        all_gather_steps(output, input, rank_groups, _tags(rank_groups, purpose), segment)
        for segment in _segments(input.numel(), output.nbytes, rank_groups)
    ]


def segmented_all_reduce(
    tensor: Tensor, op: str, rank_groups: Sequence[RankGroup], purpose: Purpose = ANY
) -> list[Steps]:
    flat = tensor.view(-1)
    return [
        all_reduce_steps(
            flat,
            op,
            rank_groups,
            _tags(rank_groups, purpose) + _tags(rank_groups, purpose),
            segment,
        )
        for segment in _segments(flat.numel(), flat.nbytes, rank_groups)
    ]


def reduce_scatter_steps(
    output: Tensor,
    input: Tensor,
    op: str,
    rank_groups: Sequence[RankGroup],
    tags: Sequence[int],
    segment: tuple[int, int],
) -> Steps:
    """Reduce-scatters one segment of each part, along the inner axis first."""
    sizes, length = [rank_group.size for rank_group in rank_groups], segment[1] - segment[0]
    stages: list[tuple[AxisExchange, Tensor]] = []
    dtype = input.dtype
    for depth in reversed(range(len(rank_groups))):
        exchange = AxisExchange(rank_groups[depth], tags[depth])
        rows = math.prod(sizes[:depth])
        buffer = acquire_buffer((sizes[depth] - 1) * rows * length, dtype)
        slots = buffer.view(sizes[depth] - 1, rows, length)
        for peer in exchange.peers:
            exchange.receive(peer, slots[_slot(peer, exchange.rank_group.rank)])
        stages.append((exchange, slots))
        dtype = output.dtype
    blocks = input.view(math.prod(sizes[:-1]), sizes[-1], output.numel())[
        ..., segment[0] : segment[1]
    ]
    for number, (exchange, slots) in enumerate(stages):
        rank_group = exchange.rank_group
        for peer in exchange.peers:
            exchange.send([peer], blocks[:, peer])
        yield exchange.arrivals()
        own = blocks[:, rank_group.rank]
        if number == len(stages) - 1:
            total = output[segment[0] : segment[1]].view(own.shape)
        else:
            total = _scratch(slots, output.dtype)
        add_up(total, own, slots, rank_group.rank, op)
        if number < len(stages) - 1:
            blocks = total.view(math.prod(sizes[: -number - 2]), sizes[-number - 2], length)
    if op == "mean":
        output[segment[0] : segment[1]].div_(math.prod(sizes))
    for exchange, slots in stages:
        yield exchange.departures()
        release_buffer(slots.view(-1))


def all_gather_steps(
    output: Tensor,
    input: Tensor,
    rank_groups: Sequence[RankGroup],
    tags: Sequence[int],
    segment: tuple[int, int],
) -> Steps:
    """All-gathers one segment of each part, along the outer axis first."""
    stages: list[tuple[AxisExchange, Tensor, dict[int, Tensor]]] = []
    for depth, rank_group in enumerate(rank_groups):
        exchange = AxisExchange(rank_group, tags[depth])
        blocks = _along(
            output.view(math.prod(rank_group.size for rank_group in rank_groups), input.numel()),
            rank_groups,
            depth,
        )
        blocks = blocks[..., segment[0] : segment[1]]
        packed = {}
        for peer in exchange.peers:
            block = blocks[:, peer]
            if not _pieces_are_views(block):
                block = packed[peer] = torch.empty_like(block, memory_format=_CONTIGUOUS)
            exchange.receive(peer, block)
        stages.append((exchange, blocks, packed))
    first, blocks, _ = stages[0]
    own, mine = blocks[0, first.rank_group.rank], input.view(-1)[segment[0] : segment[1]]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    for exchange, blocks, packed in stages:
        # Along an inner axis, the own block already contains the data of the outer ones.
        exchange.send(exchange.peers, blocks[:, exchange.rank_group.rank])
        yield exchange.arrivals()
        for peer, block in packed.items():
            blocks[:, peer].copy_(block)
    for exchange, *_ in stages:
        yield exchange.departures()


def all_reduce_steps(
    tensor: Tensor,
    op: str,
    rank_groups: Sequence[RankGroup],
    tags: Sequence[int],
    segment: tuple[int, int],
) -> Steps:
    """All-reduces one segment: reduces inner to outer, then gathers outer to inner."""
    levels: list[_Level] = []
    mine = segment
    for depth in reversed(range(len(rank_groups))):
        nbytes = (mine[1] - mine[0]) * tensor.element_size()
        more = (rank_groups[depth].size - 2) * nbytes
        whole = nbytes <= TINY_BYTES or (depth == 0 and more <= DIRECT_BYTES)
        levels.append(
            _Level(tensor, rank_groups[depth], mine, whole, tags[depth :: len(rank_groups)])
        )
        mine = levels[-1].mine
    # Receives of the second exchange overlap memory that the first one still sends from. They
    # cannot collide: a peer returns the sum of an interval only after receiving this rank's term
    # for it.
    for level in levels:
        level.post()
    for level in levels:
        yield level.scatter()
        if level.whole:
            # The sum replaces the data being sent.
            yield level.out.departures()
        level.add_up(op)
    if op == "mean":
        tensor[mine[0] : mine[1]].div_(math.prod(rank_group.size for rank_group in rank_groups))
    for level in reversed(levels):
        yield level.gather()
    for level in levels:
        yield level.out.departures()
        yield level.back.departures()
        release_buffer(level.slots.view(-1))


class _Level:
    """One axis of an all-reduce, with the interval that each rank reduces."""

    def __init__(
        self,
        tensor: Tensor,
        rank_group: RankGroup,
        interval: tuple[int, int],
        whole: bool,
        tags: Sequence[int],
    ) -> None:
        self.tensor, self.rank_group, self.whole = tensor, rank_group, whole
        self.intervals = [interval] * rank_group.size if whole else _cut(interval, rank_group.size)
        self.mine = self.intervals[rank_group.rank]
        self.out, self.back = AxisExchange(rank_group, tags[0]), AxisExchange(rank_group, tags[1])
        length = self.mine[1] - self.mine[0]
        buffer = acquire_buffer((rank_group.size - 1) * length, tensor.dtype)
        self.slots = buffer.view(rank_group.size - 1, 1, length)

    def post(self) -> None:
        for peer in self.out.peers:
            self.out.receive(peer, self.slots[_slot(peer, self.rank_group.rank)])
            if not self.whole:
                self.back.receive(peer, self._part(peer))

    def scatter(self) -> Messages:
        for peer in self.out.peers:
            self.out.send([peer], self._part(peer))
        return self.out.arrivals()

    def add_up(self, op: str) -> None:
        own = self._part(self.rank_group.rank)
        add_up(own, own, self.slots, self.rank_group.rank, op)

    def gather(self) -> Messages:
        if not self.whole:
            self.back.send(self.back.peers, self._part(self.rank_group.rank))
        return self.back.arrivals()

    def _part(self, place: int) -> Tensor:
        start, end = self.intervals[place]
        return self.tensor[start:end].view(1, -1)


def add_up(total: Tensor, own: Tensor, slots: Tensor, rank: int, op: str) -> None:
    if not total.numel():
        return
    add: Callable[..., Any] = torch.maximum if op == "max" else torch.add
    in_place = total.data_ptr() == own.data_ptr()
    terms = [*slots[:rank], total if in_place else own, *slots[rank:]]
    if total.dtype != own.dtype:
        total.copy_(terms[0])
        for term in terms[1:]:
            add(total, term.to(total.dtype) if term.element_size() == 1 else term, out=total)
        return
    # If in place, the sum of the preceding terms is computed in the first of them.
    into = slots[0] if rank > 1 and in_place else total
    for number, term in enumerate(terms[1:], start=1):
        if number == rank:
            into, before = total, into
            add(before if number > 1 else terms[0], term, out=into)
        else:
            add(into if number > 1 else terms[0], term, out=into)


def _along(parts: Tensor, rank_groups: Sequence[RankGroup], depth: int) -> Tensor:
    # The outer axes are gathered already, hence the rows; along inner axes, only this rank's.
    sizes = [rank_group.size for rank_group in rank_groups]
    inner = 0
    for rank_group in rank_groups[depth + 1 :]:
        inner = inner * rank_group.size + rank_group.rank
    rows, after = math.prod(sizes[:depth]), math.prod(sizes[depth + 1 :])
    return parts.view(rows, sizes[depth], after, parts.shape[1])[:, :, inner]


_CONTIGUOUS = torch.contiguous_format


def _pieces(block: Tensor) -> list[Tensor]:
    """Splits a block ``[rows, length]`` into contiguous pieces; see the note above."""
    if not block.numel():
        return []
    if block.shape[0] > 1 and block.shape[1] * block.element_size() >= ROW_BYTES:
        return list(block)
    return [block.contiguous().view(-1)]


def _pieces_are_views(block: Tensor) -> bool:
    return block.shape[1] * block.element_size() >= ROW_BYTES or block.is_contiguous()


def _slot(peer: int, rank: int) -> int:
    return peer - (peer > rank)


def _scratch(slots: Tensor, dtype: torch.dtype) -> Tensor:
    return slots[0] if slots.dtype == dtype else torch.empty_like(slots[0], dtype=dtype)


def _tags(rank_groups: Sequence[RankGroup], purpose: Purpose = ANY) -> list[int]:
    found, rows = [], 1
    for rank_group in rank_groups:
        found.append(flight_recorder.next_tag(rank_group.process_group, rows, purpose))
        rows *= rank_group.size
    return found


def _cut(interval: tuple[int, int], count: int) -> list[tuple[int, int]]:
    start, end = interval
    length = -(-(end - start) // count)
    edges = [min(start + number * length, end) for number in range(count + 1)]
    return list(itertools.pairwise(edges))


def _segments(length: int, nbytes: int, rank_groups: Sequence[RankGroup]) -> list[tuple[int, int]]:
    """Splits a part into segments, which are sent one at a time."""
    if len(rank_groups) == 1 or not nbytes:
        return [(0, length)]
    wanted = min(max(nbytes // SEGMENTS, LEAST_SEGMENT), MOST_SEGMENT)
    return [cut for cut in _cut((0, length), -(-nbytes // wanted)) if cut[1] > cut[0]]
