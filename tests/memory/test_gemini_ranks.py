"""The least limit that is stated serves several ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from gulliver.comm import World
from tests.covering import some
from tests.least_limits import at_least_limit, least_case, plain
from tests.pool import Pool

CASES, FULL_CASES = 4, 250


def _differences(world: World, seeds: range, folder: str) -> list[tuple[str, float]]:
    found = []
    for seed in seeds:
        case = least_case(seed, world.size)
        pairs = zip(plain(case), at_least_limit(case, folder, world.rank), strict=True)
        found.append((str(case), max(float((a - b).abs().max()) for a, b in pairs)))
    return found


@pytest.mark.parametrize("ranks", some([2, 4], [2]))
def test_the_least_limit_serves_several_ranks(pool: Pool, tmp_path: Path, ranks: int) -> None:
    seeds = range(100 * ranks, 100 * ranks + CASES // ranks)
    for found in pool.run(_differences, ranks, seeds, str(tmp_path)):
        assert not [(case, far) for case, far in found if far > 1e-5]


@pytest.mark.full
@pytest.mark.deadline(1800)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_least_limit_serves_hundreds_on_several_ranks(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    for found in pool.run(_differences, ranks, range(FULL_CASES // ranks), str(tmp_path)):
        assert not [(case, far) for case, far in found if far > 1e-5]
