"""Predicted seconds of pipeline schedules and of a step of ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# How long the ranks of a pipeline take for the orders of their schedule, and how long they wait.
#
# Each rank does the next thing of its order as soon as what that needs is there: a forward, the
# forward of the stage before; a backward, the own forward and the backward of the stage after it
# (or the part of it that is for the inputs); the part for the weights, that for the inputs.
# Messages between ranks take `link` seconds and no rank's time.


FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Kinds of work: forward, backward, and the two parts of a backward that is split."""
Work = tuple[str, int, int]
"""The kind, stage and micro-batch of an action."""


@dataclass(frozen=True)
class Prediction:
    """A step of a pipeline."""

    # Time until the last rank is done.
    seconds: float
    # Seconds that each rank computes.
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def schedule_seconds(
    orders: Sequence[Sequence[Work]],
    times: Mapping[str, Sequence[float]],
    rank_of: Mapping[int, int],
    link: float = 0.0,
) -> Prediction:
    """Walks through the orders of all ranks."""
    clocks, busy = [0.0] * len(orders), [0.0] * len(orders)
    done: dict[Work, float] = {}
    following = [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                work = order[following[rank]]
                ready = _ready(work, done, rank_of, link)
                if ready is None:
                    break
                spent = times[work[0]][work[1]]
                clocks[rank] = done[work] = max(clocks[rank], ready) + spent
                busy[rank] += spent
                following[rank] += 1
                left -= 1
        assert left < before, "a schedule can be run"
    return Prediction(max(clocks), tuple(busy))


def _ready(
    work: Work, done: Mapping[Work, float], rank_of: Mapping[int, int], link: float
) -> float | None:
    """When what some work needs is there; None while it is not known."""
    kind, stage, micro = work
    needs: list[tuple[tuple[str, ...], int]] = []
    if kind == FORWARD and stage > 0:
        needs = [((FORWARD,), stage - 1)]
    elif kind in (BACKWARD, INPUTS):
        needs = [((FORWARD,), stage)]
        if stage < len(rank_of) - 1:
            needs.append(((BACKWARD, INPUTS), stage + 1))
    elif kind == WEIGHTS:
        needs = [((INPUTS,), stage)]
    latest = 0.0
    for kinds, other in needs:
        known = [done[k, other, micro] for k in kinds if (k, other, micro) in done]
        if not known:
            return None
        latest = max(latest, known[0] + (link if rank_of[other] != rank_of[stage] else 0.0))
    return latest


# The time of a ZeRO step, simulated from the times of its parts: one computing unit and one link.
#
# The computing unit does forward, backward and update in their order and waits where it must. The
# link does one transfer at a time, in the order in which they are handed in. Steps repeat until
# the time from one to the next is that of a step; nothing else is assumed.


# [Note: which gathers during backward] With updates during backward a chunk can be gathered as soon
# as it is updated. If every chunk was, gathers that nobody waits for yet would be sent before the
# last reductions, which the next forward waits for first; if none was, the link would have nothing
# but reductions to do in backward, and forward would wait for gathers. The link is as busy in
# forward as in backward if of the gathers a share (B - F) / (B + F) goes during backward, where F
# and B are the times of both, so a third if backward takes twice as long: that is right for slow
# links, which are busy all the time then, as for fast ones. So every third chunk is gathered during
# backward, and none of the last, which would delay what forward waits for first. It is a rule of
# numbers, and not of clocks, because gathers are collectives, which all ranks have to begin in one
# order.
#
# [Note: why a simulation] No formula such as max(compute, transfer) holds here: what a transfer
# hides behind depends on the order of the chunks, and what one step's gathers leave over delays the
# next step's first use. Going through a few steps event by event costs microseconds for each chunk.
@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step's computation takes when no communication is in its way."""

    # Seconds from the beginning of forward to the first use of each tensor, in order of use.
    forward: tuple[float, ...]
    # Seconds from the beginning of backward until each tensor's gradient is ready.
    backward: tuple[float, ...]
    # Seconds of the whole forward.
    forward_s: float
    # Seconds of the whole backward.
    backward_s: float
    # Seconds of the optimizer on this rank's share, per byte of the whole tensor.
    update_s_per_byte: float
    # Seconds of handling one chunk in a step.
    overhead_s: float = 0.0
    # Seconds of whatever else a loop does between two steps.
    rest_s: float = 0.0


Cost = Callable[[int], float]
"""Seconds of the link for a number of bytes."""
UPDATE_LAG = 2
"""Chunks that are reduced after one before it is updated during backward."""
EVERY = 3
"""During backward one of so many chunks is gathered."""


def gathers_in_backward(number: int, count: int) -> bool:
    """Whether a chunk is gathered during backward, or else after it; see the note above."""
    return number > UPDATE_LAG and (count - 1 - number) % EVERY == 0


@dataclass
class _Chunk:
    first_use: float
    ready: float
    reduce_s: float
    gather_s: float
    update_s: float
    there: float = 0.0
    reduced: float = 0.0


def step_seconds(
    times: StepTimes,
    sizes: Sequence[int],
    chunks: Sequence[Sequence[int]],
    reduce: Cost,
    gather: Cost,
    latency_s: float = 0.0,
    sharded: bool = False,
    ahead: int = 2,
    repeats: int = 4,
    in_backward: bool = False,
) -> float:
    """Returns the seconds from one step to the next.

    Args:
        times: seconds of the computation.
        sizes: bytes of the tensors, in order of use.
        chunks: tensors of each chunk, by their indices in `sizes`.
        reduce: seconds that the link needs to reduce-scatter a number of bytes.
        gather: seconds that the link needs to all-gather a number of bytes.
        latency_s: seconds from the end of a transfer until its result can be read; the link is
            free meanwhile.
        sharded: whether parameters are gathered in forward and in backward (ZeRO-3), not after the
            update (ZeRO-1 and 2).
        ahead: chunks that are prefetched, with `sharded`.
        repeats: steps to simulate; the last one counts.
        in_backward: whether chunks are updated during backward.
    """
    found = [_chunk(times, sizes, members, reduce, gather) for members in chunks]
    if not found:
        return times.forward_s + times.backward_s + times.rest_s
    clock = link = begun = 0.0
    lag = UPDATE_LAG if in_backward else len(found)
    for _ in range(repeats):
        begun = clock
        run = _sharded_step if sharded else _step
        clock, link = run(times, found, clock, link, ahead, latency_s, lag)
    return clock - begun


def _chunk(
    times: StepTimes, sizes: Sequence[int], members: Sequence[int], reduce: Cost, gather: Cost
) -> _Chunk:
    count = sum(sizes[m] for m in members)
    return _Chunk(
        min(times.forward[m] for m in members),
        max(times.backward[m] for m in members),
        reduce(count),
        gather(count),
        count * times.update_s_per_byte + times.overhead_s,
    )


def _step(
    times: StepTimes,
    chunks: list[_Chunk],
    clock: float,
    link: float,
    ahead: int,
    latency_s: float,
    lag: int,
) -> tuple[float, float]:
    done = 0.0
    for chunk in chunks:
        clock = max(clock + chunk.first_use - done, chunk.there)
        done = chunk.first_use
    clock += times.forward_s - done
    done, count = 0.0, len(chunks)
    left = dict(enumerate(chunks))  # to be updated after backward, or to be gathered
    for number in reversed(range(count)):  # strictly from the last to the first
        chunk, behind = chunks[number], number + lag
        clock, done = clock + max(0.0, chunk.ready - done), max(done, chunk.ready)
        link = max(link, clock) + chunk.reduce_s
        chunk.reduced = link + latency_s
        if behind < count:
            clock = _updated(chunks[behind], clock)
            if gathers_in_backward(behind, count):
                link = _gathered(left.pop(behind), clock, link, latency_s)
    clock += times.backward_s - done
    if lag < count:
        for chunk in reversed(chunks[:lag]):
            clock = _updated(chunk, clock)
    for chunk in left.values():
        # Gathered under the other chunks' updates and the next step's forward.
        clock = clock if lag < count else _updated(chunk, clock)
        link = _gathered(chunk, clock, link, latency_s)
    return clock + times.rest_s, link


def _updated(chunk: _Chunk, clock: float) -> float:
    return max(clock, chunk.reduced) + chunk.update_s


def _gathered(chunk: _Chunk, clock: float, link: float, latency_s: float) -> float:
    link = max(link, clock) + chunk.gather_s
    chunk.there = link + latency_s
    return link


def _sharded_step(
    times: StepTimes,
    chunks: list[_Chunk],
    clock: float,
    link: float,
    ahead: int,
    latency_s: float,
    lag: int,
) -> tuple[float, float]:
    issued, done, count = 0, 0.0, len(chunks)
    for number, chunk in enumerate(chunks):
        clock += chunk.first_use - done
        while issued < min(count, number + 1 + ahead):
            link = _gathered(chunks[issued], clock, link, latency_s)
            issued += 1
        clock, done = max(clock, chunk.there), chunk.first_use
    clock += times.forward_s - done
    issued, done = ahead + 1, 0.0  # the last chunks are still there
    order = chunks[::-1]
    for number, chunk in enumerate(order):
        while issued < min(count, max(number + 1, 2) + ahead):
            link = _gathered(order[issued], clock, link, latency_s)
            issued += 1
        clock = max(clock, chunk.there) + max(0.0, chunk.ready - done)
        done = max(done, chunk.ready)
        link = max(link, clock) + chunk.reduce_s
        chunk.reduced = link + latency_s
        if number >= lag:
            clock = _updated(order[number - lag], clock)
    clock += times.backward_s - done
    for chunk in chunks if lag >= count else order[count - lag :]:
        clock = _updated(chunk, clock)
    return clock + times.rest_s, link
