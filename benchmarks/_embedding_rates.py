"""Hit rates of the policies, on power laws that stay and that shift, beside Belady's floor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gulliver.solve.rows import RowReplacement

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
    trace: Trace, rows: int, slots: int, policy: str, ahead: int, ranked: Trace | None = None
) -> float:
    """Share of the uses, after the first quarter of the batches, that found their row."""
    if policy != "lookahead":
        return _plain_rate(trace, rows, slots, policy, ahead, ranked or trace)
    cache = RowReplacement(slots, rows)
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


def _plain_rate(
    trace: Trace, rows: int, slots: int, policy: str, ahead: int, ranked: Trace
) -> float:
    """The same of rows that leave by last use (lru), by uses (lfu, counts) or by a rank.

    lfu counts rows in the cache, counts all rows, and keeps those of the next `ahead` batches.
    """
    keys, held = np.zeros(rows), np.zeros(rows, bool)
    if policy == "dataset":
        for batch, counts in ranked:
            keys[batch] += counts
    uses = missed = 0
    for number, (batch, counts) in enumerate(trace):
        new = batch[~held[batch]]
        if number >= len(trace) // 4:
            uses, missed = uses + int(counts.sum()), missed + int(counts[~held[batch]].sum())
        over = int(held.sum()) + len(new) - slots
        if over > 0:
            held[batch] = False
            idle, values = np.flatnonzero(held), keys.copy()
            for next_number in range(min(number + ahead, len(trace) - 1), number, -1):
                values[trace[next_number][0]] = 1e9 - next_number
            held[idle[np.argsort(values[idle], kind="stable")[:over]]] = False
        held[batch] = True
        if policy == "lru":
            keys[batch] = number
        elif policy in ("lfu", "counts"):
            keys[new] *= policy == "counts"
            keys[batch] += counts
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
