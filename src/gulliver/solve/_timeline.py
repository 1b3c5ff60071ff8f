"""The time of a ZeRO step, simulated from the times of its parts: one computing unit and one link.

The computing unit does forward, backward and update in their order and waits where it must. The
link does one transfer at a time, in the order in which they are handed in. Steps repeat until the
time from one to the next is that of a step; nothing else is assumed.

[Note: why a simulation] No formula such as max(compute, transfer) holds here: what a transfer hides
behind depends on the order of the chunks, and what one step's gathers leave over delays the next
step's first use. Going through a few steps event by event costs microseconds for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a step's computation takes when no communication is in its way.

    Attributes:
        forward: seconds from the beginning of forward to the first use of each tensor, in order of
            use.
        backward: seconds from the beginning of backward until each tensor's gradient is ready.
        forward_s: seconds of the whole forward.
        backward_s: seconds of the whole backward.
        update_s_per_byte: seconds of the optimizer on this rank's share, per byte of the whole
            tensor.
        overhead_s: seconds of handling one chunk in a step.
        rest_s: seconds of whatever else a loop does between two steps.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    forward_s: float
    backward_s: float
    update_s_per_byte: float
    overhead_s: float = 0.0
    rest_s: float = 0.0


Cost = Callable[[int], float]
"""Seconds of the link for a number of bytes."""


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
    """
    found = [_chunk(times, sizes, members, reduce, gather) for members in chunks]
    if not found:
        return times.forward_s + times.backward_s + times.rest_s
    clock = link = begun = 0.0
    for _ in range(repeats):
        begun = clock
        run = _sharded_step if sharded else _step
        clock, link = run(times, found, clock, link, ahead, latency_s)
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
) -> tuple[float, float]:
    done = 0.0
    for chunk in chunks:
        clock = max(clock + chunk.first_use - done, chunk.there)
        done = chunk.first_use
    begun = clock + times.forward_s - done
    issued = begun
    for chunk in reversed(chunks):
        issued = max(issued, begun + chunk.ready)  # strictly from the last to the first
        link = max(link, issued) + chunk.reduce_s
        chunk.reduced = link + latency_s
    clock = begun + times.backward_s
    for chunk in chunks:
        clock = max(clock, chunk.reduced) + chunk.update_s
        # Gathered under the other chunks' updates and the next step's forward.
        link = max(link, clock) + chunk.gather_s
        chunk.there = link + latency_s
    return clock + times.rest_s, link


def _sharded_step(
    times: StepTimes,
    chunks: list[_Chunk],
    clock: float,
    link: float,
    ahead: int,
    latency_s: float,
) -> tuple[float, float]:
    issued, done = 0, 0.0
    for number, chunk in enumerate(chunks):
        clock += chunk.first_use - done
        while issued < min(len(chunks), number + 1 + ahead):
            link = max(link, clock) + chunks[issued].gather_s
            chunks[issued].there = link + latency_s
            issued += 1
        clock, done = max(clock, chunk.there), chunk.first_use
    clock += times.forward_s - done
    issued, done = 1, 0.0  # the last chunk is still there
    order = chunks[::-1]
    for number, chunk in enumerate(order):
        while issued < min(len(order), number + 1 + ahead):
            link = max(link, clock) + order[issued].gather_s
            order[issued].there = link + latency_s
            issued += 1
        clock = max(clock, chunk.there) + max(0.0, chunk.ready - done)
        done = max(done, chunk.ready)
        link = max(link, clock) + chunk.reduce_s
        chunk.reduced = link + latency_s
    clock += times.backward_s - done
    for chunk in chunks:
        clock = max(clock, chunk.reduced) + chunk.update_s
    return clock + times.rest_s, link
