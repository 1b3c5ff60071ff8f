"""The part of `benchmarks.video_data` about kept latents: kills, and what a step of training gains.

    python -m benchmarks._video_encode             # this part alone

Digits are written as videos. They are encoded by calls that are killed
(`tests.video.encode_killed`), and
the folder compared with that of a call that was not; then the same run is trained on the videos and
on the latents, a few steps each in turns, from reading a batch to the end of its step.

Two pairs: the digits' model with the digits' autoencoder, and an STDiT3 S/2 with the autoencoder of
Open-Sora 1.2 at a quarter of its width. Weights are drawn: what a step costs does not depend on
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.video.video_steps import one_step

from benchmarks._harness import Bar, Report, Spread, alternate, at_least, at_most, finish
from gulliver.checkpoint import save_huggingface
from gulliver.comm import init_world
from gulliver.data import Bucket
from gulliver.models import PipelineAutoencoder, VideoAutoencoder
from gulliver.options import resolved
from gulliver.video import DataConfig, TrainConfig, Trainer, load_autoencoder
from gulliver.video.config import AutoencoderConfig, EncodeConfig, ModelConfig, OptimizerConfig
from gulliver.video.digits import MovingDigits
from gulliver.video.media import write_clip
from gulliver.video.preparation.encoding import encode
from gulliver.video.public_models import save_autoencoder
from gulliver.video.run import Run
from gulliver.video.sources import make_dataset, with_encoded

CLIPS, BATCH = 24, 4
KILLS, RANKS = 20, 2
STEPS, ROUNDS = 2, 3
FASTER = 1.3
ROUNDING = 1e-5
"""Largest difference of losses, in shares: kernels sum otherwise for another number of clips."""


@dataclass(frozen=True)
class Pair:
    """A model and its autoencoder, and the clips that they are tried on."""

    name: str
    shape: Bucket
    autoencoder: Path
    model: ModelConfig


def encode_part(folder: Path, rows: list[tuple[str, ...]] | None = None) -> list[Bar]:
    """Encodes with kills, and trains on clips and on latents in turns; returns the bars.

    Args:
        folder: folder for clips, latents and runs.
        rows: list that is given the rows of a table: what, on clips, on latents, ratio.
    """
    bars: list[Bar] = []
    rows = [] if rows is None else rows
    for pair in _pairs(folder):
        options = EncodeConfig(
            table=_clips(folder / pair.name, pair.shape),
            autoencoder=pair.autoencoder,
            out=folder / pair.name / "kept",
            shapes=(str(pair.shape),),
            shard_clips=4,
        )
        encode(options)
        if not bars:
            bars.append(at_least(f"same bytes after {KILLS} kills", _killed(options), 1.0))
        found, error = _steps(folder / pair.name, pair, options)
        ratio = found["clips"].median / found["latents"].median
        bars.append(at_least(f"step on latents, {pair.name}: times faster", ratio, FASTER))
        bars.append(at_most(f"loss curve, {pair.name}: largest difference", error, ROUNDING))
        told = [f"{found[way].median:.3f} s" for way in ("clips", "latents")]
        rows.append((f"step of {BATCH} clips {pair.shape}, {pair.name}", *told, f"{ratio:.2f}"))
    return bars


def _pairs(folder: Path) -> Iterator[Pair]:
    torch.manual_seed(0)
    save_autoencoder(folder / "small.safetensors", VideoAutoencoder())
    yield Pair("digits", Bucket(13, 32, 32), folder / "small.safetensors", ModelConfig())
    spatial: dict[str, Any] = {"block_out_channels": (32, 64, 128, 128)}
    public = PipelineAutoencoder(spatial=spatial, temporal={"filters": 32})
    save_huggingface(public, folder / "vae")
    yield Pair("public", Bucket(17, 64, 64), folder / "vae", ModelConfig(size="S/2"))


def _clips(folder: Path, shape: Bucket) -> Path:
    """Writes digits as videos, with a table."""
    folder.mkdir(parents=True)
    digits = MovingDigits(length=CLIPS, shapes={shape: 1.0})
    rows = ["path,text"]
    for number in range(CLIPS):
        clip = digits[number]
        write_clip(folder / f"{number}.mp4", clip.video, clip.fps)
        rows.append(f"{number}.mp4,{clip.caption}")
    table = folder / "clips.csv"
    table.write_text("\n".join(rows))
    return table


def _killed(options: EncodeConfig) -> float:
    """Encodes with kills, on one rank and on two; the share of folders with the same bytes."""
    whole, same = _bytes_of(options.out), 0
    for ranks in range(1, RANKS + 1):
        broken = replace(options, out=options.out.with_name(f"killed{ranks}"))
        told = json.dumps(resolved(broken)), str(KILLS), str(ranks), str(ranks)
        command = [sys.executable, "-m", "tests.video.encode_killed", *told]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        same += _bytes_of(broken.out) == whole
    return same / RANKS


def _bytes_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _steps(folder: Path, pair: Pair, options: EncodeConfig) -> tuple[dict[str, Spread], float]:
    """Trains on clips and on latents in turns; seconds per step, and how far losses differ."""
    config = TrainConfig(
        steps=10_000,
        data=DataConfig(batch_size=BATCH),
        model=pair.model,
        optimizer=OptimizerConfig(warmup=1, learning_rate=1e-4),
    )
    table = replace(config.data, table=options.table, shapes=options.shapes, windows=1)
    coder = AutoencoderConfig(path=pair.autoencoder)
    ways = {
        "clips": replace(config, out=folder / "clips", data=table, autoencoder=coder),
        "latents": replace(
            config, out=folder / "latents", data=replace(config.data, encoded=options.out)
        ),
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    runs = {name: _runner(way, losses[name]) for name, way in ways.items()}
    found = alternate(runs, ROUNDS)
    both = zip(losses["clips"], losses["latents"], strict=True)
    return found, max(abs(one - other) / abs(one) for one, other in both)


def _runner(config: TrainConfig, losses: list[float]) -> Callable[[], float]:
    """Returns a function that runs a few steps and returns the seconds of one."""
    config = with_encoded(config)
    assert config.autoencoder.path is not None, "of the latents, or named"
    autoencoder = load_autoencoder(config.autoencoder.path, dtype=torch.float32)
    dataset: Any = make_dataset(config.data, None, False, config.seed, autoencoder)
    config.out.mkdir(parents=True)
    trainer = Trainer(config, Run(config.out), dataset, autoencoder, init_world())
    batches = trainer.maker.batches()

    def run() -> float:
        started = time.perf_counter()
        for _ in range(STEPS):
            losses.append(one_step(trainer, next(batches))["loss"])
        return (time.perf_counter() - started) / STEPS

    return run


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        columns = "what", "on clips", "on latents", "ratio"
        report = Report("video_encode", "Kept latents", columns)
        report.bars = encode_part(Path(folder), report.rows)  # type: ignore[arg-type]
    finish(report)


if __name__ == "__main__":
    main()
