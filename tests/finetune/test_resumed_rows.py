"""Resumed runs refuse data whose rows were reordered or replaced: their positions count rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("av")

from gulliver.dreambooth.trainer import dreambooth
from gulliver.errors import GulliverError
from gulliver.models import VideoAutoencoder
from gulliver.video import DataConfig, TrainAutoencoderConfig, TrainConfig
from gulliver.video.autoencoder_config import AutoencoderDataConfig
from gulliver.video.autoencoders.job import run_autoencoder
from gulliver.video.config import EncodeConfig
from gulliver.video.planned_training import train
from gulliver.video.preparation.encoding import encode
from gulliver.video.public_models import save_autoencoder
from gulliver.video.run import Run
from tests.video.test_data import write_table, write_video

SHAPES = ("5x16x16",)
"""Makes the data and the first step of a run in a folder; returns its resumption."""


def rows_of(change: str) -> list[dict[str, str]]:
    """Rows of a table of six clips, as they were at first or changed."""
    rows = [{"path": f"{n}.mp4", "text": f"clip {n}"} for n in range(6)]
    if change == "reordered":
        rows[1], rows[4] = rows[4], rows[1]
    if change == "replaced":
        rows[2] = {"path": "other.mp4", "text": "clip 2"}
    return rows


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    for name in [*map(str, range(6)), "other"]:
        write_video(folder / f"{name}.mp4", 6, 16, 16)
    torch.manual_seed(0)
    save_autoencoder(folder / "coder.safetensors", VideoAutoencoder(width=8))
    return folder


def video(films: Path, out: Path, change: str, **options: Any) -> None:
    table = write_table(films, rows_of(change))
    data: dict[str, Any] = {"table": table, "shapes": SHAPES, "batch_size": 2}
    config = TrainConfig(out=out, steps=1, save_every=1, data=DataConfig(**data), **options)
    coder = replace(config.autoencoder, path=films / "coder.safetensors")
    train(replace(config, autoencoder=coder, resume=bool(change)))


def planned(films: Path, out: Path, change: str) -> None:
    video(films, out, change, data_centric=True)


def kept(films: Path, out: Path, change: str) -> None:
    """Trains on kept latents alone, which are made again of the changed table."""
    table, folder = write_table(films, rows_of(change)), out.parent / f"latents-{change}"
    coder = films / "coder.safetensors"
    encode(EncodeConfig(table=table, autoencoder=coder, out=folder, shapes=SHAPES))
    link = out.parent / "kept"
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    data = DataConfig(encoded=link, batch_size=2)
    train(TrainConfig(out=out, steps=1, save_every=1, data=data, resume=bool(change)))


def autoencoder(films: Path, out: Path, change: str) -> None:
    table = write_table(films, rows_of(change))
    # Pictures and repeats wrap the table twice.
    data = AutoencoderDataConfig(
        table=table, shapes=SHAPES, batch_size=2, repeats=2, image_share=0.5, held_out_clips=0.3
    )
    config = TrainAutoencoderConfig(out=out, steps=1, save_every=1, data=data)
    run_autoencoder(replace(config, resume=bool(change)))


@pytest.mark.parametrize(
    "begin", [video, pytest.param(planned, marks=pytest.mark.full), kept, autoencoder]
)
def test_tables_with_other_rows_are_refused(films: Path, tmp_path: Path, begin: Any) -> None:
    begin(films, tmp_path / "run", "")
    for change in ("reordered", "replaced"):
        named = "kept" if begin is kept else "clips.csv"
        with pytest.raises(GulliverError, match=rf"rows of \S*{named}\b.*--out"):
            begin(films, tmp_path / "run", change)
    begin(films, tmp_path / "run", "same")  # put back
    assert Run(tmp_path / "run").log.read()[-1]["step"] == 1


def test_subjects_with_other_pictures_are_refused(tmp_path: Path) -> None:
    from tests.dreambooth.test_dreambooth_mistakes import _config, save_sd, save_subject, unplanned

    subject = save_subject(tmp_path / "subject")
    config = _config(save_sd(tmp_path / "sd"), subject, tmp_path / "run")
    first, second = (subject / f"{n}.png" for n in (0, 1))
    whole = first.read_bytes(), second.read_bytes()
    with unplanned():
        dreambooth(config)
        for change in ("reordered", "replaced"):
            first.write_bytes(whole[1])
            second.write_bytes(whole[0])
            if change == "replaced":
                second.write_bytes(whole[1])
                first.write_bytes(whole[0])
                with Image.open(second) as picture:
                    picture.transpose(Image.Transpose.ROTATE_180).save(second)
            with pytest.raises(GulliverError, match="--subject"):
                dreambooth(replace(config, resume=True))
