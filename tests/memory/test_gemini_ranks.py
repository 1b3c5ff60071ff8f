"""The least limit that is stated serves several ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from gulliver.comm import World
from tests.covering import some
from tests.pool import Pool
from tests.random_limits import RandomCase, problem

CASES, FULL_CASES = 4, 250


def _problems(world: World, seeds: range, folder: str) -> list[str]:
    found = [problem(RandomCase(seed, world.size), folder, world.rank) for seed in seeds]
    return [f"{seed}: {text}" for seed, text in zip(seeds, found, strict=True) if text]


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_random_models_keep_to_their_limits_on_several_ranks(
    pool: Pool, tmp_path: Path, ranks: int, full: bool
) -> None:
    seeds = range(100 * ranks, 100 * ranks + (FULL_CASES if full else CASES) // ranks)
    assert pool.run(_problems, ranks, seeds, str(tmp_path)) == [[]] * ranks
