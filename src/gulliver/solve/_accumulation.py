"""How many samples of one shape become micro-batches: a group's time, and the least of all ranks.

`accumulated` says how long a group takes for 1, 2, ... samples, `split_batches` into which
micro-batches they are cut for that, and `covering` the least rank seconds of any number of samples
on any groups, which bounds every plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def accumulated(seconds: np.ndarray, most: int) -> np.ndarray:
    """Seconds of 0, 1, ... samples on one group, cut into micro-batches."""
    # Samples are cut evenly, into as few micro-batches as fit or into those of the best rate, or
    # into whole ones of the best rate and a rest. The first is best where seconds grow faster and
    # faster with a batch, the last where they grow slower and slower.
    counts = np.arange(most + 1)
    _, found = _ways(seconds, counts)
    return np.maximum.accumulate(np.min(found, axis=0))


def split_batches(seconds: np.ndarray, count: int) -> tuple[int, ...]:
    """Cuts samples into micro-batches in the way that `accumulated` took, the largest first.

    Args:
        seconds: seconds of micro-batches of 1, 2, ... samples: [B].
        count: number of samples, at least 1.
    """
    ways, found = _ways(seconds, np.array([count]))
    way = int(np.argmin(found[:, 0]))
    if way < len(ways):
        parts = int(ways[way][0])
        low, more = divmod(count, parts)
        return (low + 1,) * more + (low,) * (parts - more)
    best = _best_batch(seconds)
    whole, rest = divmod(count, best)
    return (best,) * whole + ((rest,) if rest else ())


def covering(rank_seconds: Mapping[int, np.ndarray], most: int) -> tuple[np.ndarray, float]:
    """The least rank seconds of 0, 1, ... samples in micro-batches on groups of any size."""
    # Exact: least(n) = min over b of least(n - b) + w(b), where w(b) is the least over degrees. It
    # is a bound for every way in which a step may deal the samples.
    size = max(map(len, rank_seconds.values()))
    one = np.full(size, np.inf)
    for row in rank_seconds.values():
        one[: len(row)] = np.minimum(one[: len(row)], row)
    most = min(most, 1024)
    least = np.zeros(most + 1)
    for n in range(1, most + 1):
        reach = min(n, size)
        least[n] = np.min(least[n - reach : n][::-1] + one[:reach])
    return least, float(np.min(one / np.arange(1, size + 1)))


def _best_batch(seconds: np.ndarray) -> int:
    return int(np.argmin(seconds / np.arange(1, len(seconds) + 1))) + 1


def _ways(seconds: np.ndarray, counts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Numbers of even parts of three ways [3][K]; seconds of those and of best ones [4, K]."""
    size, best = len(seconds), _best_batch(seconds)
    at = np.concatenate(([0.0], seconds))
    fewest = np.maximum(1, -(-counts // size))
    ways = [fewest, np.maximum(fewest, counts // best), np.maximum(fewest, -(-counts // best))]
    found = []
    for parts in ways:
        low = counts // parts
        more = counts - low * parts
        found.append((parts - more) * at[low] + more * at[np.minimum(low + 1, size)])
    whole, rest = np.divmod(counts, best)
    found.append(whole * at[best] + at[rest])
    return ways, np.array(found)
