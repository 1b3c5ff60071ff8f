"""Cutting a chain of layers over unequal devices and links, in the best order of devices.

Each device takes consecutive layers; which device comes after which is free, and devices may be
left out. Devices and the links between them are servers in a row, and all micro-batches are alike,
so the time of m of them is exactly

    makespan(m) = sum of all servers' seconds + (m - 1) x the slowest server's

and that of one of endlessly many the slowest server's. With m = 1 it is the sum that counts, which
fills the fastest devices up to their memory; with many it is the balance.

`place_layers` is exact up to `EXACT` devices: by dynamic programming over (devices used, the last
of them, layers so far) the least sum with no server above a limit is found, then the limit is
lowered below the slowest server that came out, as long as something can still be won. Each of
these takes O(2^devices x devices x (devices x layers + layers^2)). Beyond, the order is looked for
by local search (`_devices_local.py`), the cut of an order is 0.3 % exact, and a bound is given
(`_devices_bound.py`).

Source: the objective is that of a flow shop with equal jobs; the states are those of Held and Karp
1962 for sequencing; Sky Computing (Zhu et al. 2022) has the problem, with the slowest server only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve._devices_bound import lower_bound
from gulliver.solve._devices_local import local_search
from gulliver.solve._fleet import Fleet, Order, Placement, makespan
from gulliver.solve._pareto import Floats

EXACT = 12


def place_layers(fleet: Fleet, micro_batches: float = 1, tries: int = 400) -> Placement:
    """Cuts the layers over the devices so that the makespan is least.

    Args:
        fleet: layers, devices and links.
        micro_batches: number of micro-batches; `math.inf`: endless.
        tries: number of orders that local search looks at, with more than `EXACT` devices.

    Raises:
        GulliverError: no placement keeps within the devices' memory.
    """
    if not micro_batches >= 1:
        raise GulliverError(f"there is at least 1 micro-batch, not {micro_batches}")
    exact = fleet.devices <= EXACT
    if exact:
        lower = 0.0
        found = lowered(lambda limit: _subsets(fleet, limit), fleet, micro_batches, lower)
    else:
        lower = lower_bound(fleet, micro_batches)
        found = local_search(fleet, micro_batches, lower, tries)
    if found is None:
        needs = f"{fleet.memory.sum():g} bytes in all, the largest layer {fleet.memory.max():g}"
        kept = ", all of them used" if fleet.every else ""
        raise GulliverError(
            f"the layers need {needs}: no order of {fleet.devices} devices with "
            f"{fleet.limits.sum():g}{kept} holds them; use more or larger devices"
        )
    devices, bounds = found
    servers = fleet.servers(devices, bounds)
    seconds = makespan(servers, micro_batches)
    exact = exact or seconds <= lower * (1 + 1e-9)
    return Placement(devices, bounds, seconds, seconds if exact else lower, servers, exact)


def lowered(
    least_sum: Callable[[float], Order | None],
    fleet: Fleet,
    micro_batches: float,
    lower: float,
) -> Order | None:
    """The best of what a search for the least sum finds as the slowest server is limited.

    With a lower limit the sum only rises, so what is worth trying ends where the first sum and the
    limit alone reach the best that is known.

    Args:
        least_sum: finds the least sum of servers with none above a limit, where there is any.
        fleet: layers, devices and links.
        micro_batches: number of micro-batches.
        lower: makespan that no placement can be below.
    """
    best = found = least_sum(math.inf)
    if best is None:
        return None
    servers = fleet.servers(*best)
    least, value = sum(servers), makespan(servers, micro_batches)
    while found is not None and value > lower * (1 + 1e-12):
        slowest = max(fleet.servers(*found))
        if micro_batches == math.inf:
            limit = slowest
        elif micro_batches == 1:
            break
        else:
            limit = min(slowest, (value - least) / (micro_batches - 1))
        found = least_sum(limit * (1 - 1e-10))
        if found is not None:
            reached = makespan(fleet.servers(*found), micro_batches)
            best, value = (found, reached) if reached < value else (best, value)
    return best


def _subsets(fleet: Fleet, limit: float) -> Order | None:
    """The least sum of servers with none above a limit, over all orders of devices."""
    count, layers = fleet.devices, fleet.layers
    costs = np.where(fleet.costs <= limit, fleet.costs, np.inf)
    links = np.where(fleet.crossings <= limit, fleet.crossings, np.inf)
    least = np.full((1 << count, count, layers + 1), np.inf)
    for device in range(count):
        least[1 << device, device] = costs[device, 0]
    numbers = np.arange(1 << count)
    sizes = np.array([int(number).bit_count() for number in numbers])
    for size in range(1, min(count, layers)):
        for device in range(count):
            used = numbers[(sizes == size) & (numbers >> device & 1 == 0)]
            for some in np.array_split(used, max(1, len(used) * layers**2 // 2_000_000)):
                before = (least[some] + links[None, :, device]).min(axis=1)
                after = (before[:, :, None] + costs[device][None]).min(axis=1)
                least[some | 1 << device, device] = after
    ends = least[:, :, layers]
    if fleet.every:
        ends = np.where((numbers == numbers[-1])[:, None], ends, np.inf)
    used, device = (int(v) for v in np.unravel_index(int(ends.argmin()), ends.shape))
    if ends[used, device] == np.inf:
        return None
    return _traced(least, costs, links, used, device)


def _traced(least: Floats, costs: Floats, links: Floats, used: int, device: int) -> Order:
    """Walks back from the end to the order and the cut that led there."""
    stop = least.shape[2] - 1
    devices, bounds = [device], [stop]
    while used != 1 << device:
        used ^= 1 << device
        ways = least[used] + links[:, device] + costs[device][None, :, stop]
        device, stop = (int(v) for v in np.unravel_index(int(ways.argmin()), ways.shape))
        devices.append(device)
        bounds.append(stop)
    return tuple(reversed(devices)), (0, *reversed(bounds))
