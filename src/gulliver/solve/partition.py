"""Splits chains of costs into consecutive parts, and lists into balanced parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gulliver.errors import GulliverError

# Splits a chain of costs into consecutive parts with the smallest maximum.
#
# Pipeline parallelism splits the layers of a network into stages, and the slowest stage limits
# throughput. Dynamic programming over (parts so far, costs so far) is exact:
#
#     best[k][j] = min over i of max(best[k - 1][i], time of part k from i to j)
#
# in O(parts x costs^2). Source: the linear partition problem, e.g. Skiena, The Algorithm Design
# Manual, 10.7.


_SLACK = 1e-12  # relative tolerance for sums of floats that should be equal


# [Note: two passes] Many partitions reach the smallest maximum, and some leave the other parts
# needlessly uneven. So a second pass minimizes the sum of squared times among the partitions whose
# parts all keep within that maximum. Minimizing the sum of squares alone could end with a larger
# maximum.
@dataclass(frozen=True)
class ChainPartition:
    """A split of a chain into consecutive parts."""

    # First cost of each part, followed by the total count: part k has the costs ``bounds[k]`` to
    # ``bounds[k + 1]`` (exclusive).
    bounds: tuple[int, ...]
    # Time of each part, in the unit of the costs divided by that of the speeds.
    times: tuple[float, ...]
    # Largest of the times.
    value: float
    # Lower bound over all partitions: total cost over total speed, or the largest cost on the
    # fastest machine.
    lower: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))


def partition_chain(
    costs: Sequence[float],
    parts: int,
    *,
    speeds: Sequence[float] | None = None,
) -> ChainPartition:
    """Splits `costs` into consecutive, non-empty parts, minimizing the largest time.

    Returns:
        The partition with the smallest maximum; among several, the most even one.
    """
    if len(costs) < parts:
        raise GulliverError(
            f"a chain of {len(costs)} blocks cannot be split into {parts} parts; use fewer parts"
        )
    speeds = list(speeds or [1.0] * parts)
    time = _times(costs, speeds)
    value, _ = _best(len(costs), parts, time, max, math.inf)
    limit = value * (1 + _SLACK)
    _, bounds = _best(len(costs), parts, time, lambda a, t: a + t * t, limit)
    times = tuple(time(k, bounds[k], bounds[k + 1]) for k in range(parts))
    return ChainPartition(tuple(bounds), times, max(times), _lower(costs, speeds))


def chain_times(
    costs: Sequence[float], bounds: Sequence[int], speeds: Sequence[float] | None = None
) -> tuple[float, ...]:
    parts = len(bounds) - 1
    time = _times(costs, list(speeds or [1.0] * parts))
    return tuple(time(k, bounds[k], bounds[k + 1]) for k in range(parts))


def _lower(costs: Sequence[float], speeds: Sequence[float]) -> float:
    return max(sum(costs) / sum(speeds), max(costs) / max(speeds))


def _times(costs: Sequence[float], speeds: Sequence[float]) -> Callable[[int, int, int], float]:
    sums = [0.0, *accumulate(costs)]
    return lambda part, start, stop: (sums[stop] - sums[start]) / speeds[part]


def _best(
    count: int,
    parts: int,
    time: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    limit: float,
) -> tuple[float, list[int]]:
    """Least ``join(value of earlier parts, time)`` over parts of at most `limit`, and the parts."""
    # best[j]: value of the first j costs in the parts so far; choices lead back to the partition.
    best = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for part in range(parts):
        reached, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        # Every part before and after this one holds at least one cost.
        for stop in range(part + 1, count - (parts - part - 1) + 1):
            for start in range(part, stop):
                if best[start] == math.inf:
                    continue
                spent = time(part, start, stop)
                value = join(best[start], spent)
                if spent <= limit and value < reached[stop]:
                    reached[stop], chosen[stop] = value, start
        best = reached
        choices.append(chosen)
    bounds = [count]
    for chosen in reversed(choices):
        bounds.append(chosen[bounds[-1]])
    return best[count], bounds[::-1]


# Assigns costs to parts in any order to minimize the largest sum.
#
# Longest processing time first: every cost, largest first, goes to the part with the smallest sum
# so far. The largest sum is at most 4/3 of the optimum. Source: Graham 1969, "Bounds on
# Multiprocessing Timing Anomalies".


def balanced_parts(costs: Sequence[int], parts: int) -> list[int]:
    """Assigns each cost to one of `parts`; deterministic in the costs and their order."""
    if parts < 1:
        raise GulliverError(f"parts={parts} must be at least 1")
    loads, found = [0] * parts, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        part = loads.index(min(loads))
        found[number] = part
        loads[part] += costs[number]
    return found
