"""What the tests themselves stand on: covering arrays, shared references, deadlines."""

from __future__ import annotations

import os
from itertools import combinations, product
from pathlib import Path

import pytest

from gulliver.comm import World
from tests.covering import covering, grid, some
from tests.mutation import MUTANTS, Mutant, mutated
from tests.patience import Deadline, slowness
from tests.pool import Pool
from tests.references import computed_once


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_of_values_occurs_in_a_covering_array(strength: int) -> None:
    factors = [range(4), "ab", range(3), range(5)]
    chosen = covering(*factors, strength=strength)
    assert chosen == covering(*factors, strength=strength)
    for places in combinations(range(4), strength):
        wanted = set(product(*(range(len(factors[p])) for p in places)))
        assert {tuple(case[p] for p in places) for case in chosen} == wanted
    assert len(chosen) < 4 * 2 * 3 * 5


def test_covering_array_skips_excluded_cases() -> None:
    def allowed(a: int, b: int, c: int) -> bool:
        return a != b

    chosen = covering(range(3), range(3), range(2), allowed=allowed)
    assert all(a != b for a, b, _ in chosen)
    assert {(a, b) for a, b, _ in chosen} == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert len(grid(range(3), range(3), range(2), allowed=allowed)) == 12


def test_a_grid_has_every_case_and_marks_those_left_out() -> None:
    cases = grid(range(3), "ab", range(3), always=lambda a, b, c: a == 2)
    assert [case.values for case in cases] == list(product(range(3), "ab", range(3)))
    kept = [case.values for case in cases if not case.marks]
    assert set(product([2], "ab", range(3))) <= set(kept)
    assert len(kept) < len(cases)
    assert [getattr(v, "values", v) for v in some([1, 2, 3], [2])] == [(1,), 2, (3,)]


@computed_once
def _reference(folder: Path, number: int) -> list[int]:
    (folder / f"{number}-{os.getpid()}").touch()
    return [number]


def _read_it(world: World, folder: Path) -> list[list[int]]:
    first = _reference(folder, 1)
    first.append(world.rank)
    return [first, _reference(folder, 1), _reference(folder, 2)]


def test_a_reference_is_computed_once_for_all_processes(pool: Pool, tmp_path: Path) -> None:
    for rank, found in enumerate(pool.run(_read_it, 3, tmp_path)):
        assert found == [[1, rank], [1], [2]]
    assert _reference(tmp_path, 1) == [1]
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["1", "2"]


def test_deadline_extends_on_slow_machine() -> None:
    assert 1 <= slowness() <= 8
    assert Deadline(1e-9, lambda: 1e12).left() > 100
    assert Deadline(1e-9, lambda: 1.0).left() <= 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_changes_one_place(mutant: Mutant) -> None:
    compile(mutated(mutant), mutant.file, "exec")


def test_old_locations_export_the_names_of_the_new_ones() -> None:
    from gulliver.booster import operators, search
    from gulliver.booster.auto import auto_engine
    from gulliver.operators.plans import find_operators
    from gulliver.planner.search.grids import search_grids

    assert (search.auto_engine, search.search_grids) == (auto_engine, search_grids)
    assert operators.find_operators is find_operators
