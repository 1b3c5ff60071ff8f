"""Makespan that no placement of layers on devices can be below, by two relaxations.

In the first, devices take whole runs of layers, as they do, but runs may overlap and leave layers
out; what is short of all layers is paid for. With a price for each unit of work

    sum of all work x price - sum over devices of max over runs of (work x price - seconds)

is below the sum of all servers, whatever the price (Lagrangian duality); the best price is found by
bisection. Only runs within a limit of the slowest device count, so this gives least(limit), and

    makespan(m) >= min over limits of (least(limit) + (m - 1) x limit)

whose limits are halved until the interval with the lowest bound is `CLOSE` to it. No limit is
below the least one with which runs have as much work as there is: that alone bounds endless
micro-batches.
As runs are whole, bytes that are left over on a device help no more than they do in truth.

In the second, layers may be split between devices, and each has a price of its own on each device.
That is better where some devices are good at some layers.
"""

from __future__ import annotations

import math

import numpy as np

from gulliver.solve._fleet import Fleet
from gulliver.solve._pareto import Floats

CLOSE, LIMITS, PRICES = 1e-3, 60, 50
"""Share that the limits' bound may be loose by, limits, and prices for each of them."""
DUAL_STEPS = 400
SAFE = 1 - 1e-12
"""Bounds are lowered by as much as sums are inexact."""


def lower_bound(fleet: Fleet, micro_batches: float) -> float:
    """Makespan that no placement can be below.

    Args:
        fleet: layers, devices and links.
        micro_batches: number of micro-batches; `math.inf`: endless.
    """
    each = fleet.seconds.mean(axis=0)
    # Light layers fill what whole heavy ones leave of a limit, on more devices than there are such
    # layers, since runs may overlap: heavy ones alone are a third work, which they cannot fill.
    works = (np.ones(fleet.layers), each, (each >= each.max() / 2).astype(float))
    found = [_Runs(fleet, work).bound(micro_batches) for work in works if work.sum() > 0]
    return max([_of_split_layers(fleet, micro_batches), *(SAFE * value for value in found)])


class _Runs:
    """The runs of layers that each device can take, by their work.

    Args:
        fleet: layers, devices and links.
        work: work of each layer.
    """

    def __init__(self, fleet: Fleet, work: Floats) -> None:
        self._every, self._total = fleet.every, float(work.sum())
        sums = np.concatenate([[0.0], work.cumsum()])
        first, stop = np.triu_indices(fleet.layers + 1, 1)
        # Equal work is one run, to a billionth of all.
        units = np.round((sums[stop] - sums[first]) / self._total * 1e9).astype(np.int64)
        order = np.argsort(units, kind="stable")
        starts = np.flatnonzero(np.diff(units[order], prepend=-1))
        self._work = (units[order][starts] + 1) * self._total / 1e9
        links = fleet.crossings.copy()
        links[np.arange(fleet.devices), np.arange(fleet.devices)] = np.inf
        entries = links.min(axis=0) if fleet.devices > 1 else np.zeros((1, fleet.layers + 1))
        entries[:, 0] = 0.0
        alone = fleet.costs[:, first, stop][:, order]
        with_link = alone + entries[:, first][:, order]
        self._alone = np.minimum.reduceat(alone, starts, axis=1)
        self._seconds = np.minimum.reduceat(with_link, starts, axis=1)

    def bound(self, micro_batches: float) -> float:
        """Makespan that no placement can be below; infinite if there is none."""
        least = self._least_limit()
        if least == math.inf or micro_batches == math.inf:
            return least
        times, most = micro_batches - 1, float(self._alone[np.isfinite(self._alone)].max())
        open_ = [(least, most, self._least_sum(most))]
        for _ in range(LIMITS):
            low, high, total = open_.pop(int(np.argmin([s + times * at for at, _, s in open_])))
            if times * (high - low) <= CLOSE * (total + times * low):
                open_.append((low, high, total))
                break
            middle = (low + high) / 2
            open_.append((middle, high, total))
            below = self._least_sum(middle)
            if below < math.inf:
                open_.append((low, middle, below))
        return min(total + times * low for low, _, total in open_)

    def _least_limit(self) -> float:
        """The least limit of the slowest device with which there is work enough."""
        limits = np.unique(self._alone[np.isfinite(self._alone)])
        low, high = 0, len(limits)
        while low < high:
            middle = (low + high) // 2
            if self._reaches(self._alone <= limits[middle]):
                high = middle
            else:
                low = middle + 1
        return float(limits[low]) if low < len(limits) else math.inf

    def _reaches(self, allowed: np.ndarray) -> bool:
        return bool(np.where(allowed, self._work, 0.0).max(axis=1).sum() >= self._total)

    def _least_sum(self, limit: float) -> float:
        """Sum of all servers' seconds that is not reached with none above a limit."""
        allowed = self._alone <= limit
        if not self._reaches(allowed):
            return math.inf
        seconds, best = np.where(allowed, self._seconds, np.inf), 0.0
        low, high, rising = 0.0, 1.0, True
        for _ in range(PRICES):
            price = high if rising else (low + high) / 2
            gains = price * self._work - seconds
            taken = gains.argmax(axis=1)
            gain = np.take_along_axis(gains, taken[:, None], axis=1)[:, 0]
            used = np.full(len(gain), True) if self._every else gain > 0
            best = max(best, float(price * self._total - gain[used].sum()))
            short = self._work[taken][used].sum() < self._total
            rising = rising and bool(short)
            if short:
                low, high = price, 2 * high if rising else high
            else:
                high = price
        return best


def _of_split_layers(fleet: Fleet, micro_batches: float) -> float:
    """A bound in which layers may be split: by prices of loads and of memory.

    Layers may be split between devices, and their order is not looked at. The dual of this linear
    program gives a bound for all prices: weights w of the devices' loads, which sum to m - 1 (for
    endless micro-batches to 1), and prices p of their memory,

        sum over layers of min over devices of ((1 + w) seconds + p bytes) - sum of p limits

    which rises to the program's own value; a few hundred subgradient steps go up.

    Args:
        fleet: layers, devices and links.
        micro_batches: number of micro-batches.
    """
    endless = micro_batches == math.inf
    base, mass = (0.0, 1.0) if endless else (1.0, micro_batches - 1)
    limits = np.minimum(fleet.limits, fleet.memory.sum())
    speeds = 1 / np.maximum(fleet.seconds.sum(axis=1), 1e-300)
    loads, prices = mass * speeds / speeds.sum(), np.zeros(fleet.devices)
    largest = float(fleet.seconds.min(axis=0).max())
    best = base * float(fleet.seconds.min(axis=0).sum()) + mass * largest
    scale = float(fleet.seconds.mean()) / max(float(fleet.memory.mean()), 1e-300)
    for step in range(DUAL_STEPS):
        priced = (base + loads)[:, None] * fleet.seconds + prices[:, None] * fleet.memory
        taken = priced.argmin(axis=0)
        value = float(priced.min(axis=0).sum() - prices @ limits)
        best = max(best, value)
        own = np.arange(fleet.devices)[:, None] == taken
        slope_w = (own * fleet.seconds).sum(axis=1)
        slope_p = (own * fleet.memory).sum(axis=1) - limits
        size = 1 / (1 + step) ** 0.5
        loads = _simplex(loads + size * mass * slope_w / max(slope_w.sum(), 1e-300), mass)
        worst = max(float(np.abs(slope_p).max()), 1e-300)
        prices = np.maximum(0.0, prices + size * scale * slope_p / worst)
    return best


def _simplex(values: Floats, mass: float) -> Floats:
    """The nearest point whose entries are not negative and have a given sum."""
    if mass <= 0:
        return np.zeros_like(values)
    falling = np.sort(values)[::-1]
    over = (falling.cumsum() - mass) / np.arange(1, len(values) + 1)
    count = int(np.flatnonzero(falling > over)[-1])
    return np.maximum(0.0, values - over[count])
