"""The native packer of steps, and the fallback without it."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gulliver.data import DataCentricPlanner, Tokens
from gulliver.errors import GulliverError
from gulliver.solve import packing as tables_module
from gulliver.solve.packing import FallbackTables, NativeTables, packer_problem, step_tables
from tests.data_centric.data_centric_costs import line_costs

needs_native = pytest.mark.skipif(
    packer_problem() is not None, reason=f"no native packer: {packer_problem()}"
)


def random_ends(draw: np.random.Generator, ranks: int) -> dict[int, list[float]]:
    """Ends at some degrees, often equal for two numbers of samples, as where batches are even."""
    degrees = [d for d in (1, 2, 3, 4, 6, 8, 16) if d <= ranks and draw.random() < 0.6] or [1]
    each, fixed = draw.uniform(0.05, 3), draw.choice([0.0, 0.1, 1.0])
    found = {}
    for degree in degrees:
        steps = draw.choice([0.0, 0.5, 1.0], int(draw.integers(1, 40)), p=[0.1, 0.2, 0.7])
        row = fixed + each / degree ** draw.uniform(0.6, 1.05) * np.cumsum(np.maximum(steps, 1e-3))
        found[degree] = [0.0, *np.round(row, int(draw.integers(2, 16))).tolist()]
    return found


@given(st.integers(0, 2**32 - 1))
@example(572)  # The degrees that take least would leave no rank to a shape.
@pytest.mark.parametrize("kind", [FallbackTables, pytest.param(NativeTables, marks=needs_native)])
@settings(max_examples=40, deadline=None)
def test_either_packer_places_every_sample_once_inside_the_ranks(kind: Any, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ranks, repeat = int(draw.integers(1, 20)), bool(draw.random() < 0.8)
    tables, counts, work = kind(ranks, repeat), list[int](), 0.0
    shapes = [random_ends(draw, ranks) for _ in range(int(draw.integers(1, 9)))]
    for number, ends in enumerate(shapes):
        rate = min(d * row[-1] / (len(row) - 1) for d, row in ends.items())
        tables.learn(number, ends, rate)
        most = min(map(len, ends.values()))
        counts.append(int(draw.integers(1, most)) if most > 1 else 1)
        work += counts[-1] * rate
    found = tables.packing(range(len(shapes)), counts).search(work / ranks)
    if found is None:
        assert not set.intersection(*(set(ends) for ends in shapes))
        return
    groups, left = found.packed()
    assert sum(degree for degree, _, _ in groups) <= ranks
    assert not (repeat and any(left))
    placed = [0] * len(shapes)
    for degree, seconds, taken in groups:
        assert seconds == pytest.approx(sum(shapes[shape][degree][n] for shape, n in taken))
        assert repeat or len(taken) == 1
        for shape, n in taken:
            placed[shape] += n
    assert [n + rest for n, rest in zip(placed, left, strict=True)] == counts
    assert found.seconds == max(seconds for _, seconds, _ in groups)


def test_fallback_plans_are_complete_and_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).choice([3, 8, 20, 50, 300, 400], 400).tolist()
    costs = line_costs(lambda n: n + n * n / 900, 128, 0.1, 0.1, (1, 2, 3, 4))
    monkeypatch.setenv("GULLIVER_PACKER", "python")
    planner = DataCentricPlanner(costs, lengths, 4, Tokens(900))
    plans = list(planner)
    seen = sorted(index for plan in plans for _, batch in plan for index in batch.samples)
    assert seen == list(range(400))
    assert sum(plan.seconds for plan in plans) < 1.3 * sum(plan.bound for plan in plans)
    monkeypatch.delenv("GULLIVER_PACKER")
    if packer_problem() is None:
        other = DataCentricPlanner(costs, lengths, 4, Tokens(900))
        assert other.signature != planner.signature, "ranks with other packers are refused"


@needs_native
def test_the_extension_refuses_what_it_cannot_pack() -> None:
    built = importlib.import_module("gulliver.solve._packer")
    tables = NativeTables(4, True)
    for ends in ({1: [0.0]}, {1: [0.0, float("nan")]}, {1: [0.0, 2.0, 1.0]}, {0: [0.0, 1.0]}):
        with pytest.raises(ValueError, match="ends never fall, and degrees grow"):
            tables.learn(0, ends, 1.0)
    with pytest.raises(ValueError, match="shapes in a row"):
        tables.learn(1, {1: [0.0, 1.0]}, 1.0)
    with pytest.raises(ValueError, match="at least one rank"):
        built.Tables(0, True)
    tables.learn(0, {1: [0.0, 1.0]}, 1.0)
    for numbers, counts in (([0], [0]), ([0], []), ([0, 0], [1]), ([0], [2**60])):
        with pytest.raises(ValueError, match="count"):
            tables.packing(numbers, counts)
    with pytest.raises(IndexError):
        tables.packing([1], [1])


def test_the_packer_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_PACKER", "pyton")
    with pytest.raises(GulliverError, match="GULLIVER_PACKER='pyton' is unknown"):
        step_tables(2, True)
    monkeypatch.setenv("GULLIVER_PACKER", "python")
    assert packer_problem() == "GULLIVER_PACKER=python"
    assert isinstance(step_tables(2, True), FallbackTables)


def test_without_the_extension_steps_are_packed_by_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GULLIVER_PACKER", raising=False)
    monkeypatch.setattr(tables_module, "_not_built", lambda: "its extension is not built")
    assert isinstance(step_tables(2, True), FallbackTables)
    monkeypatch.setenv("GULLIVER_PACKER", "native")
    with pytest.raises(GulliverError, match=r"native is not possible: its extension is not built"):
        step_tables(2, True)
