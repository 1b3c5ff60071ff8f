"""One clock for scan, cut, score and training: containers, codings and rates of every kind."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("av")
pytest.importorskip("pyarrow")
pytest.importorskip("skvideo")

from gulliver.data import Bucket
from gulliver.data.clips import Clip, upright_frames
from gulliver.data.table import ClipTable
from gulliver.video.config import CutSettings
from gulliver.video.preparation.cutting import cut_source, make_plan
from gulliver.video.preparation.packets import take_samples
from gulliver.video.preparation.scanning import read_facts
from gulliver.video.preparation.scenes import SourceScenes, survey
from tests.video.messy_clips import LOSSLESS, write_film
from tests.video.numbered_clips import CODINGS, SIDE, Numbered, clip, numbered, numbers_of

WHOLE = CutSettings(detector="none", codec="ffv1", min_seconds=0, max_seconds=1000)


@pytest.fixture(params=[f"{name}-{kind}" for name in CODINGS for kind in ("constant", "variable")])
def made(request: pytest.FixtureRequest, tmp_path: Path, full: bool) -> list[Numbered]:
    """One clip of a coding and kind of rate; with --full ten of them."""
    name, kind = request.param.rsplit("-", 1)
    seeds = range(10 if full else 1)
    return [clip(tmp_path, name, kind == "variable", seed) for seed in seeds]


def shown(path: Path) -> list[int]:
    """Numbers of the frames that a file shows one after another."""
    return numbers_of(np.stack([frame.pixels() for frame in upright_frames(path)]))


def test_every_reader_has_the_clock_of_the_file(made: list[Numbered], tmp_path: Path) -> None:
    for source in made:
        assert shown(source.path) == list(range(source.frames))
        check_facts(source)
        check_cut(source, tmp_path / "clips")
        check_samples(source)
        check_training(source)


def check_facts(source: Numbered) -> None:
    facts = read_facts(source.path)
    assert facts["num_frames"] == source.frames
    assert facts["variable_fps"] == source.variable
    assert facts["note"] is None
    mean = (source.frames - 1) / source.times[-2]
    assert facts["fps"] == pytest.approx(mean, rel=0.02)
    assert facts["duration"] == pytest.approx(source.times[-1], abs=4 / float(source.rate))


def check_cut(source: Numbered, folder: Path) -> None:
    """Checks that a clip has the frame of each moment, and each frame at least once."""
    outcome = cut_source(source.path, folder, WHOLE)
    ((name, first, end, frames, _, _, fps),) = outcome.values["cuts"]
    assert (first, end, outcome.values["left"]) == (0, source.frames, [])
    assert fps == source.rate
    # The last frame stays for as long as the container says, or for a frame's time.
    moments = [n / fps for n in range(round(source.times[-2] * fps) + 1)]
    wanted = [source.shown_at(moment + 0.25 / fps) for moment in moments]
    found = shown(folder / name)
    assert len(found) == frames
    assert found[: len(wanted)] == wanted
    assert set(found[len(wanted) :]) <= {source.frames - 1}
    assert sorted(set(found)) == list(range(source.frames))


def check_samples(source: Numbered) -> None:
    """Checks the frames at the middles of eight parts of the time."""
    steps = np.diff(source.times[:-1])
    length = source.times[-2] + float(np.median(steps))
    wanted = [source.shown_at((n + 0.5) / 8 * length) for n in range(8)]
    found = numbers_of(take_samples(source.path).pictures)
    nearest = np.abs(
        np.subtract.outer([(n + 0.5) / 8 * length for n in range(8)], source.times)
    ).min(1)
    for want, have, gap in zip(wanted, found, nearest, strict=True):
        # A moment at which a frame begins, up to rounding, may be either side of it.
        assert have == want or (gap < 0.003 and abs(have - want) == 1)


def check_training(source: Numbered) -> None:
    """Checks windows of a table without facts: its frames and its rate."""
    table = source.path.with_suffix(".csv")
    table.write_text(f"path,text\n{source.path.name},x\n")
    data = ClipTable(table, (Bucket(9, SIDE, SIDE),))
    mean = (source.frames - 1) / source.times[-2]
    for start in (0, 7, source.frames - 9):
        sample = data.read(0, start)
        assert isinstance(sample, Clip)
        levels = (sample.video.permute(1, 2, 3, 0).numpy() + 1) * 127.5
        assert numbers_of(levels) == list(range(start, start + 9))
        assert sample.fps == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("name", ["mkv-b", "avi264-b"])
def test_a_broadcast_rate_and_rounded_times_are_constant(tmp_path: Path, name: str) -> None:
    coding = CODINGS[name]
    path = tmp_path / f"a{coding.suffix}"
    write_film(path, numbered(200), Fraction(30000, 1001), coding)
    assert not read_facts(path)["variable_fps"]
    assert read_facts(path)["fps"] == pytest.approx(30000 / 1001, rel=1e-4)
    footage = survey(path, WHOLE)
    assert footage.constant
    assert footage.frames == 200


def test_frames_that_are_shorter_than_the_highest_rate_are_listed(tmp_path: Path) -> None:
    # Frames 4 to 6 are 2 ms apart: at most 120 frames a second are written.
    times = [0, 40, 80, 120, 160, 162, 164, 166, 240, 280, 320]
    write_film(tmp_path / "a.mkv", numbered(11), Fraction(25), LOSSLESS, times=times)
    outcome = cut_source(tmp_path / "a.mkv", tmp_path / "clips", WHOLE)
    ((name, *_, fps),) = outcome.values["cuts"]
    assert fps == 120
    found = set(shown(tmp_path / "clips" / name))
    left = {n for first, end, _ in outcome.values["left"] for n in range(first, end)}
    assert found | left == set(range(11))
    assert not found & left
    assert left


def test_every_frame_of_any_times_is_shown_or_listed() -> None:
    draw = np.random.default_rng(3)
    for _ in range(200):
        steps = draw.choice([0.002, 0.0083, 1 / 60, 1 / 30, 0.04, 0.5], int(draw.integers(2, 60)))
        times = np.concatenate([[0.0], np.cumsum(steps)]).round(3)
        rate = Fraction(min(120, 1 / np.diff(times).min())).limit_denominator(1001)
        plan = make_plan(SourceScenes((0,), ((2, 2),), times, rate, False), "x", WHOLE)
        seen = {n for planned in plan.clips for n in planned.frames}
        left = {n for first, end, _ in plan.left for n in range(first, end)}
        assert seen | left == set(range(len(steps)))
        assert not seen & left
