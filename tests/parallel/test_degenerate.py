"""Solvers and traces on the smallest, empty and malformed inputs that they may be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gulliver.errors import GulliverError
from gulliver.schedule import read_trace

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
        ("t.csv", f"{HEADER}\na,0,10,true,1,0.1\n", "batch"),
        ("t.json", json.dumps([{**JOB, "batch": True}]), "batch"),
    ],
)
def test_malformed_traces_are_refused_by_name(
    name: str, text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(GulliverError, match=named):
        read_trace(tmp_path / name)
