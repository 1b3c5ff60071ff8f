"""Held-out losses against a plain recomputation, and training on dealt buckets, from end to end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gulliver.checkpoint import load
from gulliver.data import Bucket
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.models import VideoAutoencoder
from gulliver.video import DataConfig, TrainConfig
from gulliver.video.config import FlowConfig, OptimizerConfig, ValidationConfig
from gulliver.video.digits import MovingDigits
from gulliver.video.planned_training import train
from gulliver.video.run import Run
from gulliver.video.sources import make_held_out
from gulliver.video.text_encoders import WordEncoder
from gulliver.video.training import build_model
from tests.pool import Pool
from tests.video.test_data import write_table, write_video
from tests.video.test_video_training import _train_in_world, assert_same_bytes, autoencoder, small

__all__ = ["autoencoder"]  # a fixture

SHAPES = ("9x32x32:2", "1x32x32:1")


def held(out: Path, autoencoder: Path, **changes: Any) -> TrainConfig:
    options = {
        "steps": 3,
        "save_every": 2,
        "data": DataConfig(shapes=SHAPES, batch_size=4, clips=40),
        "optimizer": OptimizerConfig(warmup=1),
        "flow": FlowConfig(masks=("image_head:0.3", "extend:0.3"), shift_by_size=True),
        "validation": ValidationConfig(every=2, clips=5, levels=3),
    }
    return small(out, autoencoder, **options | changes)


def test_held_out_losses_are_those_of_their_definition_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, autoencoder: Path
) -> None:
    config = held(tmp_path / "run", autoencoder)
    train(config)
    lines = Run(config.out).validation.read()
    assert [line["step"] for line in lines] == [2, 3]
    coder = VideoAutoencoder(width=8)
    torch.manual_seed(0)
    coder = VideoAutoencoder(width=8).eval()
    model = build_model(config, coder)
    load(Run(config.out).newest_checkpoint(), {"model": model})
    model = model.double().eval()
    dataset = make_held_out(config, None)
    assert isinstance(dataset, MovingDigits)
    text = WordEncoder(config.model.text_channels, config.model.text_length)
    assert set(lines[-1]["buckets"]) == {"9x32x32", "1x32x32"}
    with torch.no_grad():
        for bucket in (Bucket(9, 32, 32), Bucket(1, 32, 32)):
            members = [n for n in range(len(dataset)) if dataset.bucket_of(n) == bucket][:5]
            assert len(members) == 5
            x0 = coder.encode(dataset.batch(members)).double()
            noise = torch.stack(
                [
                    torch.randn(
                        x0.shape[1:],
                        generator=torch.Generator().manual_seed(derive(0, 1, 2**40, index)),
                    )
                    for index in members
                ]
            ).double()
            y, mask = text.encode([dataset.caption(n) for n in members])
            told = {"y": y.double(), "mask": mask, "fps": torch.full((5,), 8.0).double()}
            told |= {side: torch.full((5,), 32.0).double() for side in ("height", "width")}
            for number, t in enumerate((0.25, 0.5, 0.75)):
                x = (1 - t) * x0 + t * noise
                out = model(x, torch.full((5,), 1000 * t).double(), **told)
                error = (out[:, : x0.shape[1]] - (x0 - noise)).square().mean()
                found = lines[-1]["buckets"][str(bucket)][number]
                assert found == pytest.approx(float(error), rel=1e-4)
    two = replace(config, out=tmp_path / "two")
    pool.run(_train_in_world, 2, two)
    for one, other in zip(lines, Run(two.out).validation.read(), strict=True):
        for name, losses in one["buckets"].items():
            assert other["buckets"][name] == pytest.approx(losses, rel=1e-4)
    # Validating changes nothing of what is learnt.
    plain = replace(config, out=tmp_path / "plain", validation=ValidationConfig())
    train(plain)
    assert_same_bytes(plain.out, config.out)


def _clips(folder: Path) -> Path:
    """A table of 16 files of four kinds."""
    for name, frames, side in (("a", 6, 48), ("b", 9, 48), ("c", 9, 32), ("d", 1, 48)):
        write_video(folder / f"{name}.mp4", frames, side, side)
    rows = []
    for number, name in enumerate("abcabdabcbbaabcd"):
        (folder / f"{number}.mp4").write_bytes((folder / f"{name}.mp4").read_bytes())
        told = {"path": f"{number}.mp4", "text": f"a ramp {number}"}
        rows.append({**told, "aes": "5.2", "flow": "3", "cmotion": ""})
    return write_table(folder, rows)


def test_a_table_with_a_bucket_configuration_is_trained_on_and_resumed(
    tmp_path: Path, autoencoder: Path, capsys: pytest.CaptureFixture
) -> None:
    table, buckets = _clips(tmp_path), tmp_path / "buckets.json"
    config = {"48px": {"1": [0.5, 2], "5": [0.6, 2]}, "32px": {"1": [1.0, 2], "8": [0.7, 3]}}
    buckets.write_text(json.dumps(config))
    data = DataConfig(table=table, buckets=buckets, bucket_ranks=2, scores="1.3")
    wordy = replace(TrainConfig().model, text_length=24)
    whole = held(tmp_path / "whole", autoencoder, data=data, steps=9, model=wordy)
    whole = replace(whole, validation=ValidationConfig(every=4, share=0.2, levels=2))
    train(replace(whole, save_every=4))
    told = capsys.readouterr().err
    assert "the first epoch has" in told
    assert "left out" in told
    assert "held-out loss" in told
    part = replace(whole, out=tmp_path / "part")
    shutil.copytree(whole.out, part.out)
    # Back to the fourth step, which another epoch deals anew.
    train(replace(part, resume=True, resume_step=4))
    assert_same_bytes(part.out, whole.out)
    logs = [Run(one.out).validation.read() for one in (whole, part)]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [4, 8, 9]
    table_read = ClipTable(table, [Bucket(5, 32, 32)], scores="1.3")
    assert table_read.rows[0].text == (
        "a ramp 0. The aesthetic score is fair. The motion strength is fair."
    )


def test_held_out_rows_do_not_depend_on_the_others(tmp_path: Path) -> None:
    table = _clips(tmp_path)
    lines = table.read_text().splitlines()
    whole = ClipTable(table, [Bucket(5, 16, 16)])
    held = whole.hold_out(0.4, seed=3)
    names = {row.name for row in held.rows}
    assert names
    assert names.isdisjoint(row.name for row in whole.rows)
    assert len(held) + len(whole) == len(lines) - 1 - 2  # the stills fit no bucket
    table.write_text("\n".join([lines[0], *lines[3:]]) + "\n")
    fewer = ClipTable(table, [Bucket(5, 16, 16)])
    assert {row.name for row in fewer.hold_out(0.4, seed=3).rows} <= names
    with pytest.raises(GulliverError, match="share of 1e-09"):
        fewer.hold_out(1e-9, seed=3)
