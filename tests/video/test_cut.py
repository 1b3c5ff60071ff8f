"""`gulliver data cut`: where cuts are, which frames a clip has, what becomes of bad files."""

from __future__ import annotations

import csv
import os
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scenedetect")
pytest.importorskip("skvideo")

from gulliver.data.clips import upright_frames
from gulliver.errors import GulliverError
from gulliver.video.config import CutSettings
from gulliver.video.preparation import Table, cut
from gulliver.video.preparation.cutting import cut_source, make_plan, pieces
from gulliver.video.preparation.scenes import SourceScenes, survey
from gulliver.video.preparation.work import in_processes
from tests.video.cut_work import odd_work
from tests.video.messy_clips import LOSSLESS, Mess, messy_clips, write_film

COUNT = 40
EXACT = CutSettings(codec="ffv1", min_seconds=0)


@pytest.fixture(scope="module")
def mess() -> Mess:
    return messy_clips(COUNT)


def shown(path: Path) -> np.ndarray:
    """Pictures of a file as they are shown: uint8 [T, H, W, 3]."""
    return np.stack([frame.pixels() for frame in upright_frames(path)])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(((a.astype(np.float64) - b) ** 2).mean())
    return 10 * np.log10(255**2 / max(error, 1e-9))


def listed(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- scenes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("detector", "precision"), [("adaptive", 0.95), ("content", 0.8)])
def test_scenes_begin_within_two_frames_of_the_truth(
    mess: Mess, detector: Any, precision: float
) -> None:
    found = true = met = 0
    for clip in mess.whole[::2]:
        starts = survey(mess.folder / clip.path, CutSettings(detector=detector)).starts[1:]
        found, true = found + len(starts), true + len(clip.cuts)
        met += sum(any(abs(cut - start) <= 2 for start in starts) for cut in clip.cuts)
    assert true > 20
    assert met >= 0.95 * true
    # Fast digits are large changes, but none that stand out.
    assert met >= precision * found


def test_times_rates_and_sizes_are_those_that_were_written(mess: Mess) -> None:
    for clip in mess.whole:
        footage = survey(mess.folder / clip.path, CutSettings(detector="none"))
        assert footage.frames == clip.frames, clip.path
        assert footage.starts == (0,)
        assert footage.sizes == ((clip.height, clip.width),), clip.path
        assert footage.constant == (clip.kind != "variable"), clip.path
        assert float(footage.rate) == pytest.approx(clip.fps, rel=1e-4), clip.path
        np.testing.assert_allclose(footage.times, clip.times, atol=0.021, err_msg=clip.path)


def test_a_cut_next_to_an_end_and_held_pictures(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    one, other = draw.integers(0, 256, (2, 48, 64, 3), np.uint8)
    moving = np.stack([np.roll(one, 3 * n, 1) // 2 + 60 for n in range(20)])
    write_film(tmp_path / "ends.mkv", np.stack([other, *[one] * 30, other]), Fraction(25), LOSSLESS)
    # Each drawing stays for four frames: every one of them would stand out among equal ones.
    write_film(tmp_path / "held.mkv", moving.repeat(4, 0), Fraction(50), LOSSLESS)
    assert survey(tmp_path / "ends.mkv", CutSettings()).starts == (0, 1, 31)
    assert survey(tmp_path / "held.mkv", CutSettings()).starts == (0,)


# --- frames --------------------------------------------------------------------------------------


def test_lossless_clips_hold_the_very_frames_of_their_source(mess: Mess, tmp_path: Path) -> None:
    kinds = mess.of_kind("joined")[:1] + mess.of_kind("rotated", "uneven", "tiny", "odd", "lying")
    for clip in kinds:
        outcome = cut_source(mess.folder / clip.path, tmp_path, EXACT)
        source = shown(mess.folder / clip.path)
        assert outcome.values["left"] == [], clip.path
        at = 0
        for name, first, end, frames, height, width, fps in outcome.values["cuts"]:
            found = shown(tmp_path / name)
            assert first == at
            assert found.shape == (frames, height, width, 3)
            assert fps == pytest.approx(clip.fps, rel=1e-4)
            assert np.array_equal(found, source[first:end]), f"{clip.path} {first}"
            at = end
        assert at == clip.frames


def test_encoded_clips_hold_the_frames_of_their_source_and_stand_upright(
    mess: Mess, tmp_path: Path
) -> None:
    settings = CutSettings(min_seconds=0)
    for clip in [*mess.of_kind("joined")[:2], *mess.of_kind("rotated", "uneven", "silent")[:4]]:
        source = shown(mess.folder / clip.path)
        for name, first, end, _, height, width, _ in cut_source(
            mess.folder / clip.path, tmp_path, settings
        ).values["cuts"]:
            found = shown(tmp_path / name)
            assert (height, width) == (clip.height // 2 * 2, clip.width // 2 * 2)
            wanted = source[first:end, :height, :width]
            assert found.shape == wanted.shape
            for number, picture in enumerate(found):
                # The right frame, and not the one before or after where these differ.
                assert psnr(picture, wanted[number]) > 27, f"{clip.path} {first + number}"
            assert psnr(found, wanted) > psnr(found[1:], wanted[:-1]) + 1


@pytest.mark.parametrize("fps", [None, 10.0, 25.0, 60.0])
def test_clips_of_variable_rate_show_what_the_file_shows_at_each_moment(
    mess: Mess, tmp_path: Path, fps: float | None
) -> None:
    clip = mess.of_kind("variable")[0]
    settings = CutSettings(codec="ffv1", min_seconds=0, fps=fps, detector="none")
    (found,) = cut_source(mess.folder / clip.path, tmp_path, settings).values["cuts"]
    name, frames, rate = found[0], found[3], found[-1]
    assert rate == (fps or clip.fps)
    source, pictures = shown(mess.folder / clip.path), shown(tmp_path / name)
    assert len(pictures) == frames == round(clip.times[-1] * rate)
    for number, picture in enumerate(pictures):
        # Times are multiples of 40 ms: half a frame early counts, and 1/4 of 10 fps never does.
        moment = number / rate + 0.49 * min(0.04, 1 / rate)
        newest = max(n for n, time in enumerate(clip.times[:-1]) if time <= moment + 1e-9)
        assert np.array_equal(picture, source[newest]), number


def test_the_shorter_side_is_scaled_down_and_never_up(mess: Mess, tmp_path: Path) -> None:
    clip = mess.of_kind("rotated")[0]
    for side, size in ((36, (64, 36)), (100, (128, 72))):
        settings = CutSettings(shorter_side=side, min_seconds=0)
        outcome = cut_source(mess.folder / clip.path, tmp_path / str(side), settings)
        for name, *_, height, width, _ in outcome.values["cuts"]:
            assert (height, width) == size == shown(tmp_path / str(side) / name).shape[1:3]


def test_lengths_stay_between_least_and_most_and_no_frame_is_lost() -> None:
    draw = np.random.default_rng(1)
    for _ in range(300):
        scenes = draw.integers(1, 90, draw.integers(1, 6))
        starts = (0, *map(int, np.cumsum(scenes)[:-1]))
        steps = draw.choice([0.04, 0.04, 0.08, 0.4], int(scenes.sum()))
        even = bool(draw.integers(2))
        times = np.arange(scenes.sum() + 1) / 25 if even else np.array([0, *np.cumsum(steps)])
        footage = SourceScenes(starts, ((2, 2),) * len(starts), times, Fraction(25), even)
        fps = [None, 5.0, 12.5, 30.0, 50.0][draw.integers(5)]
        low = float(draw.uniform(0, 1))
        settings = CutSettings(min_seconds=low, max_seconds=low + draw.uniform(0.04, 2), fps=fps)
        plan = make_plan(footage, "x", settings)
        covered = np.zeros(len(times) - 1, bool)
        for clip in plan.clips:
            seconds = len(clip.frames) / float(plan.rate)
            assert seconds <= settings.max_seconds + 1e-6
            assert seconds >= low - 1e-6 or seconds + 1 / plan.rate > settings.max_seconds
            assert all(clip.first <= number < clip.end for number in clip.frames)
            scene = max(start for start in starts if start <= clip.first)
            assert all(start <= scene or start >= clip.end for start in starts)
            covered[clip.first : clip.end] = True
        for first, end, reason in plan.left:
            assert "frame" in reason
            covered[first:end] = True
        assert covered.all()


def test_long_scenes_are_divided_evenly() -> None:
    assert pieces(100, 10, 40) == [0, 33, 67, 100]
    assert pieces(41, 30, 40) == [0, 40, 41]
    assert pieces(40, 1, 40) == [0, 40]


# --- tables --------------------------------------------------------------------------------------


def run(mess: Mess, out: Path, settings: CutSettings | None = None, workers: int = 2) -> Any:
    return cut(Table.read(mess.table), out, settings, workers)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_row_ends_in_clips_or_in_the_list_with_its_reason(mess: Mess, tmp_path: Path) -> None:
    report = run(mess, tmp_path / "cut.parquet")
    rows = report.table.data.to_pylist()
    of_source: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_source.setdefault(Path(row["source"]).name, []).append(row)
    left: dict[str, list[dict[str, str]]] = {}
    for one in listed(report.listed):
        left.setdefault(one["path"], []).append(one)
    for clip in mess.clips:
        mine, out = of_source.get(clip.path, []), left.get(clip.path, [])
        if clip.broken:
            assert not mine
            assert [one["first"] for one in out] == [""]
            assert out[0]["reason"]
            continue
        spans = [(row["source_first"], row["source_end"]) for row in mine]
        spans += [(int(one["first"]), int(one["end"])) for one in out]
        ends = [0, *(end for _, end in sorted(spans))]
        assert [first for first, _ in sorted(spans)] == ends[:-1], clip.path
        assert ends[-1] == clip.frames
        for row in mine:
            assert row["text"] == f"clip {clip.path[:3]}, {clip.kind}"
            assert (tmp_path / row["path"]).is_file()
            assert row["resolution"] == row["height"] * row["width"]
            assert (tmp_path / row["source"]).samefile(mess.folder / clip.path)
    assert report.sources == len(of_source)


def test_a_killed_job_goes_on_and_makes_the_same_bytes(mess: Mess, tmp_path: Path) -> None:
    path = mess.folder / max(mess.of_kind("joined"), key=lambda clip: len(clip.cuts)).path
    whole = cut_source(path, tmp_path / "whole", CutSettings())
    clips = len(whole.values["cuts"])
    assert clips > 2
    for frames in (3, 30, 70, 10_000):
        code = _cut_until(path, tmp_path / "killed", frames)
        complete = {one[0] for one in whole.values["cuts"]} & contents(tmp_path / "killed").keys()
        for name in complete:
            assert (tmp_path / "killed" / name).read_bytes() == contents(tmp_path / "whole")[name]
        assert code == (0 if frames == 10_000 else -signal.SIGKILL)
    assert cut_source(path, tmp_path / "killed", CutSettings()) == whole
    partial_files = [name for name in contents(tmp_path / "killed") if name.startswith(".")]
    for name in partial_files:
        (tmp_path / "killed" / name).unlink()
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def _cut_until(path: Path, folder: Path, frames: int) -> int:
    """Cuts a source in a process that ends itself at the n-th frame it writes."""
    from gulliver.video.preparation import scenes as _reencode

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    inner, count = _reencode.ClipWriter.add, 0

    def add(self: Any, frame: Any) -> None:
        nonlocal count
        count += 1
        if count == frames:
            os.kill(os.getpid(), signal.SIGKILL)
        inner(self, frame)

    _reencode.ClipWriter.add = add  # type: ignore[method-assign]
    cut_source(path, folder, CutSettings())
    os._exit(0)


# --- processes and refusals ----------------------------------------------------------------------


def test_a_file_that_crashes_its_process_costs_that_file_only() -> None:
    names = ["a", "crash", *"bc"]
    found = dict(in_processes(odd_work, [(name, Path(name)) for name in names], 2))
    assert found.keys() == set(names)
    assert "crashed" in str(found.pop("crash").problem)
    assert all(outcome.values["name"] == name for name, outcome in found.items())
    assert os.getpid() not in {outcome.values["process"] for outcome in found.values()}
    with pytest.raises(GulliverError, match="no space"):
        list(in_processes(odd_work, [("a", Path("a")), ("full", Path("full"))], 2))
