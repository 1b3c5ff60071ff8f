"""Tables of clips and conditions over them: what is kept, what is refused, and in which words."""

from __future__ import annotations

import csv
import json
import os
import random
from pathlib import Path

import pytest

from gulliver.cli.dispatch import main
from gulliver.errors import GulliverError
from gulliver.video.preparation import Table, filter_table

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

OPEN_SORA = (
    "path,text,num_frames,height,width,aspect_ratio,resolution,fps,aes,flow,match,cmotion,id,extra\n"
    'a.mp4,"a cat, running",51,240,426,0.5633,102240,30000/1001,5.5,,22.1,pan left,007,x\n'
    "b.mp4,,102,480,854,0.562,409920,24.0,nan,1.5,,,012,\n"
)
"""A table as the public tools write it, with columns of somebody else's."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "meta.csv"
    path.write_text(OPEN_SORA)
    return path


def test_a_public_table_loads_and_keeps_all_columns_in_both_formats(table: Path) -> None:
    read = Table.read(table)
    assert read.names == OPEN_SORA.split("\n")[0].split(",")
    assert read.column("fps") == [30000 / 1001, 24.0]
    assert read.column("num_frames") == [51, 102]
    assert read.column("aes") == [5.5, None], "NaN is no number that a condition may compare"
    assert read.column("text") == ["a cat, running", None]
    assert read.column("id") == ["007", "012"], "leading zeros stay"
    parquet = read.write(table.with_suffix(".parquet"))
    assert Table.read(parquet.path).data.to_pylist() == read.data.to_pylist()
    again = Table.read(parquet.path).write(table.with_name("again.csv"))
    assert Table.read(again.path).data.to_pylist() == read.data.to_pylist()


def test_relative_paths_lead_to_the_same_clips_from_another_folder(
    table: Path, tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    moved = Table.read(table).write(tmp_path / "deep" / "t.parquet")
    assert moved.column("path") == ["../a.mp4", "../b.mp4"]
    found = [os.path.normpath(path) for _, path in moved.clips()]
    assert found == [str(tmp_path / "a.mp4"), str(tmp_path / "b.mp4")]


def test_a_caption_of_several_lines_is_one_line_of_csv(tmp_path: Path) -> None:
    table = Table.of_rows(
        [{"path": "a", "text": 'one\n two, "x"'}], tmp_path / "t.csv", ("path", "text")
    )
    table.write()
    assert Table.read(tmp_path / "t.csv").column("text") == ['one two, "x"']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "table t.csv is empty"),
        ("file,text\na,b\n", "table t.csv has no column 'path': choose from 'file', 'text'"),
        ("paht,text\na,b\n", "has no column 'path': did you mean 'paht'"),
        ("path,path\na,b\n", "has two columns 'path'"),
        ("path,fps\na,1\nb,fast\n", "row 2: fps is 'fast', which is not a number"),
        ("path,text\na,b,c\n", "Expected 2 columns, got 3"),
        ('path,text\na,"b\nc,d\n', "t.csv"),
        ('path,text\na,"b\nc"\n', "row 1: text spans several lines"),
    ],
)
def test_a_table_that_is_ambiguous_is_refused_in_one_line(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(GulliverError) as caught:
        Table.read(tmp_path / "t.csv")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- filter --------------------------------------------------------------------------------------


CONDITIONS = {
    "fps >= 12 and motion > 2": lambda r: (
        _all(r["fps"], r["motion"]) and r["fps"] >= 12 < 99 and r["motion"] > 2
    ),
    "num_frames = 7 or fps < 5": lambda r: (
        r["num_frames"] == 7 or (r["fps"] is not None and r["fps"] < 5)
    ),
    "motion is null": lambda r: r["motion"] is None,
    "text like '%3%' -- a remark": lambda r: "3" in r["text"],
    "FPS between 10 and 20": lambda r: r["fps"] is not None and 10 <= r["fps"] <= 20,
    "length(text) > 6 and num_frames in (1, 2)": lambda r: (
        len(r["text"]) > 6 and r["num_frames"] in (1, 2)
    ),
    "case when fps > 15 then motion > 3 else false end": lambda r: bool(
        _all(r["fps"], r["motion"]) and r["fps"] > 15 and r["motion"] > 3
    ),
}


def _all(*values: float | None) -> bool:
    return all(value is not None for value in values)


def _rows(count: int) -> list[dict[str, object]]:
    chance = random.Random(0)

    def maybe(value: float) -> float | None:
        return None if chance.random() < 0.1 else value

    return [
        {
            "path": f"clips/{row}.mp4",
            "text": f"clip {row}",
            "num_frames": chance.randrange(30),
            "fps": maybe(round(chance.uniform(1, 30), 2)),
            "motion": maybe(round(chance.uniform(0, 5), 2)),
        }
        for row in range(count)
    ]


def test_a_condition_keeps_the_rows_that_a_loop_in_python_keeps(tmp_path: Path) -> None:
    rows = _rows(500)
    table = Table.of_rows(rows, tmp_path / "t.parquet", tuple(rows[0]))
    for condition, holds in CONDITIONS.items():
        found = filter_table(table, condition)
        wanted = [row["path"] for row in rows if holds(row)]
        assert found.table.column("path") == wanted, condition
        assert len(found.table) + found.dropped + found.unknown == len(rows)
    found = filter_table(table, "motion > 2")
    assert found.unknown == sum(row["motion"] is None for row in rows)


def test_the_command_filters_and_never_over_its_own_table(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main(["data", "filter", *map(str, arguments)])
        return ended.value.code

    out = table.with_name("out.csv")
    assert run(table, "aes > 5", "--out", out) == 0
    assert "1 row; 0 dropped, 1 unknown (a cell is empty)" in capsys.readouterr().out
    assert run(table, "aes > 5", "--out", out, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values == {"schema": 1, "out": str(out), "rows": 1, "dropped": 0, "unknown": 1}
    with out.open(newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == ["a.mp4"]
    assert run(table, "aes > 5", "--out", table) == 1
    assert "is the input table" in capsys.readouterr().err
    assert table.read_text() == OPEN_SORA
