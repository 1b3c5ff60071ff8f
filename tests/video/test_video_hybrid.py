"""The training job with one model on several ranks: the same run on any grid, and after any end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gulliver.checkpoint import load
from gulliver.comm import World
from gulliver.video import DataConfig, TrainConfig, Trainer, VideoModel, training
from gulliver.video import planned_training as runs
from gulliver.video.batches import VideoBatch
from gulliver.video.config import ValidationConfig
from gulliver.video.planned_training import train
from gulliver.video.run import Run
from tests.covering import some
from tests.pool import Pool
from tests.video.test_video_training import (
    autoencoder,
    final_tensors,
    options_of,
    small,
)

__all__ = ["autoencoder"]  # a fixture

STEPS = 5


def doubled(batch: VideoBatch) -> VideoBatch:
    """The same in float64."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    floats = {
        name: value.double()
        for name, value in tensors.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return replace(batch, **floats)


class DoubleTrainer(Trainer):
    """Trains in float64, and wishes to stop after a step."""

    last = STEPS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Clips are encoded by shares: in float32 they would be rounded otherwise in another share.
        autoencoder = self.maker.autoencoder.double()
        encode = autoencoder.encode
        vars(autoencoder)["encode"] = lambda videos: encode(videos.double())

    def forward_backward(self, batch: VideoBatch) -> Mapping[str, Any] | None:
        self.stop.wanted = self.stop.wanted or self.step_number + 1 == self.last
        return super().forward_backward(doubled(batch))

    def _loss_sum(self, batch: VideoBatch) -> Tensor:
        return super()._loss_sum(doubled(batch))


@contextmanager
def double(last: int):
    """Runs of this process are in float64 and end after a step."""
    build, trainer = training.build_model, runs.Trainer
    kind = type("DoubleTrainer", (DoubleTrainer,), {"last": last})
    training.build_model = lambda *args: build(*args).double()
    runs.Trainer = kind
    try:
        yield
    finally:
        training.build_model, runs.Trainer = build, trainer


def _train_double(world: World, config: TrainConfig, last: int = STEPS) -> list[dict]:
    with double(last):
        train(config)
    return Run(config.out).log.read()


def _errors(out: Path, expected: Path) -> dict[str, float]:
    """Of the model and the average: the largest difference, by the largest element of all."""
    ours, theirs = final_tensors(out), final_tensors(expected)
    assert ours.keys() == theirs.keys()
    return {
        entry: max(
            float((ours[name] - theirs[name]).abs().max()) / float(theirs[name].abs().max() + 1e-3)
            for name in theirs
            if name.startswith(entry) and theirs[name].is_floating_point()
        )
        for entry in ("model", "ema", "optimizer")
    }


def _validated(out: Path, autoencoder: Path, **changes: Any) -> TrainConfig:
    held_out = ValidationConfig(every=STEPS, clips=3, levels=2)
    return small(out, autoencoder, steps=STEPS, validation=held_out, **changes)


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "sp 2": (2, {"sp_size": 2}),
    "tp 2": (2, {"tp_size": 2}),
    "tp 2 x sp 2, ZeRO 2": (4, {"tp_size": 2, "sp_size": 2, "stage": 2}),
    "sp 2 x data 2": (4, {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
    "tp 2 x data 2, accumulating": (4, {"tp_size": 2, "accumulate": 2}),
    "pp 2": (2, {"pp_size": 2}),
    "pp 2 x data 2, ZeRO 2": (4, {"pp_size": 2, "stage": 2}),
    "pp 2 x tp 2": (4, {"pp_size": 2, "tp_size": 2}),
    "pp 2 x sp 2": (4, {"pp_size": 2, "sp_size": 2}),
}


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory, autoencoder: Path) -> Path:
    """A run of one rank in float64."""
    out = tmp_path_factory.mktemp("alone") / "run"
    pool.run(_train_double, 1, _validated(out, autoencoder))
    return out


@pytest.mark.parametrize(
    "grid",
    some(
        list(GRIDS),
        ["tp 2 x sp 2, ZeRO 2"],
    ),
)
def test_a_grid_trains_the_model_of_one_rank(
    pool: Pool, tmp_path: Path, autoencoder: Path, alone: Path, grid: str
) -> None:
    ranks, changes = GRIDS[grid]
    config = _validated(tmp_path / "run", autoencoder, **changes)
    log = pool.run(_train_double, ranks, config)[0]
    (held_out,), (other,) = (Run(out).validation.read() for out in (config.out, alone))
    for bucket, losses in other["buckets"].items():
        assert held_out["buckets"][bucket] == pytest.approx(losses, rel=1e-9)
    expected = Run(alone).log.read()
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    for line, other in zip(log, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)
    errors = _errors(config.out, alone)
    assert max(errors.values()) <= 1e-9, errors


def test_a_run_goes_on_at_other_degrees(
    pool: Pool, tmp_path: Path, autoencoder: Path, alone: Path
) -> None:
    config = small(tmp_path / "run", autoencoder, steps=STEPS, save_every=100)
    legs = [
        (4, 2, {"tp_size": 2, "sp_size": 2}),
        (2, 3, {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}),
        (2, 4, {"pp_size": 2, "stage": 2}),
        (2, STEPS, {}),
    ]
    log: list[dict] = []
    for ranks, last, changes in legs:
        resumed = replace(config, resume=last > 2, **changes)
        log = pool.run(_train_double, ranks, resumed, last)[0]
        assert log[-1]["step"] == last
    for line, other in zip(log, Run(alone).log.read(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
    errors = _errors(config.out, alone)
    assert max(errors.values()) <= 1e-9, errors


def test_model_trained_with_tensor_ranks_generates_unsharded(
    pool: Pool, tmp_path: Path, autoencoder: Path
) -> None:
    config = small(tmp_path / "run", autoencoder, steps=2, tp_size=2)
    pool.run(_train, 4, config)
    average = load(Run(config.out).newest_checkpoint()).values["ema"]
    model = VideoModel.load(config.out, torch.device("cpu")).model
    for name, value in model.state_dict().items():
        assert torch.equal(value, average[name]), name


def _train(world: World, config: TrainConfig) -> list[dict]:
    train(config)
    return Run(config.out).log.read()


def _train_with_clips_of_one_rank(world: World, config: TrainConfig) -> list[dict]:
    """Rank 1 cannot read two clips that the other rank of its model can."""
    from gulliver.data.clips import BrokenClip
    from gulliver.data.table import ClipTable

    read = ClipTable.read

    def unlucky(self: ClipTable, index: int, *more):  # type: ignore[no-untyped-def]
        return BrokenClip(index, "gone") if index < 2 else read(self, index, *more)

    if world.rank == 1:
        ClipTable.read = unlucky  # type: ignore[method-assign]
    try:
        return _train_double(world, config)
    finally:
        ClipTable.read = read  # type: ignore[method-assign]


def test_ranks_of_one_model_train_on_what_both_can_read(
    pool: Pool, tmp_path: Path, autoencoder: Path
) -> None:
    from tests.video.test_data import write_table, write_video

    names = [f"{number}.mp4" for number in range(4)]
    for name in names:
        write_video(tmp_path / name, 5, 32, 32)
    table = write_table(tmp_path, [{"path": name, "text": "a ramp"} for name in names])
    data = DataConfig(table=table, shapes=("5x32x32",), batch_size=2, unreadable_limit=0.5)
    config = small(tmp_path / "run", autoencoder, data=data, steps=4, sp_size=2)
    log = pool.run(_train_with_clips_of_one_rank, 2, config)[0]
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert all(line["loss"] > 0.1 for line in log)


def test_ranks_that_make_no_whole_models_are_refused_before_any_starts(
    tmp_path: Path, autoencoder: Path, capsys: pytest.CaptureFixture
) -> None:
    from gulliver.cli.dispatch import main

    options = options_of(small(tmp_path / "run", autoencoder, ranks=3, tp_size=2))
    with pytest.raises(SystemExit):
        main(options)
    assert (
        "= 2 ranks for one model, which does not divide the world of 3" in capsys.readouterr().err
    )
