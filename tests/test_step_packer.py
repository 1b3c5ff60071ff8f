"""The native packer of steps against the one in Python: the same answers to the bit."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gulliver.data import DataCentricPlanner, Tokens
from gulliver.errors import GulliverError
from gulliver.hardware import FunctionCosts
from gulliver.solve import _step_tables as tables_module
from gulliver.solve._step_search import PythonTables
from gulliver.solve._step_tables import NativeTables, packer_problem, step_tables

needs_native = pytest.mark.skipif(
    packer_problem() is not None, reason=f"no native packer: {packer_problem()}"
)
TABLES_EACH = 25


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


def both(draw: np.random.Generator) -> tuple[Any, Any, float]:
    """The same random samples in either packer, and seconds near which they fill the ranks."""
    ranks, repeat = int(draw.integers(1, 20)), bool(draw.random() < 0.8)
    python, native = PythonTables(ranks, repeat), NativeTables(ranks, repeat)
    numbers, counts, work = [], [], 0.0
    for number in range(int(draw.choice([1, 2, 4, 8, 30]))):
        ends = random_ends(draw, ranks)
        most = min(map(len, ends.values()))
        rate = min(d * row[-1] / (len(row) - 1) for d, row in ends.items())
        for tables in (python, native):
            tables.learn(number, ends, rate)
        if draw.random() < 0.9 or not numbers:
            numbers.append(number)
            counts.append(int(draw.integers(1, most)) if most > 1 else 1)
            work += counts[-1] * rate
    order = draw.permutation(len(numbers)).tolist()
    numbers, counts = [numbers[n] for n in order], [counts[n] for n in order]
    return python.packing(numbers, counts), native.packing(numbers, counts), work / ranks


def compare_packings(draw: np.random.Generator) -> None:
    """Compares the calls of both packers, floats and all, on one random table."""
    python, native, bound = both(draw)
    found, other = python.search(bound), native.search(bound)
    assert (found is None) == (other is None)
    if found is not None:
        assert (found.seconds, found.packed()) == (other.seconds, other.packed())
    size = len(python.counts)
    degrees: tuple[list[int], list[int]] = [0] * size, [0] * size
    for limit in (*sorted(bound * draw.uniform(0.5, 3, 3), reverse=True), float("inf")):
        if draw.random() < 0.5:
            degrees = [0] * size, [0] * size
        lost = float(draw.choice([0.0, 0.5, 2.0])) if limit < float("inf") else 0.0
        most = [None, 1, 2, 4][int(draw.integers(4))]
        options = lost, bool(draw.random() < 0.4), most
        packed, told = (
            packing.pack(float(limit), own, *options)
            for packing, own in zip((python, native), degrees, strict=True)
        )
        assert packed == told
        assert degrees[0] == degrees[1]
    busy = [(int(d), float(s)) for d, s in zip((1, 1, 2), draw.uniform(0, bound, 3), strict=True)]
    for until in (bound, 2 * bound):
        assert python.follow(busy, float(until)) == native.follow(busy, float(until))


@needs_native
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_both_packers_give_the_same_groups_to_the_bit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(TABLES_EACH):
        compare_packings(draw)


@needs_native
@pytest.mark.parametrize("arrange", [None, 4])
def test_plans_do_not_hang_on_which_packer_is_there(
    arrange: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).choice([3, 8, 20, 50, 300, 400], 400).tolist()
    costs = FunctionCosts(lambda n: n + n * n / 900, lambda n: n, 128, 0.1, 0.1, (1, 2, 3, 4))
    plans = {}
    for packer in ("python", "native"):
        monkeypatch.setenv("GULLIVER_PACKER", packer)
        plans[packer] = list(DataCentricPlanner(costs, lengths, 4, Tokens(900), arrange=arrange))
    assert plans["python"] == plans["native"]


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
    packing = tables.packing([0], [1])
    for degrees in ([], [2], [-1]):
        with pytest.raises(ValueError, match="a degree"):
            packing.pack(1.0, degrees)


def test_the_packer_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GULLIVER_PACKER", "pyton")
    with pytest.raises(GulliverError, match="GULLIVER_PACKER='pyton' is unknown"):
        step_tables(2, True)
    monkeypatch.setenv("GULLIVER_PACKER", "python")
    assert packer_problem() == "GULLIVER_PACKER=python"
    assert isinstance(step_tables(2, True), PythonTables)


def test_without_the_extension_steps_are_packed_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GULLIVER_PACKER", raising=False)
    monkeypatch.setattr(tables_module, "_not_built", lambda: "its extension is not built")
    assert isinstance(step_tables(2, True), PythonTables)
    monkeypatch.setenv("GULLIVER_PACKER", "native")
    with pytest.raises(GulliverError, match=r"native cannot be met: its extension is not built"):
        step_tables(2, True)
