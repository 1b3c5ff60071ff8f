"""The packer of steps: the extension `gulliver.solve._packer` where it was built, else first fit.

``GULLIVER_PACKER=python`` or ``native`` forces one. Their plans differ, so all ranks need the same.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from gulliver.errors import GulliverError, nearest
from gulliver.solve._step_fallback import CLOSE, FallbackTables, Packed

TRIES = 10
"""Times that are tried."""
FIRST = 1.05
"""The first time that is tried, over the bound."""
WIDENED = tuple(1.06 ** (2**number) for number in range(7))
"""How much longer the next time is, while none is found: by its number."""
OTHERWISE = ((0.5, 1, 0.02), (2.0, 1, 0.06), (0.0, 2, 0.06), (0.0, 4, 0.06))
"""Second tries: how much of the time that a shape's samples leave in a group counts as lost, what
part of the ranks a group may have (one wide group makes all samples pay for its messages), and the
gap to the bound from which on it is tried."""
SHORTER = 0.01
"""Share by which each of those is shorter than the best so far."""
INTERFACE = 1
"""Version of the extension's interface; both sides count up when their calls change."""
PACKERS = ("native", "python")
"""Values of ``$GULLIVER_PACKER``; the first that is there is taken where it is not set."""


class StepAnswer(Protocol):
    """What a search has found."""

    @property
    def seconds(self) -> float:
        """Seconds of the longest group."""
        ...

    def packed(self) -> Packed:
        """Groups, and what is left."""
        ...


class StepPacking(Protocol):
    """Samples of a step, and ways to deal them to groups."""

    def pack(
        self, limit: float, degrees: list[int], lost: float = ..., partly: bool = ...
    ) -> Packed | None:
        """Fills groups up to a time."""
        ...

    def follow(self, groups: Sequence[tuple[int, float]], until: float) -> tuple[list[int], float]:
        """Fills groups that are busy up to some seconds."""
        ...

    def search(self, bound: float) -> StepAnswer | None:
        """Packs all samples in as little time as is found."""
        ...


class StepTables(Protocol):
    """Ends and rates of all shapes, by number."""

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Takes the ends of a shape by degree, and its least rank seconds of a sample."""
        ...

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> StepPacking:
        """The packing of so many samples of shapes."""
        ...


class NativePacking:
    """A packing of the extension."""

    def __init__(self, core: Any, tries: Any) -> None:
        self._core, self._tries = core, tries

    def pack(
        self,
        limit: float,
        degrees: list[int],
        lost: float = 0.0,
        partly: bool = False,
        most: int | None = None,
    ) -> Packed | None:
        """Fills groups up to a time."""
        packed, degrees[:] = self._core.pack(limit, degrees, lost, partly, most)
        return packed

    def follow(self, groups: Sequence[tuple[int, float]], until: float) -> tuple[list[int], float]:
        """Fills groups that are busy up to some seconds."""
        return self._core.follow(groups, until)

    def search(self, bound: float) -> StepAnswer | None:
        """Packs all samples in as little time as is found."""
        return self._core.search(bound, self._tries)


class NativeTables:
    """Ends and rates of all shapes in the extension."""

    def __init__(self, ranks: int, repeat: bool) -> None:
        built = _extension()
        self._core = built.Tables(ranks, repeat)
        self._tries = built.Tries(TRIES, CLOSE, FIRST, SHORTER, list(WIDENED), list(OTHERWISE))

    def learn(self, number: int, ends: Mapping[int, list[float]], rate: float) -> None:
        """Takes the ends of a shape by degree, and its least rank seconds of a sample."""
        self._core.learn(number, list(map(int, ends)), list(ends.values()), rate)

    def packing(self, numbers: Sequence[int], counts: Sequence[int]) -> NativePacking:
        """The packing of so many samples of shapes."""
        return NativePacking(self._core.packing(numbers, list(map(int, counts))), self._tries)


def packer_problem() -> str | None:
    """Says why steps are not packed by the extension; None where they are."""
    wanted = os.environ.get("GULLIVER_PACKER", "")
    if wanted and wanted not in PACKERS:
        raise GulliverError(f"GULLIVER_PACKER={wanted!r} is unknown: {nearest(wanted, PACKERS)}")
    if wanted == "python":
        return "GULLIVER_PACKER=python"
    problem = _not_built()
    if problem and wanted:
        raise GulliverError(f"GULLIVER_PACKER=native cannot be met: {problem}")
    return problem


def step_tables(ranks: int, repeat: bool) -> StepTables:
    """Returns empty tables of the packer that is there."""
    if packer_problem() is None:
        return NativeTables(ranks, repeat)
    return FallbackTables(ranks, repeat)


@cache
def _not_built() -> str | None:
    try:
        built = _extension().INTERFACE
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built != INTERFACE:
        return "its extension is of another version: pip install -e . builds it again"
    return None


def _extension() -> Any:
    # By name: type checking must pass where it has not been built.
    return importlib.import_module("gulliver.solve._packer")
