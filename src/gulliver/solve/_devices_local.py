"""An order of many devices for a chain of layers, by local search.

For a given order, in which devices may be skipped, and a limit of the slowest server, the cut with
the least sum is exact: dynamic programming over (last device, layers so far), O(devices x layers^2
+ devices^2 x layers). Limits are halved down to `CLOSE` of what could be won. Orders begin with the
fastest first and its reverse, and go on with swaps of two devices and moves of one, kept where the
makespan falls. The draws are seeded, so that the same question has the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gulliver.solve._fleet import Fleet, Order, makespan

CLOSE = 3e-3
"""Share by which the best cut of an order may be below the one that is found."""


def local_search(fleet: Fleet, micro_batches: float, lower: float, tries: int) -> Order | None:
    """The best placement that was found.

    Args:
        fleet: layers, devices and links.
        micro_batches: number of micro-batches.
        lower: makespan that no placement can be below.
        tries: number of orders to look at.
    """
    draws = np.random.default_rng(0)
    pace = fleet.seconds.mean(axis=1)
    fast = [int(device) for device in np.argsort(pace, kind="stable")]
    spacious = [int(device) for device in np.argsort(-fleet.limits, kind="stable")]
    best, value, order = None, math.inf, fast
    starts = [fast, fast[::-1], spacious]
    for number in range(max(tries, len(starts))):
        if value <= lower * (1 + 1e-9):
            break
        tried = starts[number] if number < len(starts) else _neighbour(order, draws)
        found = in_order(fleet, tried, micro_batches, lower, value)
        reached = math.inf
        if found is not None:
            reached = makespan(fleet.servers(*found), micro_batches)
        if reached <= value and found is not None:
            best, value, order = found, reached, tried
    return best


def _neighbour(order: Sequence[int], draws: np.random.Generator) -> list[int]:
    """The order with two devices swapped, or one elsewhere."""
    changed = list(order)
    one, other = (int(v) for v in draws.integers(len(order), size=2))
    if draws.random() < 0.5:
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed.insert(other, changed.pop(one))
    return changed


def in_order(
    fleet: Fleet,
    order: Sequence[int],
    micro_batches: float,
    lower: float,
    known: float = math.inf,
) -> Order | None:
    """The best placement, to `CLOSE`, with devices in a given order; useless ones are skipped.

    Args:
        fleet: layers, devices and links.
        order: numbers of the devices.
        micro_batches: number of micro-batches.
        lower: makespan that no placement can be below.
        known: makespan of another order; what is not below it is not looked at.
    """
    best = _cut(fleet, order, math.inf)
    if best is None or micro_batches == 1:
        return best
    # Of endless micro-batches the sum does not count.
    each, times = (0.0, 1.0) if micro_batches == math.inf else (1.0, micro_batches - 1)
    servers = fleet.servers(*best)
    least, value = each * sum(servers), makespan(servers, micro_batches)
    # Between limits: the least sum with the higher one, and the slowest server above the lower.
    low = max(0.0, (lower - least) / times) if micro_batches == math.inf else 0.0
    open_ = [(low, max(servers), least)]
    while open_ and min(value, known) > lower * (1 + CLOSE):
        low, high, least = open_.pop(int(np.argmin([n[2] + times * n[0] for n in open_])))
        if least + times * low >= min(value, known) * (1 - CLOSE) or high - low <= CLOSE * high:
            continue
        middle = (low + high) / 2
        found = _cut(fleet, order, middle)
        if found is None:
            open_.append((middle, high, least))
            continue
        servers = fleet.servers(*found)
        reached = makespan(servers, micro_batches)
        best, value = (found, reached) if reached < value else (best, value)
        open_ += [(middle, high, least), (low, min(middle, max(servers)), each * sum(servers))]
    return best


def _cut(fleet: Fleet, order: Sequence[int], limit: float) -> Order | None:
    """The least sum of servers with none above a limit, in an order of devices."""
    costs = np.where(fleet.costs <= limit, fleet.costs, np.inf)
    links = np.where(fleet.crossings <= limit, fleet.crossings, np.inf)
    count, layers = len(order), fleet.layers
    least = np.full((count, layers + 1), np.inf)
    for place, device in enumerate(order):
        first = 0 if not place or not fleet.every else math.inf
        before = np.full(layers + 1, np.inf)
        before[0] = first
        known = order[place - 1 : place] if fleet.every else order[:place]
        if place:
            rows = least[place - len(known) : place] + links[list(known), device]
            before = np.minimum(before, rows.min(axis=0))
        least[place] = (before[:, None] + costs[device]).min(axis=0)
    ends = least[:, layers].copy()
    if fleet.every:
        ends[:-1] = np.inf
    place = int(ends.argmin())
    if ends[place] == np.inf:
        return None
    return _traced(fleet, order, least, costs, links, place)


def _traced(
    fleet: Fleet,
    order: Sequence[int],
    least: np.ndarray,
    costs: np.ndarray,
    links: np.ndarray,
    place: int,
) -> Order:
    stop = fleet.layers
    devices, bounds = [order[place]], [stop]
    while True:
        device, value = order[place], least[place, stop]
        alone = costs[device, 0, stop] if not (fleet.every and place) else np.inf
        start = max(0, place - 1) if fleet.every else 0
        rows = least[start:place] + links[list(order[start:place]), device]
        ways = rows + costs[device][None, :, stop]
        if not ways.size or alone <= ways.min():
            assert alone <= value * (1 + 1e-9) + 1e-300, "the way back ends at the beginning"
            return tuple(reversed(devices)), (0, *reversed(bounds))
        row, stop = (int(v) for v in np.unravel_index(int(ways.argmin()), ways.shape))
        place = start + row
        devices.append(order[place])
        bounds.append(stop)
