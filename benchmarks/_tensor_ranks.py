"""What each rank does in `benchmarks.tensor`: lets the contestants take turns, and measures.

Read `measure`. It does not know what the figures are held against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks._harness import Spread, alternate, slowest_rank
from benchmarks._tensor_models import COMPUTE, OURS, PEERS, Contestant, Sizes, build
from benchmarks.netlab import wire_bytes
from gulliver.comm import all_reduce, barrier, init_world
from gulliver.comm import shutdown as leave

COMMUNICATION = "communication"
REDUCTIONS = 6  # All-reduces that are timed for how long all of a step's take alone


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    ranks: tuple[int, ...] = (2, 4)
    networks: tuple[str, ...] = ("loopback", "0.3", "1", "3")
    """Rates such as 1gbit, or plain tensor parallelism's communication as a multiple of its
    compute; they need root."""
    contestants: tuple[str, ...] = (*PEERS, *OURS)
    rounds: int = 4  # Turns of a step each
    hidden: int = 512
    wide: int = 1408  # Of the MLPs
    blocks: int = 4
    vocabulary: int = 2048
    batch: int = 4  # Sequences of the whole batch; the data parallel peers deal them out
    length: int = 256  # Tokens of a sequence
    keep: bool = False  # Write benchmarks/results

    def sizes(self) -> Sizes:
        sizes = self.hidden, self.wide, self.blocks, self.vocabulary, self.batch, self.length
        return Sizes(*sizes)


@dataclass(frozen=True)
class Entry:
    """What was found about a contestant."""

    step: Spread  # seconds of a step, of the slowest rank
    # bytes that this rank sent in a step; None where they cannot be counted
    wire: float | None = None
    saved: int = 0  # bytes of activations that forward kept for backward
    losses: tuple[float, ...] = ()  # of this rank's steps


@dataclass(frozen=True)
class Found:
    """What a rank found on one network."""

    entries: dict[str, Entry]  # by contestant, with `COMPUTE`
    reduction: Spread  # seconds of an all-reduce of one activation `[B, L, H]`, alone


def measure(options: Options, names: Sequence[str], shaped: bool) -> Found:
    """One rank's part on one network."""
    init_world()
    sizes = options.sizes()
    contestants = [build(name, sizes) for name in (COMPUTE, *names)]
    for contestant in contestants:
        contestant.count_saved()
    wire: dict[str, list[float]] = {c.name: [] for c in contestants}
    turns: dict[str, Callable[[], float]] = {
        c.name: lambda c=c: _turn(c, wire[c.name] if shaped else None) for c in contestants
    }
    turns[COMMUNICATION] = _communication(sizes)
    times = alternate(turns, options.rounds, warm_up=0)  # all have made a step
    entries = {c.name: _entry(c, times[c.name], wire[c.name]) for c in contestants}
    barrier()
    leave()
    return Found(entries, times[COMMUNICATION])


def _turn(contestant: Contestant, wire: list[float] | None) -> float:
    """A step; seconds of the slowest rank."""
    barrier()
    sent = wire_bytes()[0] if wire is not None else 0
    started = time.perf_counter()
    contestant.advance()
    seconds = time.perf_counter() - started
    barrier()
    if wire is not None:
        wire.append(wire_bytes()[0] - sent)
    return slowest_rank(seconds)


def _communication(sizes: Sizes) -> Callable[[], float]:
    """All-reduces of an activation, one after another as plain tensor parallelism has them."""
    activation = torch.zeros(sizes.batch * sizes.length * sizes.hidden)

    def turn() -> float:
        all_reduce(activation)  # connections that have been idle start slowly
        started = time.perf_counter()
        for _ in range(REDUCTIONS):
            all_reduce(activation)
        return slowest_rank((time.perf_counter() - started) / REDUCTIONS)

    return turn


def _entry(contestant: Contestant, step: Spread, wire: list[float]) -> Entry:
    sent = sorted(wire)[len(wire) // 2] if wire else None
    return Entry(step, sent, contestant.saved, tuple(contestant.losses))
