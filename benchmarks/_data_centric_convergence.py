"""Trains the moving digits on mixed sizes, in planned steps and in batches of one shape."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from gulliver.video import DataConfig, Request, TrainConfig, VideoModel
from gulliver.video.config import AutoencoderConfig, OptimizerConfig, ValidationConfig, parse_shapes
from gulliver.video.digits import sentence, train_judges
from gulliver.video.planned_training import train

SHAPES = ("1x16x16:4", "1x16x24:2", "1x24x24:2", "5x16x16:2")
WAYS = ("plain", "data-centric")
CLIPS = 80
"""Judged clips of a shape."""


@dataclass(frozen=True)
class Trained:
    """One run.

    Attributes:
        way: plain or data-centric.
        seed: seed of the run.
        losses: training loss of every tenth of the steps.
        held_out: loss of held-out clips at the end, the mean over shapes.
        digits: share of made clips with the right digit, all shapes alike.
        seconds: wall time of its steps, over all calls.
        processor: seconds of processors in all calls, which others on the machine lengthen less.
    """

    way: str
    seed: int
    losses: list[float]
    held_out: float
    digits: float
    seconds: float
    processor: float


def runs(folder: Path, seeds: int, steps: int, rate: float) -> list[Trained]:
    """Trains and judges each way with each seed; goes on where an earlier call was stopped.

    Args:
        folder: folder of the runs and of what they gave.
        seeds: number of seeds.
        steps: optimizer steps of each.
        rate: peak learning rate of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    if not (folder / "coder" / "checkpoints").is_dir():  # once, and in nobody's seconds
        train(_config(folder / "coder", "plain", 0, 1, rate))
    for seed in range(seeds):
        # In turns, so that a busy machine is charged to both.
        for way in WAYS if seed % 2 == 0 else reversed(WAYS):
            found.append(one_run(folder, way, seed, steps, rate))
    return found


def one_run(folder: Path, way: str, seed: int, steps: int, rate: float) -> Trained:
    """Trains and judges one way with one seed, or reads what it gave before."""
    name = f"{way}-{seed}-{steps}-{rate:g}"
    kept = folder / f"{name}.json"
    if not kept.is_file():
        autoencoder = AutoencoderConfig(path=folder / "coder" / "autoencoder.safetensors")
        config = replace(_config(folder / name, way, seed, steps, rate), autoencoder=autoencoder)
        kept.write_text(json.dumps(vars(_run(config, way, seed))))
    return Trained(**json.loads(kept.read_text()))


def spread(values: list[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")


def _config(out: Path, way: str, seed: int, steps: int, rate: float) -> TrainConfig:
    return TrainConfig(
        out=out,
        steps=steps,
        seed=seed,
        ranks=1,
        save_every=100,
        log_every=1,
        resume=True,
        data_centric=way == "data-centric",
        data=DataConfig(shapes=SHAPES, batch_size=48, clips=48 * steps),
        autoencoder=AutoencoderConfig(steps=250),
        optimizer=OptimizerConfig(learning_rate=rate, ema=0.98),
        validation=ValidationConfig(every=steps, clips=48, levels=5),
    )


def _run(config: TrainConfig, way: str, seed: int) -> Trained:
    begun, finished = time.process_time(), train(config).finished
    so_far = config.out / "processor.txt"
    processor = time.process_time() - begun
    processor += float(so_far.read_text()) if so_far.is_file() else 0.0
    so_far.write_text(repr(processor))
    if not finished:
        raise SystemExit(f"{config.out} was stopped: call again, it goes on")
    log = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    losses, tenth = [line["loss"] for line in log], max(1, len(log) // 10)
    means = [statistics.mean(losses[n : n + tenth]) for n in range(0, len(losses), tenth)]
    lines = (config.out / "validation.jsonl").read_text().splitlines()
    held_out = json.loads(lines[-1])["loss"]
    seconds = log[-1]["seconds"]
    return Trained(way, seed, means, held_out, _digits(config.out), seconds, processor)


def _digits(folder: Path) -> float:
    """Share of made clips whose digit is right: as many of each shape and digit."""
    model, judges = VideoModel.load(folder), train_judges()
    right = []
    for bucket in parse_shapes(SHAPES):
        digits = [n % 10 for n in range(CLIPS)]
        ways = [None if bucket.frames == 1 else n % 4 for n in range(CLIPS)]
        asked = zip(digits, ways, strict=True)
        requests = [Request(sentence(*one), bucket, 10**6 + n) for n, one in enumerate(asked)]
        made = model.generate(requests, show=False)
        right.append(judges.score(made, digits, [None] * CLIPS).digit)
    return statistics.mean(right)
