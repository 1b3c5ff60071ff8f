"""Drawn samples, pictures of steps, and the command that draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks._data_centric_costs import TABLE, video_costs

from gulliver.cli.dispatch import run
from gulliver.data import DataCentricPlanner, Samples
from gulliver.data_centric.costs import DISTRIBUTIONS, draw_shapes
from gulliver.data_centric.pictures import shares_of, step_lines
from gulliver.data_centric.steps import MicroBatch, RankGroup, StepPlan
from gulliver.errors import GulliverError

COSTS = video_costs()


def test_sample_distributions_match_the_paper() -> None:
    means = []
    for distribution in DISTRIBUTIONS:
        shapes = draw_shapes(COSTS, distribution, 3000, seed=1)
        assert sum(shape.endswith("/1") for shape in shapes) == 2000
        assert shapes == draw_shapes(COSTS, distribution, 3000, seed=1)
        means.append(sum(map(COSTS.tokens, shapes)))
    assert means == sorted(means)
    with pytest.raises(GulliverError, match="did you mean 'short'"):
        draw_shapes(COSTS, "shrt", 9)  # type: ignore[arg-type]


def small_step() -> StepPlan:
    """Two groups of a step of 4 s: one busy for all of it, one for 3 s."""
    first = MicroBatch("a", (1, 2), 3, (3,), 4.0, 0.5, 1.0, 2**30)
    second = MicroBatch("b", (3,), 0, (0,), 3.0, 0.0, 0.0, 2**30)
    groups = RankGroup((0, 1), (first,)), RankGroup((2,), (second,)), RankGroup((3,))
    return StepPlan(7, 0, groups, 4.0, 2.5)


def test_shares_are_of_the_time_of_all_ranks() -> None:
    told = shares_of([small_step()])
    assert told.wait == pytest.approx((1 + 4) / 16)
    assert told.wait == pytest.approx(small_step().imbalance)
    assert told.communication == pytest.approx(2 * 0.5 / 16)
    assert told.recompute == pytest.approx(2 * 1.0 / 16)
    assert told.gap == pytest.approx(0.6)
    assert told.samples == 3


def test_drawn_step_has_its_duration() -> None:
    lines = step_lines(small_step(), measured=[4.2, 3.1, 0.0])
    bars = [re.findall(r"\|(.*)\|", line)[0] for line in lines[1:4]]
    assert bars[0] == "A" * 60
    assert bars[1] == "B" * 45 + "." * 15
    assert bars[2] == "." * 60
    assert lines[1].endswith("4 s, measured 4.2 s")
    assert lines[4].strip().startswith("A a, B b")


def test_plan_data_draws_steps_and_gains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--samples", "40", "--count", "400", "--steps", "1", "--no-intra", "--degree", "4"]
    assert run(["plan", "data", "--costs", str(TABLE), *options]) == 0
    out = capsys.readouterr().out
    assert "400 of 400 samples once each, 0 left out" in out
    gained = re.findall(r"with (.*): ([+-][0-9.]+) % samples/s", out)
    assert next(name for name, _ in gained) == "out --no-intra"
    assert [float(gain) for _, gain in gained] == sorted(
        (float(g) for _, g in gained), reverse=True
    )
    assert out.count("to 3 |") == 1


def test_shapes_of_a_file_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("\ufeff240p/51\n144p/1\n144p/1\n720p/102\n", encoding="utf-8")
    options = ["--shapes", str(shapes), "--samples", "4", "--ranks", "2"]
    assert run(["plan", "data", "--costs", str(TABLE), *options]) == 0
    assert "4 of 4 samples once each" in capsys.readouterr().out


def test_skipped_samples_are_counted_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--samples", "9", "--count", "600", "--unfit", "skip"]
    assert run(["plan", "data", "--costs", str(TABLE), *options]) == 0
    out = capsys.readouterr().out
    skipped = sum(int(n) for n in re.findall(r"skipped: (\d+) samples", out))
    left = re.findall(r"(\d+) of 600 samples once each, (\d+) left out", out)
    assert skipped > 0
    assert left == [(str(600 - skipped), str(skipped))]


def test_our_planner_takes_the_table_as_it_is() -> None:
    shapes = draw_shapes(COSTS, "short", 500)
    for plan in DataCentricPlanner(COSTS, shapes, 8, Samples(100)):
        for group, batch in plan:
            row = COSTS.batches(batch.shape, group.degree)
            assert batch.seconds == pytest.approx(row.seconds[len(batch.samples) - 1])
            assert batch.bytes <= COSTS.memory + 1
