"""``gulliver data scan``: every file of a folder is in the table with its facts, or listed."""

from __future__ import annotations

import csv
import json
import os
import struct
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tests.programs import run_program, text

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from gulliver.cli.dispatch import main
from gulliver.data import Bucket
from gulliver.data.clips import Clip
from gulliver.data.table import ClipTable
from gulliver.video.preparation import scan, scanning
from gulliver.video.preparation.scanning import ScanResult, read_facts
from gulliver.video.preparation.table import read_broken
from tests.video.messy_clips import CODINGS, H264, LOSSLESS, Mess, messy_clips, write_film


@pytest.fixture(scope="module")
def mess() -> Mess:
    return messy_clips()


@pytest.fixture(scope="module")
def scanned(mess: Mess, tmp_path_factory: pytest.TempPathFactory) -> ScanResult:
    return scan(mess.folder, tmp_path_factory.mktemp("scan") / "clips.parquet")


def facts(scanned: ScanResult) -> dict[str, dict[str, object]]:
    return {os.path.basename(row["path"]): row for row in scanned.table.data.to_pylist()}


def test_scan_metadata_matches_generated_files(mess: Mess, scanned: ScanResult) -> None:
    found = facts(scanned)
    for clip in mess.whole:
        row = found[clip.path]
        assert row["num_frames"] == clip.frames, clip
        assert (row["height"], row["width"]) == (clip.height, clip.width), clip
        assert row["aspect_ratio"] == clip.height / clip.width
        assert row["resolution"] == clip.height * clip.width
        assert row["variable_fps"] == (clip.kind == "variable"), clip
        assert row["audio"] == (clip.kind == "silent")
        assert row["note"] is None
        if clip.frames > 1:
            seconds = clip.times[-1] - clip.times[0]
            assert row["fps"] == pytest.approx(clip.frames / seconds, rel=0.05), clip
            assert row["duration"] == pytest.approx(seconds, rel=0.1), clip
        else:
            assert row["fps"] == 120, "a still is marked as the public tables mark it"
    assert {clip.kind for clip in mess.whole} >= {"rotated", "variable", "tiny", "lying", "odd"}


def test_every_file_is_listed(mess: Mess, scanned: ScanResult) -> None:
    used, broken = set(facts(scanned)), {os.path.basename(name) for name, _ in scanned.broken}
    assert not used & broken
    files = {path.name for path in mess.folder.iterdir()}
    assert used | broken == files - {"table.csv"}
    assert scanned.ignored == {".csv": 1}
    for clip in mess.of_kind("broken"):
        # One that is cut short has frames at its beginning, and a note that it breaks off.
        told = {os.path.basename(name): reason for name, reason in scanned.broken}.get(clip.path)
        assert told or "is truncated after" in str(facts(scanned)[clip.path]["note"]), clip
    listed = [(name, reason) for name, step, reason in read_broken(scanned.table.path)]
    assert listed == scanned.broken


def test_the_table_trains(scanned: ScanResult) -> None:
    table = ClipTable(scanned.table.path, (Bucket(9, 32, 32), Bucket(1, 16, 16)))
    assert len(table) + len(table.skipped) == len(scanned.table)
    assert len(table) > 0.8 * len(scanned.table)
    for index in range(0, len(table), 5):
        assert isinstance(table[index], Clip)


def moving(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A wave that moves: uint8 [T, H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    levels = [128 + 100 * np.sin((x + 3 * n) / 7 + y / 11) for n in range(frames)]
    return np.stack(levels)[..., None].repeat(3, -1).astype(np.uint8)


def test_an_avi_that_states_ten_times_its_frames_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "lie.avi"
    write_film(path, moving(20), Fraction(25), CODINGS["mjpeg"])
    content = bytearray(path.read_bytes())
    for name, offset in ((b"avih", 24), (b"strh", 40)):
        at = content.find(name) + offset
        assert struct.unpack_from("<I", content, at) == (20,)
        struct.pack_into("<I", content, at, 200)
    path.write_bytes(content)
    found = read_facts(path)
    assert found["num_frames"] == 20
    assert found["fps"] == pytest.approx(25)
    assert "should have 200 frames, but has 20" in found["note"]


def test_damage_in_the_middle_is_found_by_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_film(path, moving(60, 96, 128), Fraction(25), H264)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3] + b"\xff" * 400 + whole[len(whole) // 3 + 400 :])
    assert read_facts(path)["num_frames"] == 60
    found = read_facts(path, decode=True)
    assert found["num_frames"] <= 60
    assert found["num_frames"] == 60 or found["note"]


def test_a_picture_is_a_clip_of_one_frame(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    Image.fromarray(moving(1)[0]).save(tmp_path / "still.png")
    found = read_facts(tmp_path / "still.png")
    assert (found["num_frames"], found["fps"], found["duration"]) == (1, 120, 0)
    assert (found["height"], found["width"]) == (48, 64)


def test_a_second_scan_keeps_what_is_known_and_looks_at_what_has_changed(tmp_path: Path) -> None:
    for name in ("one_two", "b", "c"):
        write_film(tmp_path / f"{name}.mkv", moving(6), Fraction(10), LOSSLESS)
    (tmp_path / "b.txt").write_text("a wave\n that moves\n")
    out = tmp_path / "clips.csv"
    scanned = scan(tmp_path, out)
    assert not scanned.ignored, "a caption beside its clip is no other file"
    first = scanned.table
    assert first.column("text") == ["a wave that moves", "c", "one two"]
    first.with_columns({"text": ["x", "y", "z"], "mine": [1, 2, 3]}).write()
    write_film(tmp_path / "c.mkv", moving(9), Fraction(10), LOSSLESS)
    (tmp_path / "one_two.mkv").unlink()
    write_film(tmp_path / "d.mkv", moving(4), Fraction(10), LOSSLESS)
    found = scan(tmp_path, out).table
    assert found.column("path") == ["b.mkv", "c.mkv", "d.mkv"]
    assert found.column("text") == ["x", "c", "d"]
    assert found.column("mine") == [1, None, None]
    assert found.column("num_frames") == [6, 9, 4]
    assert scan(tmp_path, out, again=True).table.column("text")[0] == "a wave that moves"


KILLED = """
import os, signal, sys
from pathlib import Path
from gulliver.video.preparation import scanning as _scan

folder, out = map(Path, sys.argv[1:3])
facts, replace = _scan.read_facts, os.replace

def die():
    os.kill(os.getpid(), signal.SIGKILL)

for files in map(int, sys.argv[3:]):
    child = os.fork()
    if not child:
        left = [files]
        def counted(path, decode=False):
            if not left[0]:
                die()
            left[0] -= 1
            return facts(path, decode)
        _scan.read_facts = counted
        os.replace = lambda *args: die()
        _scan.scan(folder, out, workers=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    assert not out.exists()
"""


def test_a_scan_that_is_killed_again_and_again_ends_with_the_same_table(
    mess: Mess, scanned: ScanResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "clips.parquet"
    # Twice after a few files, then when the table is to be given its name.
    ended = run_program(text, KILLED, str(mess.folder), str(out), "3", "9", "999", timeout=120)
    assert ended.returncode == 0, ended.stderr
    (journal,) = tmp_path.glob(".clips.parquet.scan.jsonl")
    torn = journal.read_text()
    journal.write_text(torn[:-20])
    looked: list[Path] = []

    def counted(path: Path, decode: bool = False) -> dict[str, object]:
        looked.append(path)
        return read_facts(path, decode)

    monkeypatch.setattr(scanning, "read_facts", counted)
    found = scan(mess.folder, out)
    assert len(looked) == 1, "all but the torn line is taken from the journal"
    ours = [{**row, "path": Path(row["path"]).name} for row in found.table.data.to_pylist()]
    theirs = [{**row, "path": Path(row["path"]).name} for row in scanned.table.data.to_pylist()]
    assert ours == theirs
    assert Counter(r for _, r in found.broken) == Counter(r for _, r in scanned.broken)
    assert not list(tmp_path.glob(".*")), "neither journal nor half a table is left"


def test_scan_command_reports_found_and_missing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main(["data", "scan", *map(str, arguments)])
        return ended.value.code

    folder = tmp_path / "clips"
    folder.mkdir()
    assert run(folder) == 1
    assert "has no clips or pictures" in capsys.readouterr().err
    assert run(tmp_path / "none") == 1
    assert "is not a folder" in capsys.readouterr().err
    write_film(folder / "a.mp4", moving(20), Fraction(10))
    (folder / "b.mp4").write_bytes(b"")
    (folder / "notes.md").write_text("x")
    assert run(folder) == 0
    said = capsys.readouterr().out
    assert f"{folder}/clips.parquet: 1 clip, 0.0 minutes" in said
    assert f"1 file that scan cannot use, listed in {folder}/clips.broken.csv" in said
    assert "b.mp4: is empty" in said
    assert "1 other file ignored: 1 .md" in said
    assert run(folder, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["clips"], values["ignored"]) == (1, {".md": 1})
    assert values["broken"] == [{"name": "b.mp4", "reason": "is empty"}]
    with (folder / "clips.broken.csv").open(newline="") as file:
        assert [*csv.DictReader(file)] == [{"path": "b.mp4", "step": "scan", "reason": "is empty"}]
    (folder / "b.mp4").unlink()
    assert run(folder) == 0
    assert not (folder / "clips.broken.csv").exists()
