"""Dealing costs out to parts in any order, so that the largest sum is small.

Longest processing time first: every cost, the largest first, goes to the part that has least so
far. The largest sum is at most 4/3 of the least possible. Source: Graham 1969, "Bounds on
Multiprocessing Timing Anomalies".
"""

from __future__ import annotations

from collections.abc import Sequence

from gulliver.errors import GulliverError


def balanced_parts(costs: Sequence[int], parts: int) -> list[int]:
    """Returns the part that each cost goes to; the same for the same costs in the same order."""
    if parts < 1:
        raise GulliverError(f"parts={parts}: deal costs to at least 1 part")
    loads, found = [0] * parts, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda n: -costs[n]):
        part = loads.index(min(loads))
        found[number] = part
        loads[part] += costs[number]
    return found
