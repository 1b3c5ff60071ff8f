"""The bytes of a grid in the search are those that its run holds, on the fullest rank."""

from __future__ import annotations

import pytest
from benchmarks.memory_truth import CASES, Case, peaks, predicted

from gulliver.booster.search import Axes, Grid
from gulliver.comm import World
from tests.pool import Pool

USUAL = (
    Case(Grid(Axes(data=2), 3), blocks=4),
    Case(Grid(Axes(data=2), 2, 2), "bf16", blocks=4),
    Case(Grid(Axes(data=2), 0, recomputed=4), blocks=4),
    Case(Grid(Axes(tensor=2), recomputed=4), blocks=4),
    Case(Grid(Axes(pipeline=2), 0, 4, "1f1b"), blocks=4),
)
"""Runs of two ranks that hold one kind of bytes each that the others do not."""


def _peaks(world: World, cases: tuple[Case, ...]) -> list[int]:
    return peaks(cases)


def held_to(pool: Pool, ranks: int, cases: tuple[Case, ...]) -> None:
    found = pool.run(_peaks, ranks, cases, deadline_s=20.0 * len(cases))
    for case, *real in zip(cases, *found, strict=True):
        told = predicted(case)
        assert sum(told.values()) == pytest.approx(max(real), rel=0.05), (str(case), told, real)


@pytest.mark.deadline(150)
def test_the_search_tells_the_bytes_of_a_run(pool: Pool) -> None:
    held_to(pool, 2, USUAL)


@pytest.mark.full
@pytest.mark.deadline(900)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_search_tells_the_bytes_of_every_run(pool: Pool, ranks: int) -> None:
    held_to(pool, ranks, tuple(case for case in CASES if case.ranks == ranks))
