"""Seconds in which bytes move between a device and its host, measured as activations move.

    fit = fit_samples(model, points, moves=measure_moves(host_copies(device)))
    room = fit.host_room(20 * 2**30)

It does not know what moves: `measure_moves` calls back, as `measure_samples` does.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gulliver.errors import GulliverError
from gulliver.hardware._timing import once

SIZES = (2**22, 2**24, 2**26)
"""Bytes of tensors that are moved: those of a block's activations are as large."""


@dataclass(frozen=True)
class MovePoint:
    """One measurement."""

    # Bytes that moved.
    bytes: int
    # Whether they left the device; else they came.
    to_host: bool
    seconds: float


@dataclass(frozen=True)
class MoveFit:
    """Seconds of a byte each way, fitted to points."""

    # Seconds of a byte that leaves the device.
    to_host_s: float
    # Seconds of a byte that comes back.
    from_host_s: float
    # Largest relative error of the points.
    error: float


def measure_moves(
    move: Callable[[int, bool], float], sizes: Sequence[int] = SIZES, repeats: int = 5
) -> list[MovePoint]:
    """Measures points: the median of several moves after one that is not counted.

    Args:
        move: moves so many bytes, to the host or from it; returns seconds.
        sizes: bytes.
        repeats: moves of each point.
    """
    points = []
    for to_host, size in itertools.product((True, False), sizes):
        move(size, to_host)
        seconds = statistics.median(move(size, to_host) for _ in range(repeats))
        points.append(MovePoint(size, to_host, seconds))
    return points


def fit_moves(points: Sequence[MovePoint]) -> MoveFit:
    """Fits seconds of a byte to points, by their relative errors."""
    found, errors = list[float](), list[float]()
    for to_host in (True, False):
        own = [point for point in points if point.to_host == to_host]
        if not own or any(
            not (math.isfinite(p.seconds) and p.seconds > 0 and p.bytes > 0) for p in own
        ):
            raise GulliverError("moves need points of both ways, with bytes and seconds above 0")
        rates = [point.bytes / point.seconds for point in own]
        found.append(sum(rates) / sum(rate * rate for rate in rates))
        errors += [abs(rate * found[-1] - 1) for rate in rates]
    return MoveFit(found[0], found[1], max(errors))


def host_copies(device: torch.device) -> Callable[[int, bool], float]:
    """Makes what `measure_moves` calls on a GPU: copies between it and page-locked memory.

    Raises:
        GulliverError: the device is the host itself.
    """
    if device.type != "cuda":
        raise GulliverError(f"nothing moves between {device} and its host: they are one memory")
    here = torch.empty(max(SIZES), dtype=torch.uint8, device=device)
    there = torch.empty(max(SIZES), dtype=torch.uint8, pin_memory=True)

    def move(size: int, to_host: bool) -> float:
        target, source = (there, here) if to_host else (here, there)
        torch.cuda.synchronize(device)
        return once(lambda: target[:size].copy_(source[:size], non_blocking=True), device)

    return move
