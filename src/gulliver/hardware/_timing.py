"""Times operations in turns: a busy moment of the machine then meets all of them a little.

A run is a batch of calls long enough for the clock, ended by the device's synchronisation; a batch
is charged to its calls evenly, so that launches overlap on a GPU as they do in a real step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from gulliver.hardware._curve import Curve

Key = TypeVar("Key")
BATCH_S = 1e-3
MOST_CALLS = 100


def in_turns(
    operations: Mapping[Key, Callable[[], object]], device: torch.device, turns: int = 9
) -> dict[Key, list[float]]:
    """Seconds of a call of each operation, once for each turn, after a warm-up."""
    calls = {}
    for key, operation in operations.items():
        once(operation, device)
        took = min(once(operation, device) for _ in range(2))
        calls[key] = max(1, min(MOST_CALLS, int(BATCH_S / max(took, 1e-9))))
    found: dict[Key, list[float]] = {key: [] for key in operations}
    for _ in range(turns):
        for key, operation in operations.items():
            found[key].append(once(operation, device, calls[key]))
    return found


def once(operation: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Seconds of a call, as the mean of several in a row."""
    begun = time.perf_counter()
    for _ in range(calls):
        operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / calls


def curve_of(times: Mapping[int, Sequence[float]]) -> Curve:
    """Medians by size, and the usual spread between quartiles."""
    # A size that took longer than a larger one was disturbed: it gets the larger one's seconds.
    sizes = tuple(sorted(times))
    medians = [statistics.median(times[size]) for size in sizes]
    rising = list(itertools.accumulate(reversed(medians), min))[::-1]
    return Curve(sizes, tuple(rising), statistics.median(spread_of(times[size]) for size in sizes))


def spread_of(values: Sequence[float]) -> float:
    """The distance between the quartiles, relative to the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
