"""Hit rates of the policies, on power laws that stay and that shift, beside Belady's floor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gulliver.solve.rows import RowPolicy, RowReplacement

Trace = list[tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(frozen=True)
class TraceConfig:
    """A trace."""

    rows: int = 400_000  # rows of the table
    uses: int = 1600  # ids of a batch
    batches: int = 240  # number of batches; the first quarter only fills the caches
    exponent: float = 1.05  # exponent of the power law
    shift: float = 0.0  # share of the ranks that move on with every batch; 0 for a law that stays


def make_trace(config: TraceConfig, draws: int = 0) -> Trace:
    """Draws batches; which row has which rank is at random, and moves where the law shifts."""
    order = np.random.default_rng(0).permutation(config.rows)
    draw = np.random.default_rng(1 + draws)
    trace = []
    for number in range(config.batches):
        # The hottest go, one after the other, and come back at the cold end.
        first = int(number * config.shift * config.rows)
        ranks = power_law(draw, config.rows, config.uses, config.exponent)
        rows = order[(ranks + first) % config.rows]
        trace.append(np.unique(rows, return_counts=True))
    return trace


def hit_rate(
    trace: Trace, rows: int, slots: int, policy: RowPolicy, ahead: int, ranked: Trace | None = None
) -> float:
    """Share of the uses, after the first quarter of the batches, that found their row."""
    frequencies = None
    if policy == "dataset":
        frequencies = np.zeros(rows, np.int64)
        for batch, counts in ranked or trace:
            frequencies[batch] += counts
    cache = RowReplacement(slots, rows, policy, frequencies)
    queue, before = [], (0, 0)
    for number in range(len(trace) + ahead):
        if number < len(trace):
            queue.append(cache.announce(*trace[number]))
        if number >= ahead:
            if number - ahead == len(trace) // 4:
                before = cache.counts.uses, cache.counts.missed_uses
            cache.commit(cache.decide(queue.pop(0)))
    uses, missed = cache.counts.uses - before[0], cache.counts.missed_uses - before[1]
    return 1 - missed / uses


def power_law(
    draw: np.random.Generator, rows: int, count: int, exponent: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Draws numbers below `rows`, the n-th as often as n to the power of minus `exponent`."""
    # The density over a continuous range is inverted, so that no table of all rows is needed.
    uniform = draw.random(count)
    if exponent == 1.0:
        found = np.exp(uniform * np.log(rows + 1))
    else:
        top = (rows + 1.0) ** (1 - exponent)
        found = (1 + uniform * (top - 1)) ** (1 / (1 - exponent))
    return np.minimum(found.astype(np.int64) - 1, rows - 1)
