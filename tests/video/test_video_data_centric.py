"""``gulliver train --data-centric``: the run of one process, on any ranks and after any end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware.samples import read_samples
from gulliver.video import DataConfig, TrainConfig, training
from gulliver.video import planned_training as runs
from gulliver.video.batches import VideoBatch
from gulliver.video.config import PlannerConfig, ValidationConfig
from gulliver.video.planned_training import PlannedTrainer, budget_of, train
from gulliver.video.run import Run
from tests.pool import Pool
from tests.video.test_video_hybrid import doubled
from tests.video.test_video_training import autoencoder, small

__all__ = ["autoencoder"]  # a fixture

STEPS = 5


class DoublePlanned(PlannedTrainer):
    """Trains in float64, notes its samples, and wishes to stop after a step."""

    last = STEPS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        coder: Any = self.maker.autoencoder.double()  # pyright: ignore
        encode = coder.encode
        vars(coder)["encode"] = lambda videos: encode(videos.double())

    def _clips(self, loaded: Any, epoch: int, step: int) -> VideoBatch:
        return doubled(super()._clips(loaded, epoch, step))

    def _loss_sum(self, batch: VideoBatch) -> Any:
        return super()._loss_sum(doubled(batch))

    def forward_backward(self, batch: Any) -> Mapping[str, Any]:
        self.stop.wanted = self.stop.wanted or self.step_number + 1 == self.last
        return super().forward_backward(batch)

    def after_update(self) -> Mapping[str, float]:
        batch = self._running
        if self.world.is_main:
            told = {
                "step": self.step_number,
                "samples": sorted(n for _, micro in batch.plan for n in micro.samples),
                "degrees": [group.degree for group in batch.plan.all_groups],
            }
            with (self.run.folder / "samples_of_steps").open("a") as file:
                file.write(json.dumps(told) + "\n")
        return super().after_update()


@contextmanager
def double(last: int):
    """Runs of this process are in float64 and end after a step."""
    build, kind = training.build_model, runs.PlannedTrainer
    training.build_model = lambda *args: build(*args).double()
    runs.PlannedTrainer = type("DoublePlanned", (DoublePlanned,), {"last": last})
    try:
        yield
    finally:
        training.build_model, runs.PlannedTrainer = build, kind


def _train_double(world: World, config: TrainConfig, last: int = STEPS) -> list[dict]:
    with double(last):
        train(config)
    return Run(config.out).log.read()


def samples_of(out: Path) -> list[list[int]]:
    lines = (out / "samples_of_steps").read_text().splitlines()
    return [json.loads(line)["samples"] for line in lines]


def uneven(out: Path, autoencoder: Path, **changes: Any) -> TrainConfig:
    """A run of five steps, the last two of another epoch."""
    data = DataConfig(shapes=("9x32x32:2", "5x24x40:1", "1x32x32:1"), batch_size=7, clips=20)
    planner = changes.pop("planner", PlannerConfig())
    return small(
        out, autoencoder, steps=STEPS, data_centric=True, data=data, planner=planner, **changes
    )


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory, autoencoder: Path) -> Path:
    """A run of one rank in float64."""
    out = tmp_path_factory.mktemp("alone") / "run"
    held_out = ValidationConfig(every=STEPS, clips=2, levels=2)
    pool.run(_train_double, 1, uneven(out, autoencoder, validation=held_out))
    return out


def _assert_like(out: Path, alone: Path) -> None:
    """Holds curve, samples and validation of a run against those of one rank."""
    assert samples_of(out) == samples_of(alone)
    assert sorted(itertools.chain(*samples_of(out)[:3])) == list(range(20)), "an epoch"
    for line, other in zip(Run(out).log.read(), Run(alone).log.read(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    (found,), (wanted,) = (Run(out).validation.read() for out in (out, alone))
    for bucket, losses in wanted["buckets"].items():
        assert found["buckets"][bucket] == pytest.approx(losses, rel=1e-9)


def test_a_stopped_run_goes_on_with_other_ranks_and_without_those_inside(
    pool: Pool, tmp_path: Path, autoencoder: Path, alone: Path
) -> None:
    costs = PlannerConfig(costs=alone / "costs.json")
    held_out = ValidationConfig(every=STEPS, clips=2, levels=2)
    config = uneven(tmp_path / "run", autoencoder, planner=costs, stage=2, validation=held_out)
    for ranks, inside, last in (
        (4, {"tp_size": 2}, 1),
        (4, {"pp_size": 2}, 2),
        (2, {}, 3),
        (3, {}, STEPS),
    ):
        part = replace(config, resume=last > 1, **inside)
        pool.run(_train_double, ranks, part, last)
    _assert_like(config.out, alone)


def test_costs_and_clips_that_do_not_fit_are_refused(
    tmp_path: Path, autoencoder: Path, alone: Path, capsys: pytest.CaptureFixture
) -> None:
    values = json.loads((alone / "costs.json").read_text())
    values["fingerprint"]["machine"]["processor"] = "another"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values))
    config = uneven(tmp_path / "run", autoencoder, planner=PlannerConfig(costs=other))
    with pytest.raises(GulliverError, match=r"--planner.costs .*is for another machine"):
        train(config)
    with pytest.raises(GulliverError, match=r"--planner.costs .*No such file"):
        train(replace(config, planner=PlannerConfig(costs=tmp_path / "none.json")))
    costs = alone / "costs.json"
    saved = read_samples(costs)
    assert {str(shape) for shape in saved.shapes} == {"9x32x32", "5x24x40", "1x32x32"}
    fit = json.loads(costs.read_text())["fit"]
    # Room for stills, and not for the longest clips.
    room = fit["states"] + 20 * (fit["token_bytes"] + 6 * fit["block_bytes"])
    few = PlannerConfig(costs=costs, memory=room / 2**30)
    with pytest.raises(GulliverError, match=r"9x32x32, 48 tokens.*does not fit .* at any degree"):
        train(replace(config, planner=few))
    skipping = replace(config, planner=replace(few, unfit="skip"), steps=1)
    skipping = replace(skipping, data=replace(config.data, batch_size=2))
    assert train(skipping).finished
    assert "fit at no degree are skipped" in " ".join(capsys.readouterr().err.split())


def test_a_budget_is_of_samples_tokens_or_seconds() -> None:
    assert str(budget_of(TrainConfig())) == "32 samples a step"
    assert "9 tokens" in str(budget_of(TrainConfig(planner=PlannerConfig(tokens=9))))
    assert "2 s" in str(budget_of(TrainConfig(planner=PlannerConfig(seconds=2.0))))
