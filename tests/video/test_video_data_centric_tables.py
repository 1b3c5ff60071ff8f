"""``gulliver train --data-centric`` on real clips: tables with broken files, and stored latents."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("av")

from gulliver.comm import World, init_world
from gulliver.data.clips import BrokenClip, Clip
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.models import STDiT2
from gulliver.video import DataConfig, TrainConfig, load_autoencoder, training
from gulliver.video.config import EncodeConfig, PlannerConfig, ValidationConfig
from gulliver.video.planned_training import PlannedTrainer, train
from gulliver.video.preparation.encoding import encode
from gulliver.video.run import Run, make_optimizer
from gulliver.video.sources import make_dataset, make_held_out
from tests.pool import Pool
from tests.video.test_data import write_table, write_video
from tests.video.test_video_data_centric import _train_double, double, samples_of
from tests.video.test_video_training import autoencoder, small

__all__ = ["autoencoder"]  # a fixture

STEPS = 4
SHAPES = ("9x32x32", "5x24x40", "1x32x32")
KINDS = (("long", 12, 32, 32), ("wide", 7, 24, 40), ("still", 1, 32, 32))
STATED = ("num_frames", "height", "width", "fps")
BROKEN = ("3.mp4", "4.mp4", "8.mp4")
"""Two that are no videos, and one that ends too soon."""


def clips(folder: Path, made: Path, broken: bool = True) -> Path:
    """A table of 16 files of three kinds, copies of those made; the last is larger than it says."""
    folder.mkdir()
    rows = []
    for number in range(16):
        name, *size = KINDS[(number + number // 6) % 3] if number < 15 else KINDS[0]
        source = name if number < 15 else "large"
        shutil.copy(made / f"{source}.mp4", folder / f"{number}.mp4")
        stated = dict(zip(STATED, map(str, (*size, 8)), strict=True))
        rows.append({"path": f"{number}.mp4", "text": f"a {name} ramp", **stated})
    for name in BROKEN[:2] if broken else ():
        (folder / name).write_bytes(b"broken since the table was made")
    if broken:
        assert rows[8]["num_frames"] == "12"
        shutil.copy(made / "short.mp4", folder / "8.mp4")
    return write_table(folder, rows)


def planned(out: Path, autoencoder: Path, table: Path | None, **changes: Any) -> TrainConfig:
    """A run of four steps, the last of them of another epoch."""
    options = {"shapes": SHAPES, "batch_size": 5, "unreadable_limit": 0.5, "windows": 2}
    data = DataConfig(table=table, **options | changes.pop("data", {}))
    held = ValidationConfig(every=STEPS, clips=3, levels=2, share=0.1)
    told = {"validation": held, "steps": STEPS, "save_every": 1, "data_centric": True}
    return small(out, autoencoder, data=data, **told | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos to copy: two encodings of the same frames need not be the same."""
    folder = tmp_path_factory.mktemp("made")
    for name, *size in (*KINDS, ("short", 2, 32, 32), ("large", 12, 40, 40)):
        write_video(folder / f"{name}.mp4", *size)
    return folder


@pytest.fixture(scope="module")
def table(made: Path) -> Path:
    return clips(made / "broken", made)


@pytest.fixture(scope="module")
def alone(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, autoencoder: Path, table: Path
) -> Path:
    """A run of one rank in float64."""
    out = tmp_path_factory.mktemp("alone") / "run"
    pool.run(_train_double, 1, planned(out, autoencoder, table), STEPS)
    return out


def _assert_like(out: Path, alone: Path, within: float = 1e-9) -> None:
    """Holds curve, samples and validation of a run against those of one rank."""
    assert samples_of(out) == samples_of(alone)
    for line, other in zip(Run(out).log.read(), Run(alone).log.read(), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=within)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=within)
    (found,), (wanted,) = (Run(out).validation.read() for out in (out, alone))
    assert found["buckets"].keys() == wanted["buckets"].keys()
    for bucket, losses in wanted["buckets"].items():
        assert found["buckets"][bucket] == pytest.approx(losses, rel=within)


def _assert_like_a_loop(out: Path, autoencoder: Path) -> None:
    """Holds the curve of a run against a loop over the single clips that can be read."""
    run, config = Run(out), Run(out).read_config()
    with double(STEPS):
        coder: Any = load_autoencoder(autoencoder)
        model = training.build_model(config, coder, run, True)
    dataset: Any = make_dataset(config.data, None, seed=config.seed)
    held: Any = make_held_out(config, dataset)
    assert len(dataset) + len(held) == 16
    text = training.ready_texts(config, run, model, (dataset, held), init_world())
    flow = training.flow_of(model, training.make_flow(config.flow, coder))
    trainer = object.__new__(PlannedTrainer)  # only what draws: nothing of how steps are run
    trainer.config, trainer.flow = config, flow
    order: Any = None
    told = coder, text, flow, config.flow, config.seed, torch.device("cpu")
    trainer.maker = training.BatchMaker(dataset, order, *told)
    optimizer, schedule = make_optimizer(config, model)
    coder.double()
    steps = samples_of(out)
    in_epoch = math.ceil(len(dataset) / config.data.batch_size)
    assert sorted(itertools.chain(*steps[:in_epoch])) == list(range(len(dataset))), "an epoch"
    lost = 0
    for number, (rows, line) in enumerate(zip(steps, run.log.read(), strict=True)):
        epoch, losses = number // in_epoch, []
        for row in rows:
            clip, bucket = dataset.read(row, derive(config.seed, 8, epoch, row)), None
            if isinstance(clip, BrokenClip):
                lost += 1
                continue
            bucket = dataset.bucket_of(row)
            latents = coder.encode(clip.video[None].double()).detach()
            shape = tuple(latents.shape[1:])
            noise, level, drop, mask = trainer._draw(epoch, row, number, shape, bucket)
            said = text.encode([clip.caption])
            told = {"fps": clip.fps, "height": bucket.height, "width": bucket.width}
            if isinstance(model, STDiT2):
                told |= {"num_frames": bucket.frames, "ar": bucket.height / bucket.width}
            mask = None if mask is None else mask[None]
            inputs = {
                **{n: torch.tensor([float(v)], dtype=torch.float64) for n, v in told.items()},
                "y": said[0].double(),
                "mask": said[1],
                "drop_caption": torch.tensor([drop]),
                "x_mask": mask,
            }
            drawn: Any = {"noise": noise[None].double(), "timesteps": level.double(), "mask": mask}
            losses.append(flow.loss(model, latents, inputs, **drawn).sum())
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert lost >= 2


def test_a_step_is_the_mean_over_its_clips_that_can_be_read(alone: Path, autoencoder: Path) -> None:
    _assert_like_a_loop(alone, autoencoder)


def _train_where_one_rank_loses(world: World, config: TrainConfig) -> list[dict]:
    """The last rank cannot read three clips that the other one of its group can."""
    read = ClipTable.read

    def unlucky(self: ClipTable, index: int, *more: Any) -> Clip | BrokenClip:
        if self.rows[index].name in BROKEN:
            return BrokenClip(index, "gone")
        return read(self, index, *more)

    if world.rank == world.size - 1:
        ClipTable.read = unlucky  # type: ignore[method-assign]
    try:
        return _train_double(world, config, STEPS)
    finally:
        ClipTable.read = read  # type: ignore[method-assign]


def test_clip_unreadable_on_one_rank_is_dropped_by_group(
    pool: Pool, tmp_path: Path, autoencoder: Path, alone: Path, made: Path
) -> None:
    whole = clips(tmp_path / "clips", made, broken=False)
    costs = PlannerConfig(costs=alone / "costs.json", intra=False, degree=2)
    config = planned(tmp_path / "run", autoencoder, whole, planner=costs)
    pool.run(_train_where_one_rank_loses, 2, config)
    _assert_like(config.out, alone)


def test_kept_latents_train_what_their_clips_train(
    pool: Pool, tmp_path: Path, autoencoder: Path, alone: Path, table: Path, full: bool
) -> None:
    kept = tmp_path / "kept"
    encode(EncodeConfig(table, autoencoder, kept, shapes=SHAPES, windows=2))
    latents = planned(tmp_path / "latents", autoencoder, None, data={"encoded": kept})
    pool.run(_train_double, 1, latents, STEPS)
    # They are kept in float32, and encoded in float64 there.
    _assert_like(latents.out, alone, within=1e-4)
    costs = latents.out / "costs.json"
    values = json.loads(costs.read_text())
    assert values["fit"]["pixel_s"] == 0.0
    assert "stored latents" in json.dumps(values["fingerprint"])
    if full:
        several = replace(latents, out=tmp_path / "several", planner=PlannerConfig(costs=costs))
        pool.run(_train_double, 2, several, STEPS)
        _assert_like(several.out, latents.out)
    with pytest.raises(GulliverError, match=r"--planner\.costs"):
        train(planned(tmp_path / "other", autoencoder, table, planner=PlannerConfig(costs=costs)))


def test_broken_and_misstated_clips_are_named_and_limited(
    tmp_path: Path, autoencoder: Path, table: Path, capsys: pytest.CaptureFixture
) -> None:
    config = planned(tmp_path / "run", autoencoder, table)
    train(config)
    told = " ".join(capsys.readouterr().err.split())
    assert "2 clips could not be read" in told
    assert "8.mp4: has 2 of the 9 " in told
    assert "15.mp4: 40x40, but the table has 32x32" in told
    few = replace(config, out=tmp_path / "few", data=replace(config.data, unreadable_limit=0.1))
    with pytest.raises(GulliverError, match=r"2 of the \d+ clips of epoch 0 could not be read"):
        train(few)
    assert 1 <= len(Run(few.out).log.read()) < STEPS


def test_steps_without_a_clip_are_passed_over_until_the_data_is_gone(
    pool: Pool, tmp_path: Path, autoencoder: Path, made: Path
) -> None:
    whole = clips(tmp_path / "clips", made, broken=False)
    config = planned(
        tmp_path / "run", autoencoder, whole, validation=ValidationConfig(),
        data={"batch_size": 1, "unreadable_limit": 1.0}, steps=8,
    )  # fmt: skip
    for number in range(14):
        (tmp_path / "clips" / f"{number}.mp4").write_bytes(b"gone")
    logs = [
        pool.run(_train_double, ranks, replace(config, out=tmp_path / str(ranks)), 2)[0]
        for ranks in (1, 2)
    ]
    # Of 16 steps of one clip each two are any.
    assert [[line["step"] for line in log] for log in logs] == [[1, 2]] * 2
    for line, other in zip(*logs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
    for number in range(14, 16):
        (tmp_path / "clips" / f"{number}.mp4").write_bytes(b"gone")
    more = replace(config, out=tmp_path / "1", resume=True)
    with pytest.raises(GulliverError, match="10 batches in a row had no clip") as stopped:
        train(more)
    assert "training stopped at step 2" in str(stopped.value)
