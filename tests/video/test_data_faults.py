"""What steps of ``gulliver data`` must not lose or invent: in tables, in files, and in latents."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")
pytest.importorskip("scenedetect")

from gulliver.data.clips import upright_frames
from gulliver.errors import GulliverError
from gulliver.video.config import CutSettings
from gulliver.video.kept_latents import FORMAT, ClipWindow, LatentCache, Settings
from gulliver.video.preparation import (
    Table,
    cut,
    cutting,
    filter_table,
    scan,
    score,
    work,
)
from gulliver.video.preparation.captions import caption
from gulliver.video.preparation.filtering import filter_file
from gulliver.video.preparation.scanning import read_facts
from gulliver.video.preparation.work import held_table
from tests.video.messy_clips import LOSSLESS, Coding, write_film

H264_TS = Coding(".ts", "libx264", "yuv420p", {"bf": "0", "preset": "ultrafast"})


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `cut` work in this process: others take seconds to start."""
    monkeypatch.setattr(cutting, "in_processes", work._in_threads)


def moving(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A wave that moves: uint8 [T, H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    levels = [128 + 100 * np.sin((x + 3 * n) / 7 + y / 11) for n in range(frames)]
    return np.stack(levels)[..., None].repeat(3, -1).astype(np.uint8)


# --- tables --------------------------------------------------------------------------------------

OTHERS = (
    "path,fps,id,u64,sha,ver,word,flag,plus,money,count,share\n"
    "a.mp4,10,12345678901234567890123,18446744073709551615,12e4567,1.10,nan,TRUE,+5,1.5,1,1.0\n"
    "b.mp4,20,12345678901234567890124,18446744073709551614,1e5,1.20,inf,FALSE,+6,2.5,2,0.25\n"
)
"""Columns of somebody else's, which look like numbers and like none."""


def test_unknown_columns_round_trip(tmp_path: Path) -> None:
    path, out = tmp_path / "t.csv", tmp_path / "out.csv"
    path.write_text(OTHERS)
    filter_file(path, "true", out)
    rows = [line.replace('"', "") for line in out.read_text().splitlines()]
    assert rows == OTHERS.splitlines()


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("count > 1", ["b.mp4"]),
        ("money < 2", ["a.mp4"]),
        ("share < 0.5", ["b.mp4"]),
        ("id = '12345678901234567890123'", ["a.mp4"]),
        ("ver = '1.1'", []),
        ("cast(ver as decimal(9, 2)) = 1.1", ["a.mp4"]),
    ],
)
def test_text_is_compared_as_number_only_if_canonical(
    tmp_path: Path, condition: str, kept: list[str]
) -> None:
    (tmp_path / "t.csv").write_text(OTHERS)
    table = Table.read(tmp_path / "t.csv")
    assert filter_table(table, condition).table.column("path") == kept


def test_text_that_is_compared_with_a_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(OTHERS)
    with pytest.raises(GulliverError, match=r"ver is text; use cast\(ver as double\)"):
        filter_table(Table.read(tmp_path / "t.csv"), "ver > 1.1")


@pytest.mark.parametrize(
    "condition",
    [
        "aes / flow > 2",
        "not (aes / flow <= 2)",
        "aes / flow + 1 between 2 and 9",
        "case when aes / flow > 2 then true else aes / flow > 2 end",
        "aes // flow > 2 and aes % flow < 1",
    ],
)
def test_nan_is_unknown(tmp_path: Path, condition: str) -> None:
    rows = [{"path": "a", "aes": 0.0, "flow": 0.0}, {"path": "b", "aes": 10.0, "flow": 2.0}]
    table = Table.of_rows(rows, tmp_path / "t.csv", ("path", "aes", "flow"))
    found = filter_table(table, condition)
    assert found.table.column("path") == ["b"], condition
    assert (found.dropped, found.unknown) == (0, 1)


# --- one step at a time --------------------------------------------------------------------------


def test_a_table_that_another_step_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,text\na.mp4,\n")
    table = Table.read(tmp_path / "t.csv")
    other = rf"caption \(process {os.getpid()}\) on .*t\.csv"
    with held_table(table.path, "caption"):
        for step in (
            lambda: score(table, ("motion",)),
            lambda: caption(table, command="true"),
            lambda: filter_file(tmp_path / "u.csv", "true", table.path),
        ):
            with pytest.raises(GulliverError, match=other):
                step()
    assert not list(tmp_path.glob(".*.lock"))


def test_a_table_that_changes_under_a_step_stays_and_its_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path,text\na.mp4,\n")
    (tmp_path / "a.mp4").touch()
    say = tmp_path / "say.sh"
    say.write_text('echo x >> calls; printf "path,text,mine\\na.mp4,,1\\n" > t.csv; echo a cat\n')
    command = f"sh -c 'cd {tmp_path}; . ./say.sh'"
    with pytest.raises(GulliverError, match="since it was read"):
        caption(Table.read(tmp_path / "t.csv"), command=command)
    assert "mine" in (tmp_path / "t.csv").read_text()
    found = caption(Table.read(tmp_path / "t.csv"), command=command).table
    assert found.data.to_pylist() == [{"path": "a.mp4", "text": "a cat", "mine": 1}]
    assert (tmp_path / "calls").read_text() == "x\n", "the journal knows it"


# --- files ---------------------------------------------------------------------------------------


def test_captions_that_are_not_utf8_are_listed_and_never_guessed(tmp_path: Path) -> None:
    for name in "ab":
        write_film(tmp_path / f"{name}.mkv", moving(3), Fraction(10), LOSSLESS)
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("café".encode())
    found = scan(tmp_path, tmp_path / "t.csv")
    assert found.table.column("text") == ["café"]
    ((name, reason),) = found.broken
    assert name == "a.mkv"
    assert reason == "caption a.txt is not UTF-8 (byte 4); save it as UTF-8"


def test_a_matroska_file_that_breaks_off_is_noticed_by_scan_cut_and_score(
    tmp_path: Path, threads: None
) -> None:
    whole, broken = tmp_path / "a.mkv", tmp_path / "b.mkv"
    write_film(whole, moving(50), Fraction(25), LOSSLESS)
    broken.write_bytes(whole.read_bytes()[: whole.stat().st_size * 88 // 100])
    assert read_facts(whole)["note"] is None
    assert "is truncated" in read_facts(broken)["note"]
    table = scan(tmp_path, tmp_path / "t.csv").table
    report = cut(table, tmp_path / "cut.csv", CutSettings(detector="none"), workers=1)
    assert {one.path: "is truncated" in one.reason for one in report.left_out} == {"b.mkv": True}
    scored = score(table, ("brightness",))
    assert [name for name, _ in scored.broken] == ["b.mkv"]
    assert "only a part was scored" in scored.broken[0][1]


def test_decoding_that_ends_early_without_an_error_is_listed_by_cut_and_score(
    tmp_path: Path, threads: None
) -> None:
    import av

    path = tmp_path / "a.mkv"
    write_film(path, moving(50), Fraction(25), Coding(".mkv", "mpeg2video", options={"b": "3M"}))
    content = path.read_bytes()
    with av.open(str(path)) as file:
        late = [bytes(packet) for packet in file.demux(video=0)][30:]
    for packet in late:
        content = content.replace(packet, bytes(len(packet)))
    path.write_bytes(content)
    assert len([*upright_frames(path)]) in range(29, 32), "the decoder says nothing"
    table = Table.of_rows([{"path": "a.mkv"}], tmp_path / "t.csv", ["path"]).write()
    report = cut(table, tmp_path / "cut.csv", CutSettings(), workers=1)
    assert ["ends early" in one.reason for one in report.left_out] == [True]
    scored = score(table, ("brightness",))
    assert "only a part was scored: ends early" in scored.broken[0][1]
    assert "50 frames, " in read_facts(path, decode=True)["note"]


def test_joined_streams_have_the_rate_of_their_parts(tmp_path: Path) -> None:
    for name, size in (("a", (48, 64)), ("b", (64, 96))):
        write_film(tmp_path / f"{name}.ts", moving(40, *size), Fraction(25), H264_TS)
    a, b = ((tmp_path / f"{name}.ts").read_bytes() for name in "ab")
    (tmp_path / "joined.ts").write_bytes(a + a)
    (tmp_path / "sizes.ts").write_bytes(a + b)
    assert read_facts(tmp_path / "a.ts")["note"] is None
    found = read_facts(tmp_path / "joined.ts")
    assert found["fps"] == pytest.approx(25)
    assert (found["num_frames"], found["duration"]) == (80, pytest.approx(3.2))
    assert found["note"] == "its times restart 1x, as in joined files"
    assert "changes its size to 96x64 at frame 40" in read_facts(tmp_path / "sizes.ts")["note"]


def test_folders_behind_links_are_looked_into_once_and_odd_names_are_listed(tmp_path: Path) -> None:
    top, far = tmp_path / "top", tmp_path / "far"
    (top / "odd\nfolder").mkdir(parents=True)
    far.mkdir()
    write_film(far / "a.mkv", moving(3), Fraction(10), LOSSLESS)
    shutil.copy(far / "a.mkv", top / "odd\nfolder" / "b.mkv")
    os.mkfifo(top / "pipe.mp4")
    for at, to in ((top / "linked", far), (top / "twice", far), (far / "loop", top)):
        at.symlink_to(to)
    found = scan(top, top / "t.csv")
    assert found.table.column("path") == ["linked/a.mkv"]
    assert found.ignored == {"link to a folder that was already scanned": 2}
    assert dict(found.broken) == {
        "pipe.mp4": "is not a regular file",
        r"'odd\nfolder/b.mkv'": "has a name that tables cannot hold; rename it",
    }


# --- latents -------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_shard_is_refused(tmp_path: Path) -> None:
    import zlib
    from dataclasses import asdict

    import torch
    from safetensors.torch import save_file

    latents = torch.arange(16.0).view(2, 2, 1, 2, 2)
    (tmp_path / "shards").mkdir()
    path = tmp_path / "shards" / "s.safetensors"
    save_file({"latents": latents}, path)
    shard = {
        "file": "s.safetensors",
        "bucket": "1x16x16",
        "shape": list(latents.shape),
        "members": [["one", 0], ["two", 0]],
        "sums": [zlib.crc32(row.numpy().tobytes()) for row in latents],
    }
    content = {"settings": asdict(Settings("vae", format=FORMAT)), "shards": [shard], "broken": []}

    def opened() -> LatentCache:
        (tmp_path / "index.json").write_text(json.dumps(content))
        return LatentCache(tmp_path)

    one, two = (ClipWindow(clip, "1x16x16", 0) for clip in ("one", "two"))
    assert torch.equal(opened().read(two), latents[1])
    flipped = bytearray(path.read_bytes())
    flipped[-3] ^= 1
    path.write_bytes(flipped)
    assert torch.equal(opened().read(one), latents[0])
    with pytest.raises(GulliverError, match=r"s\.safetensors is damaged"):
        opened().read(two)
