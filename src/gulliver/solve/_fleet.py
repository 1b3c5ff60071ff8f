"""Layers, devices and links, and an assignment of the ones to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gulliver.errors import GulliverError
from gulliver.solve._pareto import Floats

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


Order = tuple[tuple[int, ...], tuple[int, ...]]
"""Devices and bounds, as in `Placement`."""
