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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve._pareto import Floats

EXACT = 12
SLACK = 1e-12


@dataclass(frozen=True)
class Placement:
    """An assignment of layers to devices.

    Attributes:
        devices: numbers of the devices, in the order of the chain.
        bounds: first layer of each of them, and the count of all layers at the end.
        seconds: makespan; of endless micro-batches, the seconds of one.
        lower: makespan that no placement can be below.
        servers: seconds of each device and, between two, of the link: device, link, device, ...
        exact: whether no placement takes less.
    """

    devices: tuple[int, ...]
    bounds: tuple[int, ...]
    seconds: float
    lower: float
    servers: tuple[float, ...]
    exact: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers of each device."""
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def gap(self) -> float:
        """Share by which a better placement could at most be below this one."""
        return 0.0 if self.exact else max(0.0, 1 - self.lower / self.seconds)


class Fleet:
    """Layers, devices and links.

    Args:
        seconds: seconds of each layer on each device, for a micro-batch [devices, layers].
        links: seconds from each device to each other for what crosses before a layer
            [devices, devices, layers]; the first layer is not used. None: nothing.
        memory: bytes of each layer; None: not looked at.
        limits: bytes of each device.
        every: whether no device may be left out.

    Raises:
        GulliverError: shapes do not fit, or numbers are out of range.
    """

    def __init__(
        self,
        seconds: Sequence[Sequence[float]] | Floats,
        links: Sequence[Sequence[Sequence[float]]] | Floats | None = None,
        memory: Sequence[float] | Floats | None = None,
        limits: Sequence[float] | Floats | None = None,
        every: bool = False,
    ) -> None:
        self.seconds = np.asarray(seconds, dtype=float)
        if self.seconds.ndim != 2 or not self.seconds.size:
            raise GulliverError("seconds are given of each layer on each device: two dims")
        self.devices, self.layers = self.seconds.shape
        shape = (self.devices, self.devices, self.layers)
        self.links = np.zeros(shape) if links is None else np.asarray(links, dtype=float)
        self.memory = np.zeros(self.layers) if memory is None else np.asarray(memory, dtype=float)
        endless = np.full(self.devices, np.inf)
        self.limits = endless if limits is None else np.asarray(limits, dtype=float)
        self.every = every
        self._check(shape)
        sums = np.concatenate([np.zeros((self.devices, 1)), self.seconds.cumsum(axis=1)], axis=1)
        bytes_ = np.concatenate([[0.0], self.memory.cumsum()])
        taken = bytes_[None, :] - bytes_[:, None]
        some = np.triu(np.ones((self.layers + 1,) * 2, dtype=bool), 1)
        fits = taken[None] <= self.limits[:, None, None] * (1 + SLACK)
        self.costs = np.where(some & fits, sums[:, None, :] - sums[:, :, None], np.inf)
        """Seconds of each device for the layers from one up to, without, another."""
        self.crossings = np.concatenate([self.links, np.zeros((*shape[:2], 1))], axis=2)

    def _check(self, shape: tuple[int, int, int]) -> None:
        if self.links.shape != shape:
            raise GulliverError(f"links are {self.links.shape}, and need {shape}")
        if self.memory.shape != (self.layers,) or self.limits.shape != (self.devices,):
            raise GulliverError("memory has an entry for each layer, limits for each device")
        if not all((v >= 0).all() for v in (self.seconds, self.links, self.memory, self.limits)):
            raise GulliverError("seconds and bytes of layers and devices are not negative")
        if self.every and self.layers < self.devices:
            raise GulliverError(
                f"{self.layers} layers are too few for {self.devices} devices that all take some"
            )

    def servers(self, devices: Sequence[int], bounds: Sequence[int]) -> tuple[float, ...]:
        """Seconds of the devices and the links between them, in the order of the chain."""
        found = list[float]()
        for place, device in enumerate(devices):
            if place:
                found.append(float(self.links[devices[place - 1], device, bounds[place]]))
            found.append(float(self.costs[device, bounds[place], bounds[place + 1]]))
        return tuple(found)


def makespan(servers: Sequence[float], micro_batches: float) -> float:
    """Seconds of so many equal micro-batches on servers in a row; endless: of one of them."""
    if micro_batches == math.inf:
        return max(servers)
    return sum(servers) + (micro_batches - 1) * max(servers)


def place_layers(fleet: Fleet, micro_batches: float = 1, tries: int = 400) -> Placement:
    """Cuts the layers over the devices so that the makespan is least.

    Args:
        fleet: layers, devices and links.
        micro_batches: number of micro-batches; `math.inf`: endless.
        tries: number of orders that local search looks at, with more than `EXACT` devices.

    Raises:
        GulliverError: no placement keeps within the devices' memory.
    """
    from gulliver.solve._devices_bound import lower_bound
    from gulliver.solve._devices_local import local_search

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


Order = tuple[tuple[int, ...], tuple[int, ...]]
"""Devices and bounds, as in `Placement`."""


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
