"""Deadlines that scale with the machine: how slow it is now, and when a wait is too long.

`slowness()` times a fixed piece of work against what it takes on an idle core of 2.1 GHz; it sees
slow cores and busy ones alike. A `Deadline` of so many seconds on such a core is lengthened by the
factor measured when the session began and, when it is due, by the factor of that moment: a test
that shares its cores with others gets the time that they take from it, one that hangs leaves its
core idle and fails when it should.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

FACTOR = "GULLIVER_TESTS_SLOWNESS"
"""Environment variable with the factor of the session; set it to choose one by hand."""

LARGEST = 8.0
NOMINAL_S = 0.0105
ROUNDS = 12
"""Of the piece of work: together several of the scheduler's time slices."""


def _work() -> int:
    total = 0
    for number in range(150_000):
        total += number * number % 7
    return total


def slowness() -> float:
    """How many times longer work takes now than on the idle core; from 1 to `LARGEST`."""
    started = time.perf_counter()
    for _ in range(ROUNDS):
        _work()
    measured = (time.perf_counter() - started) / (ROUNDS * NOMINAL_S)
    return min(max(measured, 1.0), LARGEST)


def session_factor() -> float:
    """The factor of the session; processes that it starts inherit it."""
    if FACTOR not in os.environ:
        os.environ[FACTOR] = f"{slowness():.2f}"
    return float(os.environ[FACTOR])


def patient(seconds: float) -> float:
    """The seconds to wait, as a timeout, for what takes at most `seconds` on an idle core."""
    return seconds * session_factor()


class Deadline:
    """A time that moves on while the machine is slower than it was thought to be."""

    def __init__(self, seconds: float, measure: Callable[[], float] = slowness) -> None:
        self.seconds, self._measure = seconds, measure
        self._factor = session_factor()
        self._started = time.monotonic()

    def left(self) -> float:
        """Seconds until it is due; not positive when it has passed for good."""
        left = self._left()
        if left <= 0:
            self._factor = max(self._factor, self._measure())
            left = self._left()
        return left

    def _left(self) -> float:
        return self._started + self.seconds * self._factor - time.monotonic()
