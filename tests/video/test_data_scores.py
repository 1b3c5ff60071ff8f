"""``gulliver data score``: numbers of clips beside numpy, scipy and OpenCV by hand; plug-ins."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")

from gulliver.cli.dispatch import main
from gulliver.video.preparation import Samples, Table, score
from gulliver.video.preparation.packets import take_samples
from gulliver.video.preparation.scoring import IN_THE_BOX, text_boxes
from gulliver.video.preparation.table import read_broken
from tests.video.messy_clips import CODINGS, LOSSLESS, footage, write_film

EXACT = LOSSLESS.__class__(".mkv", "ffv1", "bgr0")
"""A coding that keeps every level."""


def ramp(frames: int) -> np.ndarray:
    """Pictures of which number n has the level n: uint8 [T, H, W, 3]."""
    return (
        np.arange(frames, dtype=np.uint8)[:, None, None, None]
        .repeat(16, 1)
        .repeat(16, 2)
        .repeat(3, 3)
    )


def shown(times: list[float], count: int) -> list[int]:
    """By brute force, the frames shown at the middles of as many equal parts; times and the end."""
    begin, end = times[0], times[-1]
    moments = [begin + (n + 0.5) / count * (end - begin) for n in range(count)]
    return [max(i for i, time in enumerate(times[:-1]) if time <= at + 1e-9) for at in moments]


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 8, 40])
def test_moments_are_spread_over_a_clip(tmp_path: Path, frames: int) -> None:
    write_film(tmp_path / "a.mkv", ramp(frames), Fraction(25), EXACT)
    samples = take_samples(tmp_path / "a.mkv")
    wanted = shown([n / 25 for n in range(frames + 1)], 8)
    assert samples.pictures[:, 0, 0, 0].tolist() == wanted
    # The next frame; of the last one the one before.
    beside = [min(n + 1, frames - 1) if n < frames - 1 else max(0, frames - 2) for n in wanted]
    assert samples.neighbours[:, 0, 0, 0].tolist() == beside


def test_moments_of_a_variable_rate_are_moments_and_not_frames(tmp_path: Path) -> None:
    times = [0, 40, 80, 120, 600, 640, 2000, 2040]
    write_film(tmp_path / "a.mkv", ramp(8), Fraction(25), EXACT, times=times)
    wanted = shown([*(t / 1000 for t in times), 2.08], 8)
    assert take_samples(tmp_path / "a.mkv").pictures[:, 0, 0, 0].tolist() == wanted
    assert wanted[-1] == 5, "which frame 5 holds for most of the time"


def test_a_file_without_times_is_sampled_by_frames(tmp_path: Path) -> None:
    write_film(tmp_path / "a.avi", ramp(24) * 8, Fraction(25), CODINGS["mpeg4"])
    levels = take_samples(tmp_path / "a.avi").pictures.mean((1, 2, 3)) / 8
    assert levels == pytest.approx(shown([float(n) for n in range(25)], 8), abs=1)


@pytest.fixture(scope="module")
def street() -> np.ndarray:
    """Real footage: uint8 [T, H, W, 3]."""
    return np.ascontiguousarray(footage("bikes")[30:62, :96, :160])


def test_scores_are_those_of_numpy_opencv_and_scipy(tmp_path: Path, street: np.ndarray) -> None:
    cv2 = pytest.importorskip("cv2")
    fft = pytest.importorskip("scipy.fft")
    write_film(tmp_path / "a.mkv", street, Fraction(8), EXACT)
    Table.of_rows([{"path": "a.mkv", "text": "x"}], tmp_path / "t.csv", ("path", "text")).write()
    (row,) = score(Table.read(tmp_path / "t.csv")).table.data.to_pylist()
    grey = street.astype(np.float64) @ (0.299, 0.587, 0.114)
    # 32 frames in 8 parts: the middle of each is frame 2, 6, ...
    taken, after = grey[2::4], grey[3::4]
    assert row["brightness"] == pytest.approx(taken.mean(), rel=1e-4)
    assert row["motion"] == pytest.approx(np.abs(after - taken).mean(), rel=1e-4)
    edges = [cv2.Laplacian(one, cv2.CV_64F)[1:-1, 1:-1].var() for one in taken]
    assert row["sharpness"] == pytest.approx(np.mean(edges), rel=1e-3)
    bits = ""
    for one in taken:
        small = cv2.resize(one, (32, 32), interpolation=cv2.INTER_AREA)
        low = fft.dctn(small, norm="ortho")[:8, :8].ravel()
        bits += "".join("01"[int(value > np.median(low))] for value in low)
    ours = "".join(f"{int(digit, 16):04b}" for digit in row["phash"])
    assert sum(a != b for a, b in zip(bits, ours, strict=True)) <= 4, "but for rounding"


def test_motion_and_sharpness_order_clips_as_the_eye_does(street: np.ndarray) -> None:
    cv2 = pytest.importorskip("cv2")

    def of(pictures: np.ndarray) -> Samples:
        return Samples(Path(), pictures[2::4], pictures[3::4])

    still = street[:1].repeat(len(street), 0)
    blurred = np.stack([cv2.GaussianBlur(one, (9, 9), 3) for one in street])
    assert IN_THE_BOX["motion"](of(still)) == 0
    assert IN_THE_BOX["motion"](of(street)) > 1
    assert IN_THE_BOX["sharpness"](of(blurred)) < 0.2 * IN_THE_BOX["sharpness"](of(street))


def _lettered(
    picture: np.ndarray, lines: list[tuple[int, int, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Writes lines on a picture; returns it and the mask of their boxes."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(picture)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(18)
    mask = np.zeros(picture.shape[:2], bool)
    for left, top, text in lines:
        draw.text((left, top), text, fill="white", font=font, stroke_width=1, stroke_fill="black")
        a, b, c, d = map(int, draw.textbbox((left, top), text, font=font, stroke_width=1))
        mask[b:d, a:c] = True
    return np.asarray(image), mask


def test_text_is_found_where_it_is_written_and_not_in_scenes() -> None:
    cv2 = pytest.importorskip("cv2")
    lines = [(30, 180, "NEWS: a train has arrived on time"), (60, 30, "Chapter two, in which")]
    for name in ("bigbuckbunny", "bikes"):
        for picture in footage(name)[::40]:
            large = cv2.resize(picture, (512, 288))[:240]
            grey = cv2.cvtColor(large, cv2.COLOR_RGB2GRAY)
            plain = sum(width * height for _, _, width, height in text_boxes(grey)) / grey.size
            assert plain < 0.02, (name, plain)
            written, mask = _lettered(large, lines)
            found = np.zeros(mask.shape, bool)
            for left, top, width, height in text_boxes(cv2.cvtColor(written, cv2.COLOR_RGB2GRAY)):
                found[top : top + height, left : left + width] = True
            overlap = (found & mask).sum() / (found | mask).sum()
            assert overlap > 0.5, (name, overlap)


# --- plug-ins and tables -------------------------------------------------------------------------

PLUGIN = """
import numpy as np

def red(samples):
    return samples.pictures[..., 0].mean()

def moody(samples):
    if samples.path.stem == "b":
        raise RuntimeError("not\\nthis one")
    return None if samples.path.stem == "c" else "calm"

def several(samples):
    return [1, 2]
"""
ENTRIES = """[gulliver.scorers]
red = colours:red
moody = colours:moody
several = colours:several
missing = colours:nothing
motion = colours:red
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with scorers."""
    site = tmp_path / "site"
    info = site / "colours-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "colours.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: colours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "colours", raising=False)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Three clips, one path that leads nowhere, and one file that is no clip."""
    for number, name in enumerate("abc"):
        pictures = ramp(6) + 40 * number
        write_film(tmp_path / f"{name}.mkv", pictures, Fraction(10), EXACT)
    (tmp_path / "text.mp4").write_text("no clip")
    rows = [{"path": name} for name in ("a.mkv", "b.mkv", "none.mkv", "c.mkv", "text.mp4")]
    return Table.of_rows(rows, tmp_path / "t.parquet", ("path", "text")).write()


@pytest.mark.usefixtures("plugins")
def test_plugins_score_beside_those_in_the_box(table: Table) -> None:
    found = score(table, ("brightness", "red", "moody")).table
    levels = [2.5 + 40 * n for n in range(3)]
    values = [found.column(name) for name in ("brightness", "red")]
    wanted = [levels[0], levels[1], None, levels[2], None]
    for column in values:
        # Six frames at eight moments: some are seen twice.
        assert column == [w if w is None else pytest.approx(w, abs=0.6) for w in wanted]
    assert found.column("moody") == ["calm", None, None, None, None]
    listed = {(name, step): reason for name, step, reason in read_broken(table.path)}
    assert listed.keys() == {(n, "score") for n in ("b.mkv", "none.mkv", "text.mp4")}
    assert listed["b.mkv", "score"] == "moody: RuntimeError: not this one"
    assert listed["none.mkv", "score"] == "does not exist"


@pytest.mark.usefixtures("plugins")
def test_non_numeric_score_is_listed(table: Table) -> None:
    found = score(table, ("several",))
    assert found.table.column("several") == [None] * 5
    assert dict(found.broken)["a.mkv"] == "several: returns list; return a number, text or None"


def test_only_missing_scores_are_computed(table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    table.with_columns({"brightness": [7.0, None, None, 9.0, None]}).write()
    with pytest.raises(SystemExit) as ended:
        main(["data", "score", str(table.path), "--scorers", "brightness"])
    assert ended.value.code == 0
    assert "1 of 5 clips scored (2 had it before: --again replaces)" in capsys.readouterr().out
    first, second, *_, fourth, _ = Table.read(table.path).column("brightness")
    assert (first, fourth) == (7.0, 9.0)
    assert second == pytest.approx(42.5, abs=0.6)
    again = score(Table.read(table.path), ("brightness",), again=True).table
    assert again.column("brightness")[0] == pytest.approx(2.5, abs=0.6)


def test_the_journal_of_other_scorers_is_not_taken_for_theirs(table: Table) -> None:
    journal = table.path.with_name(f".{table.path.name}.score.jsonl")
    found = (table.path.parent / "a.mkv").stat()
    key = f"a.mkv|{found.st_size}|{found.st_mtime_ns}"
    journal.write_text(f'"[\\"motion\\"]"\n["{key}", {{"motion": 99.0}}, null]\n')
    assert score(table, ("motion",)).table.column("motion")[0] == 99.0
    journal.write_text(f'"[\\"motion\\"]"\n["{key}", {{"motion": 99.0}}, null]\n')
    again = score(Table.read(table.path), ("brightness",)).table
    assert again.column("brightness")[0] != 99.0
