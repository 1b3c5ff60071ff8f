"""``gulliver data dedup``: copies in a mess, however coded; pairs beside brute force."""

from __future__ import annotations

import csv
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from gulliver.cli.dispatch import main
from gulliver.errors import GulliverError
from gulliver.video.preparation import Table, scan, score
from gulliver.video.preparation import deduplication as _dedup
from gulliver.video.preparation.deduplication import Deduplicated, deduplicate
from tests.video.messy_clips import (
    H264,
    H264_POOR,
    LOSSLESS,
    Mess,
    footage,
    messy_clips,
    write_film,
)


@pytest.fixture(scope="module")
def mess() -> Mess:
    return messy_clips()


@pytest.fixture(scope="module")
def unique(mess: Mess, tmp_path_factory: pytest.TempPathFactory) -> Deduplicated:
    folder = tmp_path_factory.mktemp("dedup")
    found = scan(mess.folder, folder / "clips.parquet")
    return deduplicate(found.table, folder / "unique.parquet")


def test_copies_of_a_mess_are_found_and_nothing_else_is(mess: Mess, unique: Deduplicated) -> None:
    original = {clip.path: clip.original for clip in mess.whole}
    groups: dict[str, set[str]] = {}
    for path, first in original.items():
        groups.setdefault(first, set()).add(path)
    copies = sum(len(group) - 1 for group in groups.values())
    assert copies >= 5
    left_out = [(Path(pair.dropped).name, Path(pair.kept).name) for pair in unique.pairs]
    right = sum(original[dropped] == original[kept] for dropped, kept in left_out)
    assert right / len(left_out) >= 0.95, "precision"
    assert right / copies >= 0.95, "recall"
    stays = {Path(path).name for path in unique.table.column("path")}
    assert stays.isdisjoint(dropped for dropped, _ in left_out)
    assert stays.issuperset(kept for _, kept in left_out)


def test_each_pair_is_listed(unique: Deduplicated) -> None:
    with unique.listed.open(newline="") as file:
        listed = [(row["kept"], row["dropped"]) for row in csv.DictReader(file)]
    assert listed == [(pair.kept, pair.dropped) for pair in unique.pairs]
    assert unique.listed.name == "unique.duplicates.csv"


def test_the_best_copy_stays_and_copies_of_copies_are_one_group(tmp_path: Path) -> None:
    clip = footage("bikes")[30:60, :96, :160]
    small = clip[:, ::2, ::2]
    write_film(tmp_path / "a.mp4", small, Fraction(25), H264_POOR)
    write_film(tmp_path / "b.mp4", small, Fraction(25), H264)
    write_film(tmp_path / "c.mp4", clip[:-2], Fraction(25), H264)
    write_film(tmp_path / "d.mkv", clip, Fraction(25), LOSSLESS)
    # Every second frame, at half the rate: shown in the same way.
    write_film(tmp_path / "e.mp4", clip[::2], Fraction(25, 2), H264)
    write_film(tmp_path / "f.mp4", footage("bikes")[80:110, :96, :160], Fraction(25), H264)
    write_film(tmp_path / "g.mp4", clip[:, :, ::-1], Fraction(25), H264)
    found = scan(tmp_path, tmp_path / "clips.csv")
    unique = deduplicate(found.table, tmp_path / "unique.csv")
    assert unique.table.column("path") == ["d.mkv", "f.mp4", "g.mp4"]
    assert {(pair.kept, pair.dropped) for pair in unique.pairs} == {
        ("d.mkv", name) for name in ("a.mp4", "b.mp4", "c.mp4", "e.mp4")
    }


def test_plain_clips_are_copies_where_they_have_one_colour(tmp_path: Path) -> None:
    for name, level in (("a", 0), ("b", 0), ("c", 90), ("d", 200)):
        plain = np.full((6, 32, 32, 3), level, np.uint8)
        write_film(tmp_path / f"{name}.mp4", plain, Fraction(10), H264)
    found = scan(tmp_path, tmp_path / "clips.csv")
    unique = deduplicate(found.table, tmp_path / "unique.csv")
    assert [(pair.kept, pair.dropped) for pair in unique.pairs] == [("a.mp4", "b.mp4")]


def test_near_hashes_are_those_of_a_loop_over_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    bits = draw.random((60, 512)) < 0.5
    for row in range(30, 60):
        flips = draw.random(512) < draw.choice([0.05, 0.2, 0.249, 0.251, 0.3])
        bits[row] = bits[row - 30] ^ flips
    wanted = {
        (one, other)
        for one in range(60)
        for other in range(one + 1, 60)
        if (bits[one] != bits[other]).sum() <= 128
    }
    for tile in (7, 4096):
        monkeypatch.setattr(_dedup, "TILE", tile)
        found = list(_dedup.near_pairs(bits))
        assert len(found) == len(set(found))
        assert set(found) == wanted
    assert len(wanted) > 10


def test_a_clip_that_cannot_be_read_stays_and_is_listed(tmp_path: Path) -> None:
    write_film(tmp_path / "a.mp4", footage("bikes")[:6, :64, :64], Fraction(25), H264)
    rows = [{"path": name, "text": name} for name in ("a.mp4", "none.mp4", "a.mp4")]
    table = Table.of_rows(rows, tmp_path / "t.csv", ("path", "text"))
    unique = deduplicate(table, tmp_path / "u.csv")
    assert unique.table.column("path") == ["a.mp4", "none.mp4"]
    assert unique.broken == [("none.mp4", "does not exist")]


def test_the_command_names_copies_and_hashes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main(["data", "dedup", *map(str, arguments)])
        return ended.value.code

    for name, coding in (("a", H264), ("b", H264_POOR)):
        clip = footage("bikes")[:8, :64, :96]
        write_film(tmp_path / f"{name}.mp4", clip, Fraction(25), coding)
    table = scan(tmp_path, tmp_path / "clips.csv").table
    assert run(table.path, "--out", table.path) == 1
    assert "is the input table" in capsys.readouterr().err
    score(table, ("phash",))
    assert run(table.path, "--out", tmp_path / "unique.csv") == 0
    said = capsys.readouterr()
    assert "unique.csv: 1 clip\n" in said.out
    assert "b.mp4: copy of a.mp4" in said.out
    assert "hash" not in said.err, "hashes of the table are taken"
    assert run(table.path, "--out", tmp_path / "unique.csv", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["copies"] == [{"name": "b.mp4", "reason": "copy of a.mp4"}]
    Table.read(table.path).with_columns({"phash": ["x", "y"]}).write()
    assert run(table.path, "--out", tmp_path / "unique.csv") == 1
    assert "column phash of clips.csv does not hold hashes of 8 moments" in capsys.readouterr().err


def test_hashes_of_a_public_table_with_another_meaning_are_refused(tmp_path: Path) -> None:
    table = Table.of_rows([{"path": "a", "phash": 17}], tmp_path / "t.csv", ("path", "phash"))
    with pytest.raises(GulliverError, match="does not hold hashes"):
        deduplicate(table, tmp_path / "u.csv")
