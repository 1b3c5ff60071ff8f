"""Moving digits, tables of real files, and word vectors."""

from __future__ import annotations

import csv
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from gulliver.data import Bucket
from gulliver.data.clips import BrokenClip, Clip, ClipDataset, WindowedDataset, collate
from gulliver.data.table import ClipTable, Probe, choose_bucket, decode, probe_file, resize_and_crop
from gulliver.errors import GulliverError
from gulliver.video import DIRECTIONS
from gulliver.video import digits as _digits
from gulliver.video.digits import MovingDigits
from gulliver.video.text_encoders import WordEncoder

SHAPES = {
    Bucket(13, 32, 32): 2.0,
    Bucket(9, 24, 40): 1.0,
    Bucket(17, 40, 24): 1,
    Bucket(1, 32, 32): 1,
}


def centre(clip: torch.Tensor) -> torch.Tensor:
    """Mean place of the ink of each frame, x and y: [T, 2]."""
    ink = (clip[0] + 1) / 2
    y, x = torch.meshgrid(torch.arange(ink.shape[1]), torch.arange(ink.shape[2]), indexing="ij")
    mass = ink.sum((1, 2))
    return torch.stack([(ink * x).sum((1, 2)) / mass, (ink * y).sum((1, 2)) / mass], dim=1)


def test_digits_move_as_their_caption_says_and_stay_inside() -> None:
    data = MovingDigits("train", 200, shapes=SHAPES)
    assert isinstance(data, ClipDataset)
    for index in range(200):
        clip, bucket = data[index], data.bucket_of(index)
        assert clip.video.shape == (3, bucket.frames, bucket.height, bucket.width)
        assert torch.equal(clip.video[0], clip.video[2])
        assert -1 <= clip.video.min() <= clip.video.max() <= 1
        digit, direction = data.labels(index)
        if bucket.frames == 1:
            assert clip.caption == f"the digit {digit}"
            continue
        assert clip.caption == f"the digit {digit} moving {DIRECTIONS[direction]}"
        moved = (centre(clip.video)[-1] - centre(clip.video)[0]).tolist()
        axis, sign = (0 if direction < 2 else 1), (-1 if direction % 2 == 0 else 1)
        room = (bucket.width, bucket.height)[axis] - 16
        assert moved[axis] * sign == pytest.approx(min(room, 1.07 * (bucket.frames - 1)), abs=0.2)
        assert abs(moved[1 - axis]) < 0.2
        ink = ((clip.video[0] + 1) / 2).sum((1, 2))
        # Nothing leaves the frame: every frame has the same ink.
        torch.testing.assert_close(ink, ink[:1].expand_as(ink), rtol=0.02, atol=0.1)


def test_clips_depend_on_seed_split_and_index_only() -> None:
    first = MovingDigits("train", 50, seed=3, shapes=SHAPES)
    again = MovingDigits("train", 50, seed=3, shapes=SHAPES)
    other = MovingDigits("train", 50, seed=4, shapes=SHAPES)
    assert all(torch.equal(first[i].video, again[i].video) for i in range(50))
    assert any(first[i].caption != other[i].caption for i in range(50))
    same = [i for i in range(50) if first.bucket_of(i) == first.bucket_of(0)]
    batch = first.batch(same)
    assert all(torch.equal(batch[n], first[i].video) for n, i in enumerate(same))


def test_the_scans_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    expected = sklearn.load_digits()
    for file_is_there in (True, False):
        with monkeypatch.context() as patch:
            if not file_is_there:
                patch.setattr(Path, "is_file", lambda path: False)
            pixels, digits = _digits._read_scans()
        assert np.array_equal(pixels, expected.data)
        assert np.array_equal(digits, expected.target)


def test_train_and_held_out_share_no_handwriting() -> None:
    still = {Bucket(1, 16, 16): 1.0}
    kinds = {}
    for split, count in (("train", 3000), ("heldout", 2500)):
        data = MovingDigits(split, count, shapes=still)
        kinds[split] = {data[i].video.numpy().tobytes() for i in range(count)}
    assert len(kinds["heldout"]) == 297
    assert len(kinds["train"]) > 1200
    assert not kinds["train"] & kinds["heldout"]


def test_excluded_sentences_never_occur_and_all_others_do() -> None:
    exclude = tuple((digit, digit % 4) for digit in range(10))
    data = MovingDigits("train", 3000, exclude=exclude)
    seen = {data.labels(index) for index in range(3000)}
    assert seen == {(d, w) for d in range(10) for w in range(4)} - set(exclude)


# --- real files -----------------------------------------------------------------------------------


def write_video(path: Path, frames: int, height: int, width: int, rate: int = 8) -> np.ndarray:
    import av

    y, x = np.mgrid[:height, :width]
    made = np.stack(
        [
            np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 9 * t)], -1)
            for t in range(frames)
        ]
    ).astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv444p"
        stream.options = {"crf": "4"}
        for frame in made:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return made


def write_table(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "clips.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from PIL import Image

    write_video(tmp_path / "long.mp4", 14, 32, 32)
    write_video(tmp_path / "wide.mp4", 10, 24, 40, rate=16)
    write_video(tmp_path / "short.mp4", 2, 32, 32)
    Image.fromarray(np.full((40, 36, 3), 200, np.uint8)).save(tmp_path / "still.png")
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "tiny.png")
    frames = [Image.fromarray(np.full((32, 32, 3), 25 * t, np.uint8)) for t in range(9)]
    frames[0].save(tmp_path / "anim.gif", save_all=True, append_images=frames[1:], duration=125)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "noise.mp4").write_bytes(b"this is no video" * 40)
    return tmp_path


NAMES = ("long.mp4", "wide.mp4", "still.png", "anim.gif", "short.mp4", "tiny.png", "empty.mp4",
         "noise.mp4", "gone.mp4")  # fmt: skip
BUCKETS = [Bucket(13, 32, 32), Bucket(9, 32, 32), Bucket(9, 24, 40), Bucket(1, 32, 32)]


def test_table_lists_unusable_rows(folder: Path) -> None:
    rows = [{"path": name, "text": f"a {name}"} for name in NAMES]
    rows.append({"path": "long.mp4", "text": " "})
    looked: list[tuple[int, int]] = []
    table = ClipTable(write_table(folder, rows), BUCKETS, progress=lambda *n: looked.append(n))
    assert looked[-1] == (10, 10)
    found = {table.rows[i].path.name: table.bucket_of(i) for i in range(len(table))}
    assert found["long.mp4"] == Bucket(13, 32, 32)
    assert found["wide.mp4"] == Bucket(9, 24, 40)
    assert found["anim.gif"] == Bucket(9, 32, 32)
    assert found["still.png"] == Bucket(1, 32, 32)
    assert found["short.mp4"] == Bucket(1, 32, 32)
    reasons = dict(table.skipped)
    assert set(reasons) == {"tiny.png", "empty.mp4", "noise.mp4", "gone.mp4", "long.mp4"}
    assert reasons["empty.mp4"] == "is empty"
    assert reasons["gone.mp4"] == "does not exist"
    assert "cannot be decoded" in reasons["noise.mp4"]
    assert "too small" in reasons["tiny.png"]
    assert reasons["long.mp4"] == "no caption"
    assert "5 clips used, 5 skipped" in table.report()


def test_a_decoded_clip_is_the_file_scaled_and_cut(folder: Path) -> None:
    made = write_video(folder / "exact.mp4", 9, 24, 40)
    table = ClipTable(
        write_table(folder, [{"path": "exact.mp4", "text": "x"}]), [Bucket(9, 24, 40)]
    )
    clip = table[0]
    assert not isinstance(clip, BrokenClip)
    assert clip.fps == 8
    expected = torch.from_numpy(made).permute(3, 0, 1, 2).float() / 127.5 - 1
    assert (clip.video - expected).abs().max() < 0.1
    every_second = ClipTable(folder / "clips.csv", [Bucket(5, 24, 40)], frame_interval=2)[0]
    assert (every_second.video - expected[:, ::2]).abs().max() < 0.1
    assert every_second.fps == 4


def turned(path: Path, matrix: tuple[int, int, int, int]) -> None:
    """Writes a display matrix (a, b, c, d) into the track header of an mp4, as phones do."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 4 + 20 + 16
    a, b, c, d = (value << 16 for value in matrix)
    content[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


def test_rotated_videos_are_upright(tmp_path: Path) -> None:
    from gulliver.video.media import read_frames

    clockwise = lambda frames: np.rot90(frames, -1, axes=(1, 2))  # noqa: E731
    for name, matrix, upright in (
        ("clockwise", (0, 1, -1, 0), clockwise),
        ("head over", (-1, 0, 0, -1), lambda f: clockwise(clockwise(f))),
        ("anticlockwise", (0, -1, 1, 0), lambda f: clockwise(clockwise(clockwise(f)))),
        ("mirror", (-1, 0, 0, 1), lambda f: f[:, :, ::-1]),
        ("mirrored and turned", (0, 1, 1, 0), lambda f: f.transpose(0, 2, 1, 3)),
    ):
        path = tmp_path / f"{name}.mp4"
        expected = upright(write_video(path, 5, 24, 40))
        turned(path, matrix)
        size = expected.shape[1:3]
        table = ClipTable(
            write_table(tmp_path, [{"path": path.name, "text": "x"}]), [Bucket(5, *size)]
        )
        probe = table.rows[0].probe
        assert (probe.height, probe.width) == size, name
        clip = table[0]
        assert not isinstance(clip, BrokenClip)
        reference = torch.from_numpy(expected.copy()).permute(3, 0, 1, 2) / 127.5 - 1
        assert (clip.video - reference).abs().max() < 0.1, name
        assert (read_frames(path) - reference).abs().max() < 0.1, name


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_pictures_are_upright_as_their_exif_orientation_says(tmp_path: Path, suffix: str) -> None:
    from PIL import Image, ImageOps

    y, x = np.mgrid[:24, :40]
    stored = Image.fromarray(np.stack([x * 6, y * 10, x * 0 + 90], -1).astype(np.uint8))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.{suffix}"
        stored.save(path, exif=exif, quality=100)
        probe = probe_file(path)
        upright = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        assert (probe.width, probe.height) == upright.size, orientation
        reference = torch.from_numpy(np.asarray(upright).copy()).permute(2, 0, 1) / 127.5 - 1
        assert (decode(path, 1, 1)[0] - reference).abs().max() < 0.1, orientation


def numbered_video(path: Path, frames: int) -> None:
    """Each frame is grey, two levels above the one before (16 to 235)."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.height, stream.width, stream.pix_fmt = 16, 16, "gray"
        stream.options = {"qp": "0"}
        for number in range(frames):
            made = np.full((16, 16), 16 + 2 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(made, format="gray")))
        container.mux(stream.encode())


def test_a_long_clip_shows_all_its_frames_over_time(tmp_path: Path) -> None:
    numbered_video(tmp_path / "long.mp4", 80)
    rows = [{"path": "long.mp4", "text": "x"}]
    table = ClipTable(write_table(tmp_path, rows), [Bucket(17, 16, 16)], frame_interval=2)
    assert isinstance(table, WindowedDataset)

    def numbers(clip: object) -> list[int]:
        assert isinstance(clip, Clip)
        return ((clip.video[0, :, 0, 0] + 1) / 4 * 219).round().int().tolist()

    # The first window, where nobody draws: evaluation sees the same frames each time.
    assert numbers(table[0]) == [2 * n for n in range(17)]
    starts = set()
    for seed in range(48):
        found = numbers(table.read(0, seed))
        assert found == [found[0] + 2 * n for n in range(17)]
        starts.add(found[0])
    assert starts == set(range(80 - 32))
    batch = collate(table, [0], [5])
    assert batch.videos is not None
    assert torch.equal(batch.videos[0], table.read(0, 5).video)  # type: ignore[union-attr]


def test_a_file_that_breaks_later_is_left_out_and_counted(folder: Path) -> None:
    rows = [{"path": name, "text": name} for name in ("long.mp4", "late.mp4")]
    write_video(folder / "late.mp4", 13, 32, 32)
    table = ClipTable(write_table(folder, rows), BUCKETS[:1])
    (folder / "late.mp4").write_bytes(b"gone bad")
    batch = collate(table, [1, 0])
    assert batch.kept == [1]
    assert batch.videos is not None
    assert len(batch.videos) == 1
    assert [b.index for b in batch.broken] == [1]
    assert [name for name, _ in table.broken] == ["late.mp4"]
    assert collate(table, [1]).videos is None


def test_columns_of_the_table_spare_opening_files(folder: Path) -> None:
    (folder / "claimed.mp4").write_bytes(b"not opened yet")
    row = {"path": "claimed.mp4", "text": "x", "num_frames": "13", "height": "32", "width": "32",
           "fps": "24"}  # fmt: skip
    table = ClipTable(write_table(folder, [row]), BUCKETS)
    assert table.rows[0].probe == Probe(13, 32, 32, 24.0)
    assert isinstance(table[0], BrokenClip)


def test_parquet_tables_are_read_as_well(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    content = {"path": ["long.mp4", "still.png"], "text": ["a", "b"]}
    parquet.write_table(pyarrow.table(content), folder / "clips.parquet")
    assert len(ClipTable(folder / "clips.parquet", BUCKETS)) == 2
    (folder / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(GulliverError, match="not a readable Parquet"):
        ClipTable(folder / "bad.parquet", BUCKETS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.csv", None, "does not exist"),
        ("a.csv", "file,text\nx,y\n", "no column 'path'"),
        ("a.csv", "path,text\nnone.mp4,y\n", "no row that can be used; e.g., none.mp4"),
        ("a.csv", "path,text\n\na.mp4,a ball, moving\n", "a.csv, line 3: the row has 3 fields"),
        ("a.csv", "path,text,text\na.mp4,a,b\n", "a.csv has two columns 'text'"),
        ("a.csv", 'path,text\na.mp4,"a ball\nb.mp4,y\n', "line 2: unexpected end .* left open"),
        ("a.csv", 'path,text\na.mp4,"a\nb.mp4,b"\n', "line 2: a quoted field .* line 3"),
        ("a.csv", "path,text,fps\na.mp4,a,8\nb.mp4,b,nan\n", "a.csv, line 3: fps is nan"),
        ("a.csv", "path,text,fps\na.mp4,a,abc\n", "line 2: fps is 'abc'"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(GulliverError, match=message):
        ClipTable(tmp_path / name, BUCKETS)


def test_stated_numbers_may_be_fractions_or_empty_and_names_of_any_length(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = folder / "clips.csv"
    table.write_text(
        "path,text,num_frames,height,width,fps\nlong.mp4,a,14,32,32,30000/1001\n"
        f"long.mp4,a,nan,32,32,\n{'x' * 5000}.mp4,b,14,32,32,8\n"
    )
    found = ClipTable(table, BUCKETS)
    assert found.rows[0].probe.fps == 30000 / 1001
    assert found.rows[1].probe == probe_file(folder / "long.mp4")
    assert found.skipped == [("x" * 80 + "...", "cannot be opened: File name too long")]
    nan, name = float("nan"), ["long.mp4"]
    columns = {"num_frames": [nan], "height": [nan], "width": [nan], "fps": [nan]}
    stated = pyarrow.table({"path": name, "text": ["a"], **columns})
    parquet.write_table(stated, folder / "nan.parquet")
    assert ClipTable(folder / "nan.parquet", BUCKETS).rows[0].probe == found.rows[1].probe
    parquet.write_table(stated.set_column(3, "height", [[float("inf")]]), folder / "inf.parquet")
    with pytest.raises(GulliverError, match=r"inf.parquet, row 1: height is inf"):
        ClipTable(folder / "inf.parquet", BUCKETS)


def test_a_spreadsheets_table_is_read_and_another_encoding_named(folder: Path) -> None:
    table = folder / "clips.csv"
    table.write_bytes("\ufeffpath,text\r\nlong.mp4,un café\r\n".encode())
    assert ClipTable(table, BUCKETS).rows[0].text == "un café"
    table.write_bytes(b"path,text\nlong.mp4,tea\nlong.mp4,un caf\xe9\n")
    with pytest.raises(GulliverError, match=r"clips.csv, line 3: byte 0xe9 .*UTF-8"):
        ClipTable(table, BUCKETS)
    table.write_bytes("path,text\n".encode("utf-16"))
    with pytest.raises(GulliverError, match="line 1: byte 0xff "):
        ClipTable(table, BUCKETS)


def test_the_bucket_with_most_pixels_then_frames_then_nearest_ratio_is_chosen() -> None:
    buckets = (Bucket(9, 32, 32), Bucket(17, 32, 32), Bucket(9, 64, 64), Bucket(9, 48, 80))
    assert choose_bucket(Probe(40, 70, 70, 8), buckets, 1) == Bucket(9, 64, 64)
    assert choose_bucket(Probe(40, 60, 100, 8), buckets, 1) == Bucket(9, 48, 80)
    assert choose_bucket(Probe(40, 33, 35, 8), buckets, 1) == Bucket(17, 32, 32)
    assert choose_bucket(Probe(40, 33, 35, 8), buckets, 3) == Bucket(9, 32, 32)
    with pytest.raises(GulliverError, match="too few"):
        choose_bucket(Probe(8, 64, 64, 8), buckets, 1)


def test_scaling_keeps_the_middle() -> None:
    frames = torch.full((1, 3, 20, 40), -1.0)
    frames[:, :, :, 8:32] = 1.0
    assert (resize_and_crop(frames, Bucket(1, 10, 10)) == 1).all()


# --- words --------------------------------------------------------------------------------------


def test_words_have_the_same_vectors_in_every_process_and_place_codes() -> None:
    y, mask = WordEncoder(16, 6).encode(["The digit 3, moving left.", "digit"])
    again, _ = WordEncoder(16, 6).encode(["the digit 3 moving left"])
    assert torch.equal(y[0], again[0])
    assert mask.tolist() == [[True] * 5, [True] + [False] * 4]
    assert (y[1, 0, 1:] == 0).all()
    # The same word in another place differs by the difference of the places' codes only.
    angles = torch.arange(2)[:, None] * 10_000.0 ** -(torch.arange(8) / 8)
    places = torch.cat([angles.sin(), angles.cos()], dim=1)
    torch.testing.assert_close(y[0, 0, 1] - y[1, 0, 0], places[1] - places[0])


def test_prompts_that_cannot_be_read_are_refused() -> None:
    encoder = WordEncoder(16, 3)
    with pytest.raises(GulliverError, match="empty"):
        encoder.encode([" ... "])
    with pytest.raises(GulliverError, match="4 words exceed"):
        encoder.encode(["one two three four"])
