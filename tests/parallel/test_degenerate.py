"""Solvers and traces on the smallest, empty and malformed inputs that they may be given."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from gulliver.errors import GulliverError
from gulliver.schedule import read_trace
from gulliver.solve.allocation import fluid_bound, fluid_bound_by_lp
from gulliver.solve.conversion import Sharding, convert_least
from gulliver.solve.partition import balanced_parts, geometric_sizes
from gulliver.solve.tables import place_tables


def test_geometric_sizes_end_from_any_start_and_with_any_factor() -> None:
    assert geometric_sizes(1, 9) == [1, 2, 4, 8]
    assert geometric_sizes(3, 3) == [3]
    assert geometric_sizes(0, 8) == [0, 1, 2, 4, 8]
    for start, end, factor in itertools.product(
        (-5, 0, 1, 7), (0, 1, 8, 100), (0.5, 1.0, 1.2, 3.0)
    ):
        sizes = geometric_sizes(start, end, factor)
        assert sizes[0] == start
        assert all(a < b <= end for a, b in itertools.pairwise(sizes))


def test_chains_and_deals_of_nothing() -> None:
    assert balanced_parts([], 2) == []
    for parts in (0, -1):
        with pytest.raises(GulliverError, match="parts"):
            balanced_parts([1], parts)
    for tables in ([], [[]]):
        with pytest.raises(GulliverError):
            place_tables(tables, 100)


def test_jobs_without_work_end_when_they_are_released() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        jobs, slots = int(draw.integers(1, 5)), 4
        rates = np.sort(draw.uniform(1, 5, (jobs, slots + 1)))
        rates[:, 0] = 0
        work, releases = draw.uniform(1, 9, jobs), draw.uniform(0, 3, jobs)
        alone = fluid_bound_by_lp(work, rates, releases, slots)
        more = np.concatenate([work, [0.0]]), np.concatenate([rates, rates[:1]])
        found = fluid_bound_by_lp(*more, [*releases, 2.5], slots)
        assert found == pytest.approx(max(alone + 2.5, fluid_bound(*more, [*releases, 2.5], slots)))
    assert fluid_bound_by_lp([0.0, 0.0], rates[[0, 0]], [1.0, 4.0], slots) == 5.0


def test_a_conversion_uses_each_axis_once() -> None:
    whole = Sharding(((), ()))
    bad = [
        Sharding(((0,), (0,))),
        Sharding(((0, 0), ())),
        Sharding(((0,), ()), (0,)),
        Sharding(((2,), ())),
        Sharding(((0,),)),
    ]
    for layout in bad:
        for ends in ((whole, layout), (layout, whole)):
            with pytest.raises(GulliverError):
                convert_least((4, 4), (2, 2), *ends, lambda move: 1.0)
    assert convert_least((4, 4), (2, 2), whole, Sharding(((0,), (1,))), lambda move: 1.0)


HEADER = "name,arrival,samples,batch,slots,sample_seconds"
JOB = {"name": "a", "arrival": 0, "samples": 10, "batch": 2, "slots": 1, "sample_seconds": 0.1}


def test_traces_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    for name, text in (("t.csv", f"{HEADER}\na,0,10,2,1,0.1\n"), ("t.json", json.dumps([JOB]))):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        (tmp_path / f"plain-{name}").write_text(text, encoding="utf-8")
        assert read_trace(tmp_path / name) == read_trace(tmp_path / f"plain-{name}")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("t.csv", f"{HEADER},batch\na,0,10,2,1,0.1,4\n", "batch"),
        ("t.csv", f'{HEADER}\n"a,0,10,2,1,0.1\n', "cannot be read"),
        ("t.csv", f"{HEADER}\na,0,10,true,1,0.1\n", "batch"),
        ("t.csv", f"{HEADER}\na,0,10,2,1,0.1,9\n", "header"),
        ("t.json", json.dumps([{**JOB, "batch": True}]), "batch"),
        ("t.json", json.dumps([{**JOB, "slots": [1]}]), "slots"),
    ],
)
def test_malformed_traces_are_refused_by_name(
    name: str, text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(GulliverError, match=named):
        read_trace(tmp_path / name)
